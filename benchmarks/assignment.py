"""CPU time and bytes of the leader's decisions in a large fleet.

Each row is one decision of 50 nodes about 50,000 tokens, from plan to plan.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import Row, print_rows

from jobsync.core.assignment import HASH_FUNCTIONS, NodeRef, Plan, count_moved, owned_by, token_of
from jobsync.core.codec import decode, encode
from jobsync.core.handover import assign
from jobsync.core.pins import Pin
from jobsync.core.plan_documents import read_plan, to_document

TOKENS = 50_000
NODES = 50
PINS = 20_000
ROUNDS = 11
CALLS = 100_000


def row(label: str, spent: float, budget: float = 0, note: str = "") -> Row:
    """Return a row; a budget of 0 means none."""
    return Row(
        label=label,
        text=f"{spent:8.1f} ms  {note}",
        budget=f"at most {budget:.0f} ms" if budget else "",
        is_within=not budget or spent <= budget,
        value=spent,
        better="lower",
    )


def spend(call: Callable[[], object]) -> float:
    """Return the CPU time of a call in milliseconds: the median of some rounds."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        call()
        rounds.append((time.process_time() - started) * 1000)
    return median(rounds)


def make_nodes(count: int) -> list[NodeRef]:
    """Return that many nodes; every tenth has a GPU."""
    kinds = ("gpu" if i % 10 == 0 else "cpu" for i in range(count))
    return [NodeRef(f"worker-{i:03d}-x", f"node-{i:02d}-{kind}") for i, kind in enumerate(kinds)]


def make_pins(patterns: Callable[[int], tuple[str, ...]]) -> list[Pin]:
    """Return the pins of that many tasks, each with the patterns of its number."""
    return [
        Pin(task=f"task-{i}", token=token_of(f"task-{i}", TOKENS), patterns=patterns(i))
        for i in range(PINS)
    ]


def settle(plan: Plan, nodes: list[NodeRef], pins: list[Pin]) -> Plan:
    """Decide until nothing changes; all nodes acknowledge at once."""
    while True:
        acks = {node.incarnation: plan.assignment.number for node in nodes}
        after = assign(plan, nodes, acks=acks, pins=pins)
        if after is plan:
            return plan
        plan = after


def measure_tokens() -> Iterator[Row]:
    """Measure decisions without pins."""
    nodes = make_nodes(NODES + 1)
    first, last = nodes[:NODES], nodes[NODES]
    settled = settle(Plan.empty(TOKENS), first, [])
    joined = assign(settled, nodes)
    acks = {node.incarnation: joined.assignment.number for node in nodes}
    dead = {first[0].incarnation}

    def decide(label: str, call: Callable[[], Plan], before: Plan) -> Row:
        moved = count_moved(before.assignment, call().assignment)
        return row(label, spend(call), 100, f"{moved:,} tokens moved")

    yield decide("first assignment", lambda: assign(Plan.empty(TOKENS), first), Plan.empty(TOKENS))
    yield decide("a node joins: revoke", lambda: assign(settled, nodes), settled)
    yield decide("all acknowledge: give", lambda: assign(joined, nodes, acks=acks), joined)
    yield decide("a node dies", lambda: assign(settled, first, dead=dead), settled)
    yield decide("nothing has happened", lambda: assign(settled, first), settled)
    yield from measure_record("record after a join", joined, last)


def measure_pins() -> Iterator[Row]:
    """Measure decisions with pins of several kinds."""
    nodes = make_nodes(NODES)
    yield from measure_kind("one node each", lambda i: (nodes[i % NODES].name,))
    yield from measure_kind("two patterns", lambda i: (f"node-{i % 60:02d}-gpu", f"node-{i % 7}%"))
    yield from measure_kind("nobody matches", lambda i: (f"gone-{i % NODES}", "old-%"))
    yield from measure_kind("a group of nodes", lambda _: ("%-gpu",))


def measure_kind(kind: str, patterns: Callable[[int], tuple[str, ...]]) -> Iterator[Row]:
    """Measure decisions with one kind of pins."""
    nodes, pins = make_nodes(NODES), make_pins(patterns)
    unpinned = settle(Plan.empty(TOKENS), nodes, [])
    pinned = settle(unpinned, nodes, pins)
    note = f"{len(pinned.exceptions.tasks):,} of {PINS:,} tasks apart from their token"
    yield row(f"pins appear: {kind}", spend(lambda: assign(unpinned, nodes, pins=pins)), 150)
    yield row(f"pinned: {kind}", spend(lambda: assign(pinned, nodes, pins=pins)), 150, note)
    yield from measure_record(f"record: {kind}", pinned, nodes[0])


def measure_record(label: str, plan: Plan, node: NodeRef) -> Iterator[Row]:
    """Measure writing and reading a plan, and finding one node's part in it."""
    documents = to_document(plan.assignment), to_document(plan.exceptions)
    texts = [encode(document) for document in documents]
    sizes = " + ".join(f"{len(text):,}" for text in texts)

    def read() -> Plan:
        assignment, exceptions = (decode(text, "plan") for text in texts)
        return read_plan(assignment, exceptions, "plan")

    assert read() == plan
    written = spend(lambda: [encode(to_document(p)) for p in (plan.assignment, plan.exceptions)])
    yield row(f"{label}: write", written, note=f"{sizes} bytes")
    yield row(f"{label}: read", spend(read))
    owned = len(owned_by(plan.assignment, node.incarnation))
    note = f"{owned:,} tokens"
    yield row(f"{label}: one node's", spend(lambda: plan.seen_by(node.incarnation)), note=note)


def measure_hashes() -> Iterator[Row]:
    """Measure hashing tasks to tokens."""
    tasks = [f"task-{i}" for i in range(CALLS)]

    def measure(name: str) -> Row:
        spent = spend(lambda: [token_of(task, TOKENS, name) for task in tasks])
        return row(f"{CALLS:,} tokens by {name}", spent, note=f"{CALLS / spent:,.0f} a ms")

    return map(measure, HASH_FUNCTIONS)


def main() -> int:
    """Measure, and compare with the budgets."""
    parser = argparse.ArgumentParser(description="the leader's decisions")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines")
    as_json = parser.parse_args().json
    if not as_json:
        print(f"CPU time, median of {ROUNDS} rounds: {NODES} nodes, {TOKENS:,} tokens\n")
    rows = itertools.chain(measure_tokens(), measure_pins(), measure_hashes())
    return 0 if print_rows(rows, as_json=as_json) else 1


if __name__ == "__main__":
    sys.exit(main())
