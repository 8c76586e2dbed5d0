"""The keys of one fleet's records. Names that users choose are only in the last segment."""

from datetime import date

import msgspec

from jobsync.core.keys import escape

__all__ = ["JobKeys"]


class JobKeys(msgspec.Struct, frozen=True):
    """The keys of one fleet. Its name is also the prefix of its SQL views."""

    name: str

    @property
    def segment(self) -> str:
        """The fleet's name, escaped for use in keys."""
        return escape(self.name, "appname")

    @property
    def settings(self) -> str:
        """The settings that every node must agree on."""
        return f"fleet/{self.segment}"

    @property
    def assignments(self) -> str:
        """The prefix of all assignments, to wait for changes."""
        return "assignment/"

    @property
    def assignment(self) -> str:
        """The owners of the tokens: a singleton that only the leader writes."""
        return f"{self.assignments}{self.segment}"

    def exceptions(self, name: str) -> str:
        """The part of an assignment about tasks that do not follow their token."""
        return f"exceptions/{self.segment}/{name}"

    @property
    def nodes(self) -> str:
        """The prefix of all nodes."""
        return f"node/{self.segment}/"

    def node(self, name: str) -> str:
        """One node's record. One live process at a time can hold its name."""
        return f"{self.nodes}{escape(name, 'node_name')}"

    @property
    def dates(self) -> str:
        """The prefix of the dates that nodes have worked on."""
        return f"date/{self.segment}/"

    def work_date(self, day: date) -> str:
        """The record of when a node last started to work on a date."""
        return f"{self.dates}{day.isoformat()}"

    def claims(self, day: date) -> str:
        """The prefix of the claims of a date."""
        return f"claim/{self.segment}/{day.isoformat()}/"

    def claim(self, day: date, task: str) -> str:
        """One task's claim. Does not depend on the task's token, which may change."""
        return f"{self.claims(day)}{escape(task, 'task_id')}"

    @property
    def pins(self) -> str:
        """The prefix of all pins."""
        return f"pin/{self.segment}/"

    def pins_of(self, creator: str) -> str:
        """The pins that one node has created."""
        return f"{self.pins}{escape(creator, 'node_name')}"

    @property
    def rebalances(self) -> str:
        """The history of rebalances."""
        return f"history/{self.segment}/rebalance"
