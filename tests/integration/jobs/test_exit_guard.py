"""Whether a block is left at its end, or by somebody who could not wait."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from jobsync.jobs.background import ExitGuard


class Room:
    """Enters and leaves as `Job` does."""

    def __init__(self) -> None:
        self.early: list[bool] = []

    def __enter__(self) -> Self:
        self.entrance = ExitGuard(2)
        return self

    def __exit__(self, *_: object) -> None:
        self.early.append(self.entrance.is_left_early(2))


def leave(room: Room) -> None:
    """Leave from further up the stack, as a signal handler does."""
    room.__exit__(None, None, None)


def test_the_end_of_a_block_is_its_end() -> None:
    """Also of one that a function returns from."""
    with Room() as room:
        pass
    assert room.early == [False]

    def work() -> None:
        with room:
            return

    work()
    assert room.early == [False, False]


def test_a_call_from_within_is_early() -> None:
    """The block has not ended, whoever calls from further up; its end comes after."""
    with Room() as room:
        leave(room)
    assert room.early == [True, False]


def test_a_call_from_another_thread_is_early() -> None:
    """It cannot know where the block stands."""
    with Room() as room:
        thread = threading.Thread(target=leave, args=[room])
        thread.start()
        thread.join()
    assert room.early == [True, False]


def test_a_stack_of_contexts_leaves_at_its_end() -> None:
    """An ExitStack enters and leaves in calls of its own."""
    room = Room()
    with ExitStack() as stack:
        stack.enter_context(room)
    assert room.early == [False]


def test_a_generator_leaves_at_its_end() -> None:
    """A block inside another context manager is left when that one is."""
    room = Room()

    @contextmanager
    def around() -> Iterator[Room]:
        with room:
            yield room

    with around():
        pass
    assert room.early == [False]


def test_the_block_is_forgotten() -> None:
    """Its variables must not live on with the one who remembers it."""
    entrance = ExitGuard(1)
    entrance.release()
    assert entrance._block is None
