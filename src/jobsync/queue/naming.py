"""How a queue is called: its namespace, and the resource whose schema its messages obey."""

__all__ = ["DEFAULT", "name_queue"]

DEFAULT = "default"
"""The namespace of plugins that have none of their own."""


def name_queue(namespace: str, resource: str) -> str:
    """Give the name by which the store knows a queue."""
    return f"{namespace}/{resource}"
