"""Loader for `.sql` files; see `jobsync.stores.sql`."""

from jobsync.stores.sql import fill_in, load_sql

__all__ = ["fill_in", "load_sql"]
