"""Expiry of records: a TTL per resource, and what happens when it has passed."""
