"""Races on resources; see `racing`."""

import asyncio
import contextlib

from racing import INCREMENTS, TASKS, Start

from jobsync import Conflict, Database, Resource

__all__ = ["add_if_version", "define_at_once"]


async def add_if_version(url: str, key: str, number: int, start: Start) -> int:
    """Increment one record from several tasks by `if_version`; return how much they added."""
    del number
    async with Database(url) as database:
        counters = await database.create_resource("counters", {"n": "integer|required"})
        with contextlib.suppress(Conflict):
            await counters.insert({"id": key, "n": 0})
        start()
        await asyncio.gather(*(_add(counters, key) for _ in range(TASKS)))
    return TASKS * INCREMENTS


async def _add(counters: Resource, name: str) -> None:
    for _ in range(INCREMENTS):
        while True:
            found = await counters.get(name)
            assert found is not None
            try:
                await counters.update(name, {"n": found.n + 1}, if_version=found._version)
            except Conflict:
                continue
            break


async def define_at_once(url: str, key: str, number: int, start: Start) -> list[str]:
    """Define one resource from all processes, each with its own field; return its fields."""
    async with Database(url) as database:
        start()
        await database.create_resource(key, {f"f{number}": "number"})
        start()
        await database.list_resources()
        return sorted(database.resources[key].schema.fields)
