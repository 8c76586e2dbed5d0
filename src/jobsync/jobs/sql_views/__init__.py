"""The SQL views of a fleet, and connections to query them."""
