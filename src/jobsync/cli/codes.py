"""What a command's exit tells whoever called it; 0 means that all is well."""

__all__ = ["FAILED", "UNHEALTHY", "USAGE"]

FAILED = 1
USAGE = 2
"""Wrong usage: nothing was done."""
UNHEALTHY = 3
"""The command did its work, and what it looked at is not well."""
