"""A role, as the store has it, and what may be done about it. Pure.

Epochs of a role only grow, and each has one owner. A role is taken from nobody who lives:
it must never have been taken, or have been released, or its owner's death must be written.
"""

from collections.abc import Collection
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from jobsync.core.codec import MAX_INTEGER
from jobsync.core.keys import check_key, escape
from jobsync.errors import Corrupt, Invalid, NewerFormat
from jobsync.stores.contract import Record

__all__ = [
    "REQUESTS",
    "ROLES",
    "MandateVerdict",
    "PastTerm",
    "Request",
    "Role",
    "judge_mandate",
    "name_role",
    "read_request",
    "read_role",
    "worker_of",
]

T = TypeVar("T")

ROLES = "role/"
"""Where roles are."""

REQUESTS = "request/"
"""Where holders are asked to hand over."""


def name_role(namespace: str, work: str) -> str:
    """Give what a role is called in keys and in the sessions of those who stand for it."""
    return f"{escape(namespace, 'namespace')}/{escape(work, 'work')}"


def worker_of(incarnation: str) -> str:
    """Give the worker that an incarnation is a life of."""
    return incarnation.rpartition(".")[0]


Epoch: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_INTEGER)]
"""The number of a term; there is always a next one."""


_KEPT = 8
"""How many terms a role remembers."""


class PastTerm(msgspec.Struct, frozen=True, kw_only=True):
    """A term that is over. For people: who led, and why no longer."""

    epoch: int
    worker: str
    since: float
    ended: float
    """When that was written, by the writer's wall clock."""
    why: str


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads."""

    epoch: Epoch
    owner: str | None
    """The incarnation that holds it; None after a release."""
    since: float
    """When this was written, by the writer's wall clock; for people, and out of courtesy."""
    until: float
    """When the mandate ends, by the same clock; for people too."""
    timeout: Annotated[float, msgspec.Meta(gt=0)]
    """The owner's, in seconds: how long its record must be missed before it counts as dead."""
    successor: str | None = None
    """The incarnation that alone may take it for one beat."""
    former: str | None = None
    """The incarnation that held it last: it may still look as if it stood for it."""
    active: tuple[str, ...] = ()
    """The workers that lived when it was taken."""
    past: tuple[PastTerm, ...] = ()
    """The latest terms that are over, the last one last."""

    def ended(self, why: str, now: float) -> tuple[PastTerm, ...]:
        """Give the past as it is once this term is over, if it is one."""
        if self.owner is None:
            return self.past
        term = PastTerm(
            epoch=self.epoch, worker=worker_of(self.owner), since=self.since, ended=now, why=why
        )
        return (*self.past, term)[-_KEPT:]

    def vacated(self, why: str, now: float, successor: str | None = None) -> "Role":
        """Give the role as its owner leaves it."""
        return msgspec.structs.replace(
            self,
            owner=None,
            successor=successor,
            former=self.owner,
            since=now,
            past=self.ended(why, now),
        )


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody wishes that the holder of an epoch hand over."""

    epoch: Epoch
    """Whose term it is about; void once that is over."""
    by: str
    """The worker that asks."""
    desired: str | None = None
    """The worker that shall lead; anybody else than the holder, if None."""
    forced: bool = False
    """Whether not to wait for the end of the mandate."""


def read_role(record: Record | None) -> Role | None:
    """Understand a role's record; None where there is no role.

    Raises:
        Corrupt: it is not what any version of this library wrote.
        NewerFormat: it is a later version's.
    """
    if record is None or record.deleted:
        return None
    if record.format > 1:
        raise NewerFormat(record.key, record.format, 1)
    role = _convert(record, Role)
    if role.epoch < record.epoch:
        raise Corrupt(record.key, f"epoch {role.epoch} in a record of epoch {record.epoch}")
    for named in (role.owner, role.successor, role.former):
        _check_incarnation(record, named)
    return role


def read_request(record: Record | None, epoch: int) -> Request | None:
    """Understand a request; None where there is none about this epoch.

    Raises:
        Corrupt: it is not what any version of this library wrote.
    """
    if record is None or record.deleted:
        return None
    if record.format > 1:
        raise Corrupt(record.key, f"its format, {record.format}, is newer than this library")
    request = _convert(record, Request)
    return request if request.epoch == epoch else None


def _check_incarnation(record: Record, named: str | None) -> None:
    if named is None:
        return
    try:
        check_key(f"session/{named}")
    except Invalid as error:
        raise Corrupt(record.key, f"names {named!r}, which is no session") from error


def _convert(record: Record, kind: type[T]) -> T:
    try:
        return msgspec.convert(record.value, kind)
    except msgspec.ValidationError as error:
        raise Corrupt(record.key, str(error)) from error


MandateVerdict: TypeAlias = Literal["keep", "renew"] | tuple[Literal["hand over to"], str]
"""What the holder does now; a hand-over names the incarnation that shall follow."""


def judge_mandate(
    request: Request | None,
    *,
    holder: str,
    eligible: Collection[str],
    may_end: bool,
    is_over: bool,
) -> MandateVerdict:
    """Say what a holder does about its mandate.

    Args:
        request: what was asked of it.
        holder: its incarnation.
        eligible: the incarnations that live and do this work.
        may_end: whether it has lasted for the least time.
        is_over: whether it has lasted for the whole time.
    """
    others = sorted(incarnation for incarnation in eligible if incarnation != holder)
    if request is not None and may_end:
        wanted = _choose(request, holder, others, is_over=is_over)
        if wanted is not None:
            return ("hand over to", wanted)
    return "renew" if is_over else "keep"


def _choose(request: Request, holder: str, others: list[str], *, is_over: bool) -> str | None:
    if request.forced:
        named = (each for each in others if request.desired in {None, worker_of(each)})
        return next(named, None)
    # The first of those who sort before the holder leads after it, once its mandate is over.
    return next((each for each in others if each < holder), None) if is_over else None
