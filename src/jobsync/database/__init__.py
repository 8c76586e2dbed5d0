"""Databases: resources for users' records, and the plugins that attach to them."""
