"""How a queue is called: its namespace, and the resource whose schema its messages obey."""

from jobsync.database.plugin import check_plugin_name
from jobsync.errors import Invalid

__all__ = ["DEFAULT", "name_queue", "read_queue_name"]

DEFAULT = "default"
"""The namespace of plugins that have none of their own."""


def name_queue(namespace: str, resource: str) -> str:
    """Give the name by which the store knows a queue."""
    return f"{namespace}/{resource}"


def read_queue_name(text: str) -> tuple[str, str]:
    """Understand [NAMESPACE/]RESOURCE.

    Raises:
        Invalid: it is no such name.
    """
    namespace, _, resource = text.rpartition("/")
    if not resource or "/" in namespace:
        raise Invalid("queue", text, "is no queue's name", "write tasks, or emails/tasks")
    return check_plugin_name("namespace", namespace or DEFAULT), resource
