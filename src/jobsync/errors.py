"""Every error that jobsync raises, split by what the caller does about it.

    JobsyncError
    ├── Invalid           the call is wrong: correct the argument it names
    │   └── InvalidRecord  fields break the schema: correct all that it lists
    ├── Misconfigured     the set-up is wrong: correct the setting it names, then start again
    │   └── MissingExtra  a package is not installed: run the line it gives
    ├── NotFound          there is no such thing: create it first, or ask for another
    ├── Conflict          somebody else wrote first: read again, decide again
    ├── ClaimLost         the task is another node's: do not do it here
    ├── Fenced            your term is over, or a newer one has written: stop
    ├── NewerFormat       newer code has written: leave it alone, upgrade this process
    ├── Incomplete        part of a batch was not written: see which part, and why
    ├── Unavailable       the store cannot answer now: try later, nothing was written
    ├── OutcomeUnknown    a write may or may not have happened: assume neither
    └── Corrupt           the store holds something unreadable: it is left as it is

Messages are made from the fields, so nobody has to parse them. No message and no
repr shows a secret: values that may hold one arrive here already masked.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = [
    "ClaimLost",
    "Conflict",
    "Corrupt",
    "Fenced",
    "Incomplete",
    "Invalid",
    "InvalidRecord",
    "JobsyncError",
    "Misconfigured",
    "MissingExtra",
    "NewerFormat",
    "NotFound",
    "OutcomeUnknown",
    "Problem",
    "Unavailable",
]


_SHOWN = 120
_NAMED = 3
_LISTED = 20


def _show(value: object) -> str:
    """Give a value's repr, cut to what fits one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


class JobsyncError(Exception):
    """The root of all errors of jobsync."""


class _BadValue(JobsyncError):
    """A named value that cannot be taken, with the reason and the way out."""

    def __init__(self, field: str, value: object, problem: str, fix: str) -> None:
        super().__init__(field, value, problem, fix)
        self.field = field
        self.value = value
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.field}={_show(self.value)}: {self.problem}; {self.fix}"


class Invalid(_BadValue):
    """An argument cannot be taken. Nothing was written."""


class Problem(NamedTuple):
    """One field of a record that breaks a rule of its schema."""

    field: str
    value: object
    problem: str
    rule: str

    def __str__(self) -> str:
        return f"{self.field}={_show(self.value)}: {self.problem} (rule: {self.rule})"


class InvalidRecord(Invalid):
    """A record breaks its resource's schema. Nothing was written.

    `problems` lists every field that is wrong; the error's own fields are the first one's.
    """

    def __init__(self, resource: str, problems: Sequence[Problem]) -> None:
        first = problems[0]
        super().__init__(first.field, first.value, first.problem, f"obey {first.rule}")
        self.resource = resource
        self.problems = tuple(problems)
        self.args = (resource, self.problems)

    def __str__(self) -> str:
        shown = [str(problem) for problem in self.problems[:_LISTED]]
        if left := len(self.problems) - len(shown):
            shown.append(f"and {left} more")
        return f"{self.resource}: {'; '.join(shown)}"


class Misconfigured(_BadValue):
    """A setting, a file or a server is not what it has to be. Nothing was written."""


class MissingExtra(Misconfigured):
    """A store needs a package that is not installed."""

    def __init__(self, scheme: str, package: str, extra: str) -> None:
        self.install = f"pip install 'jobsync-fleet[{extra}]'"
        super().__init__(
            "url", f"{scheme}://…", f"needs the package {package!r}", f"run: {self.install}"
        )
        self.args = (scheme, package, extra)


class NotFound(JobsyncError):
    """There is no such thing."""

    def __init__(
        self, kind: str, name: str, known: Sequence[str] = (), hint: str | None = None
    ) -> None:
        super().__init__(kind, name, tuple(known), hint)
        self.kind = kind
        self.name = name
        self.known = tuple(known)
        self.hint = hint

    def __str__(self) -> str:
        there = f"; there are: {', '.join(self.known)}" if self.known else ""
        meant = f" (did you mean {self.hint}?)" if self.hint else ""
        return f"no {self.kind} {self.name!r}{meant}{there}"


class _AboutKey(JobsyncError):
    """Something about one record."""

    def __init__(self, key: str, detail: str = "") -> None:
        super().__init__(key, detail)
        self.key = key
        self.detail = detail

    _what = "{key}"

    def __str__(self) -> str:
        text = self._what.format(key=self.key)
        return f"{text}: {self.detail}" if self.detail else text


class Conflict(_AboutKey):
    """The record is not, or no longer, what the write was based on."""

    _what = "{key} was written by somebody else; read it again and decide again"


class OutcomeUnknown(_AboutKey):
    """The write may have happened, may yet happen, or may never. Assume neither."""

    _what = "{key}: the outcome of this write is unknown; read it before you act"


class Corrupt(_AboutKey):
    """What is stored cannot be read. It is reported and left as it is."""

    _what = "{key} cannot be read and was left as it is; mend or remove it by hand"


class ClaimLost(JobsyncError):
    """The task is another node's, or this node may not claim now. Do not do it."""

    def __init__(self, task_id: str, reason: str) -> None:
        super().__init__(task_id, reason)
        self.task_id = task_id
        self.reason = reason

    def __str__(self) -> str:
        return f"task {self.task_id!r} was not claimed: {self.reason}; do not do it here"


class Fenced(JobsyncError):
    """A newer term has written this record, or the writer's own is over."""

    def __init__(self, key: str, epoch: int, current: int | None = None) -> None:
        super().__init__(key, epoch, current)
        self.key = key
        self.epoch = epoch
        self.current = current

    def __str__(self) -> str:
        if self.current is None:
            return f"{self.key}: the term of epoch {self.epoch} is over; stop acting on it"
        if self.current == self.epoch:
            return f"{self.key}: another worker holds epoch {self.epoch} too; stop acting on it"
        return f"{self.key}: epoch {self.epoch} was replaced by {self.current}; stop acting on it"


class NewerFormat(JobsyncError):
    """The record was written by newer code and is read-only to this process."""

    def __init__(self, key: str, found: int, known: int) -> None:
        super().__init__(key, found, known)
        self.key = key
        self.found = found
        self.known = known

    def __str__(self) -> str:
        return (
            f"{self.key} has format {self.found}, this code writes {self.known}; "
            "it was left as it is: upgrade jobsync in this process"
        )


class Incomplete(JobsyncError):
    """Part of a batch was not written. The rest was, and stays.

    Attributes:
        resource: whose records they are.
        written: the ids that were written.
        conflicts: the ids that somebody else has, or has changed: read them, decide again.
        unknown: the ids of which nobody can say: read them before you act.
        unsent: the ids of which nothing was written; the error's cause says why, most often
            because the store does not answer: try them again later.
    """

    def __init__(
        self,
        resource: str,
        *,
        written: Sequence[str] = (),
        conflicts: Sequence[str] = (),
        unknown: Sequence[str] = (),
        unsent: Sequence[str] = (),
    ) -> None:
        self.resource = resource
        self.written = tuple(written)
        self.conflicts = tuple(conflicts)
        self.unknown = tuple(unknown)
        self.unsent = tuple(unsent)
        super().__init__(resource)

    def __reduce__(self) -> tuple[object, ...]:
        # Arguments given by name are not in `args`.
        return (type(self), self.args, vars(self))

    def __str__(self) -> str:
        parts = {
            "in conflict": self.conflicts,
            "of unknown outcome": self.unknown,
            "not sent": self.unsent,
        }
        told = (f"{len(ids)} {what} ({_name_some(ids)})" for what, ids in parts.items() if ids)
        return f"{self.resource}: {len(self.written)} written, {', '.join(told)}"


def _name_some(ids: Sequence[str]) -> str:
    return ", ".join(map(_show, ids[:_NAMED])) + (", …" if len(ids) > _NAMED else "")


class Unavailable(JobsyncError):
    """The store cannot answer now. Nothing was written by the call that raised this."""

    def __init__(self, store: str, reason: str, fix: str = "try again later") -> None:
        super().__init__(store, reason, fix)
        self.store = store
        self.reason = reason
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.store}: {self.reason}; {self.fix}"


# Did you mean …? The nearest known name to one that was mistyped.


def closest_name(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Give the known name that is most likely meant, if any is near; 1 is the same name."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return found[0] if found else None
