"""Where the records of one job's nodes are. Users' names stand in last segments only."""

from datetime import date

import msgspec

from jobsync.core.keys import escape

__all__ = ["JobKeys"]


class JobKeys(msgspec.Struct, frozen=True):
    """The keys of one fleet that shares tasks; its name is the prefix of its SQL face."""

    name: str

    @property
    def segment(self) -> str:
        """The fleet's name, as it stands in its keys."""
        return escape(self.name, "appname")

    @property
    def settings(self) -> str:
        """What every node must agree on."""
        return f"fleet/{self.segment}"

    @property
    def assignments(self) -> str:
        """The prefix of all assignments, to wait for changes of."""
        return "assignment/"

    @property
    def assignment(self) -> str:
        """Who owns which tokens: the singleton that only the leader writes."""
        return f"{self.assignments}{self.segment}"

    def exceptions(self, name: str) -> str:
        """What the assignment says of tasks that do not follow their token."""
        return f"exceptions/{self.segment}/{name}"

    @property
    def nodes(self) -> str:
        """The prefix of all nodes."""
        return f"node/{self.segment}/"

    def node(self, name: str) -> str:
        """One node's record; its name can be held by one live process at a time."""
        return f"{self.nodes}{escape(name, 'node_name')}"

    @property
    def dates(self) -> str:
        """The prefix of the dates that somebody has worked on."""
        return f"date/{self.segment}/"

    def work_date(self, day: date) -> str:
        """When somebody last began to work on a date."""
        return f"{self.dates}{day.isoformat()}"

    def claims(self, day: date) -> str:
        """The prefix of the claims of a date."""
        return f"claim/{self.segment}/{day.isoformat()}/"

    def claim(self, day: date, token: int, task: str) -> str:
        """One task's claim; those of a token stand together, in order of tokens."""
        return f"{self.claims(day)}{token:06d}.{escape(task, 'task_id')}"

    @property
    def pins(self) -> str:
        """The prefix of all pins."""
        return f"pin/{self.segment}/"

    def pins_of(self, creator: str) -> str:
        """The pins that one node has made."""
        return f"{self.pins}{escape(creator, 'node_name')}"

    @property
    def rebalances(self) -> str:
        """The history of assignments."""
        return f"history/{self.segment}/rebalance"
