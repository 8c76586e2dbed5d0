"""Things by name, readable as `things.name` and as `things["name"]`."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from jobsync.errors import NotFound, closest_name

__all__ = ["Named"]

T = TypeVar("T")


class Named(Generic[T]):
    """A view of things by name; it shows what is there at the time.

    Args:
        kind: what they are, for errors.
        things: where they are kept.
    """

    def __init__(self, kind: str, things: Mapping[str, T]) -> None:
        self._kind = kind
        self._things = things

    def __getitem__(self, name: str) -> T:
        if name not in self._things:
            raise self.lack(name)
        return self._things[name]

    def __getattr__(self, name: str) -> T:
        # Asked only for what is no attribute: also by `copy`, `hasattr` and the like.
        if name.startswith("__") or name not in self._things:
            hint = closest_name(name, self._things)
            raise AttributeError(
                f"no {self._kind} {name!r}" + (f"; did you mean {hint}?" if hint else "")
            )
        return self._things[name]

    def lack(self, name: str) -> NotFound:
        """Give the error that says that there is no such thing, and what was probably meant."""
        hint = closest_name(str(name), self._things)
        return NotFound(self._kind, name, sorted(self._things), hint)

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._things))

    def __len__(self) -> int:
        return len(self._things)

    def __repr__(self) -> str:
        return f"{self._kind}s: {', '.join(self) or 'none'}"
