"""Where messages stand in a queue: priorities, groups and keys.

Adding to a group, ending its head and holding a key are transactions of several statements. On
PostgreSQL the first ones lock rows of `jobsync_group` and `jobsync_key`, in the order of their
names; the next see all that others have committed before they got these locks. The statements have
the same names for both databases.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jobsync.queue.backend import NewMessage
from jobsync.queue.limits import Allowance, QueueLimits, Usage
from jobsync.stores.sql import Steps

__all__ = ["Places"]


class Places(ABC):
    """The transactions of one queue. Each method returns the statements of one, or of a part.

    Args:
        queue: its name.
        sql: the statements by name.
        as_array: returns a list as the database takes it for a parameter.
        most_heads: how many messages of a group may be in work at a time.
        parameters: of all statements.
    """

    def __init__(
        self,
        queue: str,
        sql: Mapping[str, str],
        as_array: Callable[[list[Any]], str],
        most_heads: int,
        **parameters: Any,
    ) -> None:
        self._most_heads = most_heads
        self._sql = sql
        self._as_array = as_array
        self._parameters = {"queue": queue, **parameters}

    def push(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> Steps[dict[str, str]]:
        """Add messages in order, except those whose keys others hold; return who holds them."""
        texts = {
            message.id: payload.decode()
            for message, payload in zip(new_messages, payloads, strict=True)
        }
        holders = yield from self._hold_keys(new_messages, texts)
        added = [message for message in new_messages if message.id not in holders]
        if added:
            blocked = yield from self._add_to_groups([message.group for message in added])
            yield self._fill("insert_placed", **self._build_rows(added, texts, blocked))
        return holders

    def redrive(self, ids: Collection[str] | None, limit: int) -> Steps[int]:
        """Queue dead letters again; return how many."""
        chosen = self._as_array(list(ids or ()))
        rows = yield self._fill("choose_dead", ids=chosen, all=ids is None, limit=limit)
        if not rows:
            return 0
        blocked = yield from self._add_to_groups([group for _, group in rows])
        names = [name for name, _ in rows]
        behind = [name for name, is_blocked in zip(names, blocked, strict=True) if is_blocked]
        parameters = {"ids": self._as_array(names), "blocked": self._as_array(behind)}
        yield self._fill("insert_redriven", **parameters)
        yield self._fill("delete_redriven", **parameters)
        return len(rows)

    def release(self, names: Iterable[str]) -> Steps[None]:
        """Make the next messages of groups heads: a head was finished for each of the names."""
        ended = Counter(names)
        if not ended:
            return
        before = dict((yield self._fill("lock_groups", names=self._as_array(sorted(ended)))))
        heads = {name: number - ended[name] for name, number in before.items()}
        waiting = {*heads}
        while free := sorted(name for name in waiting if heads[name] < self._most_heads):
            rows = yield self._fill("unblock", names=self._as_array(free))
            waiting = {name for (name,) in rows}
            heads |= {name: heads[name] + 1 for name in waiting}
        if empty := sorted(name for name, number in heads.items() if number <= 0):
            yield self._fill("remove_groups", names=self._as_array(empty))
        changed = {name: n for name, n in heads.items() if n > 0 and n != before[name]}
        if changed:
            names, numbers = self._as_array([*changed]), self._as_array([*changed.values()])
            yield self._fill("set_heads", names=names, numbers=numbers)

    def _add_to_groups(self, groups: Sequence[str | None]) -> Steps[list[bool]]:
        """Lock groups; return for each new message whether others are before it in its group."""
        numbers = Counter(sorted(name for name in groups if name is not None))
        free: Counter[str] = Counter()
        if numbers:
            names, counts = [*numbers], [*numbers.values()]
            rows = yield self._fill(
                "add_groups",
                names=self._as_array(names),
                numbers=self._as_array(counts),
                most_heads=self._most_heads,
            )
            free.update(dict(rows))
        blocked = []
        for name in groups:
            blocked.append(name is not None and free[name] == 0)
            if name is not None and free[name]:
                free[name] -= 1
        return blocked

    def _hold_keys(
        self, new_messages: Sequence[NewMessage], texts: Mapping[str, str]
    ) -> Steps[dict[str, str]]:
        """Hold the keys of new messages; return who holds those that others hold."""
        keyed = {message.key: message for message in new_messages if message.key is not None}
        if not keyed:
            return {}
        rows = yield self._fill("hold_keys", **self._name_holders(keyed))
        others = {key: (holder, until) for key, holder, until in rows if holder != keyed[key].id}
        pending = yield from self._find_pending(
            [holder for holder, until in others.values() if until is None]
        )
        holders: dict[str, str] = {}
        taken: dict[str, NewMessage] = {}
        for key, (holder, until) in others.items():
            message = keyed[key]
            is_held = until is not None or holder in pending
            if is_held and message.replace:
                is_held = yield from self._replace(holder, message, texts[message.id])
            if is_held:
                holders[message.id] = holder
            else:
                taken[key] = message
        if taken:
            yield self._fill("take_keys", **self._name_holders(taken))
        return holders

    def _find_pending(self, ids: list[str]) -> Steps[set[str]]:
        """Return the messages of these that are not finished."""
        if not ids:
            return set()
        found = yield self._fill(
            "find_pending", ids=self._as_array(ids), low=min(ids), high=max(ids)
        )
        return {name for (name,) in found}

    def _replace(self, holder: str, message: NewMessage, text: str) -> Steps[bool]:
        """Replace the message that holds a key; False means that it is claimed or finished."""
        values = {
            "holder": holder,
            "payload": text,
            "max_attempts": message.max_attempts,
            "timeout": message.timeout,
            "task": message.task,
            "lane": message.lane,
            "format": message.format,
        }
        replaced = yield self._fill("replace", **values, **self._build_due(message))
        if replaced:
            # Its time counts from now.
            yield self._fill(
                "take_keys", **self._name_holders({message.key or "": message}, holder)
            )
        return bool(replaced)

    def begin_claim(
        self, limits: QueueLimits, wanted: int, tasks: Sequence[str] = ()
    ) -> Steps[Allowance]:
        """Return what the limits of the queue and its tasks allow to claim; others wait meanwhile.

        Args:
            limits: of the queue.
            wanted: how many messages the caller wants.
            tasks: those whose messages it wants.
        """
        burst = float(limits.burst)
        yield self._fill("lock_limit", burst=burst)
        ((claimed, tokens, is_counting),) = yield self._fill(
            "read_usage", burst=burst, rate=limits.rate
        )
        most = limits.count_allowed(wanted, claimed=claimed, tokens=tokens)
        usage = Usage(most, tokens, bool(is_counting))
        limited: dict[str, Usage] = {}
        if names := limits.find_limited(tasks):
            rows = yield self._fill("read_task_usage", names=self._as_array(names))
            for name, *used in rows:
                limited[name] = _count_task(limits.tasks[name], most, *used)
        return Allowance.build(usage, limited, tasks, limits)

    def end_claim(
        self, limits: QueueLimits, allowance: Allowance, tasks: Sequence[str]
    ) -> Steps[float | None]:
        """Count messages that were claimed; return the seconds until a rate allows one more.

        Args:
            limits: of the queue.
            allowance: what was allowed.
            tasks: of each message that was claimed.
        """
        claimed, waits, left = Counter(tasks), [], {}
        if limits.rate:
            tokens = allowance.queue.tokens - len(tasks)
            waits.append(limits.find_wait(tokens))
            if tasks or not allowance.queue.is_counting:
                # Otherwise nothing changes: a write would wake all who wait for one, to no end.
                yield self._fill("use_tokens", tokens=tokens)
        for name, usage in allowance.limited.items():
            if limits.tasks[name].rate:
                tokens = usage.tokens - claimed[name]
                waits.append(limits.tasks[name].find_wait(tokens))
                if claimed[name] or not usage.is_counting:
                    left[name] = tokens
        if left:
            names, numbers = self._as_array([*left]), self._as_array([*left.values()])
            yield self._fill("use_task_tokens", names=names, numbers=numbers)
        return min((wait for wait in waits if wait is not None), default=None)

    def _fill(self, name: str, **parameters: Any) -> tuple[str, dict[str, Any]]:
        return self._sql[name], {**self._parameters, **parameters}

    @abstractmethod
    def _name_holders(
        self, keyed: Mapping[str, NewMessage], holder: str | None = None
    ) -> dict[str, Any]:
        """Return the parameters that let new messages, or another one, hold keys."""

    @abstractmethod
    def _build_due(self, message: NewMessage) -> dict[str, Any]:
        """Return the parameters that say when a message can be claimed."""

    @abstractmethod
    def _build_rows(
        self,
        new_messages: Sequence[NewMessage],
        texts: Mapping[str, str],
        blocked: Sequence[bool],
    ) -> dict[str, Any]:
        """Return the parameters that add messages, which are blocked or not."""


def _count_task(
    limits: QueueLimits, wanted: int, claimed: int, tokens: float | None, age: float | None
) -> Usage:
    """Return what the limits of a task allow.

    Args:
        limits: of the task.
        wanted: how many messages the limits of its queue allow.
        claimed: how many messages of the task are claimed.
        tokens: how many its rate allowed when they were counted last; None if never.
        age: seconds since then; None if they are not known, because the clock is another one.
    """
    # If it was never counted it is full, and needs not be written.
    is_counting = tokens is None or (age is not None and age >= 0)
    left = limits.burst if tokens is None else tokens + limits.rate * max(0.0, age or 0.0)
    left = min(float(limits.burst), left)
    return Usage(limits.count_allowed(wanted, claimed=claimed, tokens=left), left, is_counting)
