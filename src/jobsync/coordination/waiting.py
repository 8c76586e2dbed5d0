"""Waiting for whichever comes first."""

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["first_of"]


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of several; the others are cancelled. What one raises is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # In this order: a group's own would differ from run to run.
            for task in tasks:
                task.cancel()
