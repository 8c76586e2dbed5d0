"""Real servers behind a network that loses replies and delivers late.

Every conditional write must settle to the truth or stay unknown; nothing is applied twice,
and nothing is reported as the other outcome.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, NamedTuple

import pytest
from proxy import Proxy

from jobsync import Applied, Components, Conflicted, Put, Record, Store, open_store
from jobsync.stores.contract import Outcome

SEED = 20261115


class Network(NamedTuple):
    """A store through a faulty network, and the same store directly."""

    proxied: Store
    direct: Store
    proxy: Proxy


@pytest.fixture(params=["postgres", "s3"])
async def network(request: pytest.FixtureRequest) -> AsyncIterator[Network]:
    """One store, opened both ways."""
    if request.param == "postgres":
        url = f"{request.getfixturevalue('postgres').url}?schema={request.node.originalname}"
    else:
        url = request.getfixturevalue("bucket_url")
    port = int(url.partition("127.0.0.1:")[2].partition("/")[0])
    direct = await open_store(url)
    with Proxy("127.0.0.1", port) as proxy:
        proxied = await open_store(url.replace(f":{port}/", f":{proxy.port}/"))
        yield Network(proxied, direct, proxy)
        await proxied.close()
    await direct.close()


class Round(NamedTuple):
    """A write through the faulty network, and its reported outcome."""

    key: str
    nonce: str
    rivals: int
    outcome: Outcome


async def strike(network: Network, dice: random.Random, number: int, nonce: str) -> Round:
    """Write once while the network fails, with or without another writer."""
    key = f"n/{number}"
    base: Record | None = None
    if dice.random() < 0.7:
        base = await network.direct.create(key, "base")
        if dice.random() < 0.3:
            base = await network.direct.delete(base)
    fault = dice.choice(["drop_reply", "hold_request", "drop_request"])
    getattr(network.proxy, fault)(when=lambda data: nonce.encode() in data)
    writing = asyncio.create_task(network.proxied.write([Put(key, "mine", base, nonce=nonce)]))
    rivals = 0
    if dice.random() < 0.5:
        await asyncio.to_thread(network.proxy.wait_for, faults=network.proxy.faults + 1)
        rivals = await interfere(network.direct, key, dice.randrange(1, 4))
    if dice.random() < 0.5:
        await asyncio.to_thread(network.proxy.release)
    (outcome,) = await writing
    return Round(key, nonce, rivals, outcome)


async def interfere(store: Store, key: str, times: int) -> int:
    """Write some times as another writer; return how often that succeeded."""
    done = 0
    for _ in range(times):
        current = await store.get(key, tombstones=True)
        (outcome,) = await store.write([Put(key, "rival", current)])
        done += isinstance(outcome, Applied)
    return done


async def test_every_write_settles_to_the_truth(
    network: Network, full_scale: bool, proof: Any, request: pytest.FixtureRequest
) -> None:
    """Each reported outcome agrees with the record, once all late requests have arrived."""
    wanted = 1000 if full_scale else 100
    dice = random.Random(SEED)
    ids = Components.system().ids
    rounds = []
    for number in range(wanted):
        (nonce,) = ids.nonces(1)
        rounds.append(await strike(network, dice, number, nonce))
        if number % 100 == 99:
            proof.tell(f"{number + 1} of {wanted} faults")
    await asyncio.to_thread(network.proxy.release)
    assert network.proxy.faults >= wanted
    counts = {"applied": 0, "conflicted": 0, "unknown": 0}
    for one in rounds:
        record = await network.direct.get(one.key, tombstones=True)
        happened = record is not None and record.remembers(one.nonce)
        match one.outcome:
            case Applied():
                counts["applied"] += 1
                assert happened, one
            case Conflicted():
                counts["conflicted"] += 1
                assert not happened, one
            case _:
                counts["unknown"] += 1
        nonces = record.trail.split(" ") if record else []
        assert len(set(nonces)) == len(nonces), one
        assert len(nonces) == (record.seq if record else 0), one
    assert counts["applied"] > wanted / 4
    assert counts["conflicted"] > wanted / 20
    store = request.node.callspec.params["network"]
    proof.record("lost replies", url=store, faults=network.proxy.faults, **counts)


def _shows(line: str, data: bytes) -> bool:
    return line.encode() in data


async def test_history_survives_lost_replies(network: Network) -> None:
    """Entries whose reply was lost are stored once."""
    lines = [f"line {number}." for number in range(20)]
    for line in lines:
        network.proxy.drop_reply(when=partial(_shows, line))
        await network.proxied.append("history", [line])
    found = [entry.value for entry in await network.direct.read("history")]
    assert sorted(found) == sorted(lines)
