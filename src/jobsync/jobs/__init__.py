"""Task ownership: every task belongs to one live node."""
