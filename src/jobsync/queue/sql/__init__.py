"""The queue backends on SQL: one row a message."""
