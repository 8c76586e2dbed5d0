"""Text that does not show itself. Only `reveal()` gives it: no repr, log or message does.

A plain class and not a struct, so that no encoder writes it out by accident.
"""

from typing import Any, NoReturn

__all__ = ["MASK", "Secret"]

MASK = "***"
"""What stands wherever a secret would have been shown."""


class Secret:
    """A password, a key or a token. Immutable; equal to another one of the same text.

    Args:
        text: what to hide.
    """

    __slots__ = ("_text",)

    _text: str

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "_text", text)

    def reveal(self) -> str:
        """Give the text. Call it where the text is used, and keep the result nowhere."""
        return self._text

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a Secret cannot be changed")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Secret cannot be changed")

    def __repr__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        # A spec could cut or pad; the mask's width must tell nothing either way.
        return MASK

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> tuple[Any, ...]:
        # The default restores by assignment, which is refused above.
        return (Secret, (self._text,))
