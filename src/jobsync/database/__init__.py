"""Where users keep what their jobs work on, and what every plugin attaches to."""
