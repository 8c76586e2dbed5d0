"""The SQLite store: one file, many processes on one machine."""
