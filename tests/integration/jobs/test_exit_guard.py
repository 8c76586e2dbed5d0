"""Whether a `with` block is left at its end, or earlier."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from jobsync.jobs.exit_guard import ExitGuard


class Block:
    """Enters and leaves like `Job`."""

    def __init__(self) -> None:
        self.early: list[bool] = []

    def __enter__(self) -> Self:
        self.entrance = ExitGuard(2)
        return self

    def __exit__(self, *_: object) -> None:
        self.early.append(self.entrance.is_left_early(2))


def leave(block: Block) -> None:
    """Leave from further up the stack, as a signal handler does."""
    block.__exit__(None, None, None)


def test_the_end_of_a_block_is_not_early() -> None:
    """Also if a function returns from it."""
    with Block() as block:
        pass
    assert block.early == [False]

    def work() -> None:
        with block:
            return

    work()
    assert block.early == [False, False]


def test_a_call_from_within_is_early() -> None:
    """The block has not ended when a function that it calls leaves."""
    with Block() as block:
        leave(block)
    assert block.early == [True, False]


def test_a_call_from_another_thread_is_early() -> None:
    """It cannot know how far the block is."""
    with Block() as block:
        thread = threading.Thread(target=leave, args=[block])
        thread.start()
        thread.join()
    assert block.early == [True, False]


def test_a_stack_of_contexts_leaves_at_its_end() -> None:
    """An ExitStack enters and leaves in its own calls."""
    block = Block()
    with ExitStack() as stack:
        stack.enter_context(block)
    assert block.early == [False]


def test_a_generator_leaves_at_its_end() -> None:
    """A block inside another context manager is left when that one is."""
    block = Block()

    @contextmanager
    def around() -> Iterator[Block]:
        with block:
            yield block

    with around():
        pass
    assert block.early == [False]


def test_the_block_is_released() -> None:
    """The guard must not keep the block's variables alive."""
    entrance = ExitGuard(1)
    entrance.release()
    assert entrance._block is None
