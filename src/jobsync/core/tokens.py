"""Which token a task belongs to. Every node gives the same answer, in every release.

A task is known by `str(id)`, so that `1` and `"1"` are one task. The three hashes are
those of the original JobSync, number for number: a fleet can change over without a task
changing its token.

    md5             the whole digest as one number; what the guide documents, and the default
    sha256          the digest's first 8 bytes, big-endian
    double_sha256   the same of the digest's digest
"""

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import md5, sha256
from typing import Literal, TypeAlias, get_args

__all__ = ["HASH_FUNCTIONS", "HashFunction", "token_maker", "token_of"]

HashFunction: TypeAlias = Literal["md5", "sha256", "double_sha256"]

HASH_FUNCTIONS: tuple[str, ...] = get_args(HashFunction)
"""The names that `hash_function` takes."""

_number = int.from_bytes


def _token_by_md5(total: int, text: str) -> int:
    # Not for security: where FIPS forbids md5 otherwise, tasks must keep their tokens.
    return _number(md5(text.encode(), usedforsecurity=False).digest()) % total


def _token_by_sha256(total: int, text: str) -> int:
    return _number(sha256(text.encode()).digest()[:8]) % total


def _token_by_double_sha256(total: int, text: str) -> int:
    return _number(sha256(sha256(text.encode()).digest()).digest()[:8]) % total


_MAKERS: Mapping[str, Callable[[int, str], int]] = {
    "md5": _token_by_md5,
    "sha256": _token_by_sha256,
    "double_sha256": _token_by_double_sha256,
}


def token_of(task_id: object, total_tokens: int, hash_function: str = "md5") -> int:
    """Give the token of a task, from 0 to `total_tokens` - 1.

    Nothing is checked here, because this runs for every task of every list: the settings
    check `hash_function` and `total_tokens`, and `Task` checks the id.
    """
    return _MAKERS[hash_function](total_tokens, str(task_id))


def token_maker(total_tokens: int, hash_function: str = "md5") -> Callable[[str], int]:
    """Give the function that gives the token of a task's text, for those who ask often."""
    return partial(_MAKERS[hash_function], total_tokens)
