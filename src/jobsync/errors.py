"""All errors that jobsync raises, split by what the caller does about them.

    JobsyncError
    ├── Invalid           the call is wrong: correct the named argument
    │   └── InvalidRecord  fields break the schema: correct all listed fields
    ├── Misconfigured     the setup is wrong: correct the named setting, then start again
    │   └── MissingExtra  a package is not installed: run the command in the message
    ├── NotFound          the thing does not exist: create it first, or ask for another
    ├── NoResult          a message is dead, cancelled or unknown: do not wait for its result
    ├── Conflict          another writer came first: read again, decide again
    │   └── JobRunning    runs of the job must not overlap: wait for its end
    ├── ClaimLost         another node owns the task: do not do it here
    │   └── MessageClaimLost  the claim of a message has ended: its transaction wrote nothing
    ├── Fenced            your term is over, or a newer one has written: stop
    ├── NewerFormat       newer code wrote the record: leave it alone, upgrade this process
    ├── Incomplete        part of a batch was not written: the fields list which part
    ├── Unavailable       the store cannot answer now: try later, nothing was written
    ├── OutcomeUnknown    a write may or may not have happened: assume neither
    └── Corrupt           the store holds something unreadable: it is left as it is

Messages are built from the fields, so they need no parsing. No message and no
repr shows a secret: values that may hold one are masked before they get here.

How to write `problem` and `fix` (`Invalid`, `Misconfigured`, `Problem`). The message is
"<field> <problem> (got <value>). <Fix>.", so

- `problem` is a predicate with the field as its subject, usually "must be …": "must be 0 or
  more", "must not contain NUL", "is not connected". A foreign error's text follows a
  predicate and a colon: f"cannot be opened: {error}".
- `fix` is an imperative that starts with a verb ("use a local disk", "run: pip install …")
  or a question ("did you mean …?").
- Neither is capitalised or ends in a full stop: the message adds both.
- A `value` of "…" stands for one too large to show; the message leaves it out.

`reason` of `Unavailable` and `ClaimLost` is a whole clause ("the server is starting", "node-2
owns it"); `detail` of the others is text that fits in brackets.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jobsync.safe_text import safe_repr

__all__ = [
    "ClaimLost",
    "Conflict",
    "Corrupt",
    "Fenced",
    "Incomplete",
    "Invalid",
    "InvalidRecord",
    "JobRunning",
    "JobsyncError",
    "MessageClaimLost",
    "Misconfigured",
    "MissingExtra",
    "NewerFormat",
    "NoResult",
    "NotFound",
    "OutcomeUnknown",
    "Problem",
    "Unavailable",
]

_MAX_IDS = 3
_find_word_starts = re.compile(r"(?<=[a-z0-9])(?=[A-Z])").sub
_MAX_PROBLEMS = 20


def _sentence(text: str) -> str:
    """Return a fix as a sentence. A command line gets no full stop: it is there to be copied."""
    end = "" if text.endswith((".", "?", "!")) or text.startswith("run: ") else "."
    return f"{text[:1].upper()}{text[1:]}{end}"


class JobsyncError(Exception):
    """Base class of all errors of jobsync."""


class _BadValue(JobsyncError):
    """A named value that is not accepted, with the reason and the fix."""

    def __init__(self, field: str, value: object, problem: str, fix: str) -> None:
        super().__init__(field, value, problem, fix)
        self.field = field
        self.value = value
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        shown = safe_repr(self.value)
        got = "" if shown == "'…'" else f" (got {shown})"
        return f"{self.field} {self.problem}{got}. {_sentence(self.fix)}"


class Invalid(_BadValue):
    """An argument is not accepted. Nothing was written."""


class Problem(NamedTuple):
    """One field of a record that breaks a rule of its schema."""

    field: str
    value: object
    problem: str
    rule: str

    def __str__(self) -> str:
        return f"{self.field} {self.problem} (got {safe_repr(self.value)}, rule {self.rule})"


class InvalidRecord(Invalid):
    """A record breaks its resource's schema. Nothing was written.

    `problems` lists every wrong field; the error's own fields describe the first of them.
    """

    def __init__(self, resource: str, problems: Sequence[Problem]) -> None:
        first = problems[0]
        super().__init__(first.field, first.value, first.problem, f"follow the rule {first.rule}")
        self.resource = resource
        self.problems = tuple(problems)
        self.args = (resource, self.problems)

    def __str__(self) -> str:
        listed = [str(problem) for problem in self.problems[:_MAX_PROBLEMS]]
        if left := len(self.problems) - len(listed):
            listed.append(f"and {left} more")
        return f"{self.resource}: {'; '.join(listed)}"


class Misconfigured(_BadValue):
    """A setting, a file or a server is not usable. Nothing was written."""


class MissingExtra(Misconfigured):
    """A store needs a package that is not installed."""

    def __init__(self, scheme: str, package: str, extra: str) -> None:
        self.install = f"pip install 'jobsync-fleet[{extra}]'"
        super().__init__(
            "url", f"{scheme}://…", f"needs the package {package!r}", f"run: {self.install}"
        )
        self.args = (scheme, package, extra)


class NotFound(JobsyncError):
    """The named thing does not exist."""

    def __init__(
        self, kind: str, name: str, known: Sequence[str] = (), hint: str | None = None
    ) -> None:
        super().__init__(kind, name, tuple(known), hint)
        self.kind = kind
        self.name = name
        self.known = tuple(known)
        self.hint = hint

    def __str__(self) -> str:
        hint = f" Did you mean {self.hint}?" if self.hint else ""
        known = f" Known: {', '.join(self.known)}." if self.known else ""
        return f"There is no {self.kind} {safe_repr(self.name)}.{hint}{known}"


class NoResult(JobsyncError):
    """A message has no result, and will have none: it is dead, cancelled, unknown or forgotten.

    Attributes:
        id: the message.
        state: dead, cancelled, unknown, or completed if its result could not be kept.
        reason: why.
    """

    def __init__(self, id: str, state: str, reason: str) -> None:
        super().__init__(id, state, reason)
        self.id = id
        self.state = state
        self.reason = reason

    def __str__(self) -> str:
        reason = self.reason.rstrip(".")
        return f"Message {safe_repr(self.id)} has no result, it is {self.state}: {reason}."


class _RecordError(JobsyncError):
    """A problem with one record."""

    _message = "{key}{detail}"

    def __init__(self, key: str, detail: str = "") -> None:
        super().__init__(key, detail)
        self.key = key
        self.detail = detail

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return self._message.format(key=self.key, detail=detail)


class Conflict(_RecordError):
    """The record is not, or no longer, what the write was based on."""

    _message = "{key} was changed by another writer{detail}. Read it again and decide again."


class JobRunning(Conflict):
    """A run of the job has not ended, and runs of this job must not overlap."""

    _message = 'Job {key} is running{detail}. Wait for its end, or define it with overlap="queue".'


class OutcomeUnknown(_RecordError):
    """The write may have happened, may yet happen, or may never happen. Assume none of them."""

    _message = "The outcome of the write to {key} is unknown{detail}. Read it before you act."


class Corrupt(_RecordError):
    """A stored record cannot be read. It is reported and left as it is."""

    _message = "{key} cannot be read{detail} and was left as it is. Repair or remove it by hand."


class ClaimLost(JobsyncError):
    """Another node owns the task, or this node may not claim now. Do not do it."""

    def __init__(self, task_id: str, reason: str) -> None:
        super().__init__(task_id, reason)
        self.task_id = task_id
        self.reason = reason

    def __str__(self) -> str:
        return f"Task {self.task_id!r} was not claimed: {self.reason}. Do not do it here."


class MessageClaimLost(ClaimLost):
    """The claim of a message has ended. What its handler's transaction wrote was rolled back."""

    def __str__(self) -> str:
        return (
            f"Message {self.task_id!r} is no longer claimed here: {self.reason}. "
            "Nothing of the transaction was written."
        )


class Fenced(JobsyncError):
    """A newer term has written this record, or the writer's own term is over."""

    def __init__(self, key: str, epoch: int, current: int | None = None) -> None:
        super().__init__(key, epoch, current)
        self.key = key
        self.epoch = epoch
        self.current = current

    def __str__(self) -> str:
        if self.current is None:
            return f"{self.key}: the term of epoch {self.epoch} is over. Stop acting on it."
        if self.current == self.epoch:
            return f"{self.key}: another worker holds epoch {self.epoch} too. Stop acting on it."
        return f"{self.key}: epoch {self.epoch} was replaced by {self.current}. Stop acting on it."


class NewerFormat(JobsyncError):
    """The record was written by newer code and is read-only to this process."""

    def __init__(self, key: str, found: int, known: int) -> None:
        super().__init__(key, found, known)
        self.key = key
        self.found = found
        self.known = known

    def __str__(self) -> str:
        return (
            f"{self.key} has format {self.found}, but this code writes format {self.known}. "
            "It was left as it is. Upgrade jobsync in this process."
        )


class Incomplete(JobsyncError):
    """Part of a batch was not written. The rest was, and stays.

    Attributes:
        resource: name of the resource that the records belong to.
        written: ids that were written.
        conflicts: ids that another writer created or changed: read them, decide again.
        unknown: ids whose outcome is unknown: read them before you act.
        unsent: ids that were not written. The error's cause has the reason, usually a store
            that does not answer: try them again later.
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
        # Keyword arguments are not in `args`.
        return (type(self), self.args, vars(self))

    def __str__(self) -> str:
        parts = {
            "in conflict": self.conflicts,
            "of unknown outcome": self.unknown,
            "not sent": self.unsent,
        }
        counts = (f"{len(ids)} {what} ({_list_ids(ids)})" for what, ids in parts.items() if ids)
        return f"{self.resource}: {len(self.written)} written, {', '.join(counts)}"


def _list_ids(ids: Sequence[str]) -> str:
    return ", ".join(map(safe_repr, ids[:_MAX_IDS])) + (", …" if len(ids) > _MAX_IDS else "")


class Unavailable(JobsyncError):
    """The store cannot answer now. The call that raised this wrote nothing."""

    def __init__(self, store: str, reason: str, fix: str = "try again later") -> None:
        super().__init__(store, reason, fix)
        self.store = store
        self.reason = reason
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.store} is unavailable: {self.reason}. {_sentence(self.fix)}"


def plain_text(value: object) -> str | None:
    """Return a text without what a derived class adds; None if it is not a text.

    What a user passes for a name is compared in this form: its own `==` and hash may raise.
    """
    return str.__str__(value) if issubclass(type(value), str) else None


def closest_name(name: object, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Return the known name that a mistyped one most likely means, or None if none is close.

    The name itself in snake_case comes first: on_message for onMessage.

    `likeness` runs from 0 to 1, the same name.
    """
    text = plain_text(name)
    if text is None:
        return None
    names = list(known)
    # As in JavaScript, where the original of some of these names comes from.
    if (snake := _find_word_starts("_", text).lower()) in names:
        return snake
    matches = difflib.get_close_matches(text, names, n=1, cutoff=likeness)
    return matches[0] if matches else None
