"""The queue beside its peers: on one PostgreSQL server, and on SQLite files of one disk.

Each round has its own databases, and the contenders take turns within each part of it, each time in
another order. A ratio is the median of the rounds' ratios, so that other load on the machine
affects all alike.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from benchmarks.peers.contenders import POSTGRES, SQLITE, Contender, Part
from benchmarks.peers.environments import Environment, install
from benchmarks.peers.program import Program
from benchmarks.peers.report import Figure, Results, Setting, render
from benchmarks.peers.server_cpu import read_cpu
from servers import PostgresServer

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
_LEAST = 1_000
"""Messages of a slow contender: one batch."""


class Round:
    """One round on one kind of database.

    Args:
        kind: of the database, for progress.
        contenders: in this round's order.
        environments: of the contenders.
        locate: creates an empty database for a name, and returns its URL.
        settle: brings a database at rest, before it is drained.
        cpu: returns the CPU seconds of the server so far.
    """

    def __init__(
        self,
        kind: str,
        contenders: Sequence[Contender],
        environments: dict[str, Environment],
        locate: Callable[[str], str],
        settle: Callable[[str], None],
        cpu: Callable[[], float],
    ) -> None:
        self._kind = kind
        self._settle = settle
        self._cpu = cpu
        self._programs: dict[Contender, Program] = {}
        for number, contender in enumerate(contenders):
            environment = environments[contender.name]
            program = Program(
                environment, contender.program, locate(f"peer{number}"), contender.variant
            )
            program.run("prepare")
            self._programs[contender] = program

    def measure(
        self, messages: int, singles: int, starts: int
    ) -> Iterator[tuple[Part, str, Figure]]:
        """Measure each part with all contenders in turn."""
        for contender, program in self._having("drain"):
            figure = self._measure_rate(contender, program, "fill", messages)
            if "bulk" in contender.parts:
                yield "bulk", contender.name, figure
        for program in self._programs.values():
            self._settle(program.url)
        for contender, program in self._having("drain"):
            yield "drain", contender.name, self._measure_rate(contender, program, "drain", messages)
        for contender, program in self._having("starts"):
            _show(f"{self._kind}: {contender.name}: starts")
            took = program.measure_starts(starts)
            p95 = statistics.quantiles(took, n=20)[-1]
            yield "starts", contender.name, Figure(statistics.median(took), p95=p95)
        for contender, program in self._having("singles"):
            yield (
                "singles",
                contender.name,
                self._measure_rate(contender, program, "singles", singles),
            )

    def _having(self, part: Part) -> Iterator[tuple[Contender, Program]]:
        return ((each, program) for each, program in self._programs.items() if part in each.parts)

    def _measure_rate(self, contender: Contender, program: Program, role: str, most: int) -> Figure:
        count = max(_LEAST, round(most * contender.share / _LEAST) * _LEAST)
        _show(f"{self._kind}: {contender.name}: {role} of {count:,}")
        before = self._cpu()
        answer = program.run(role, count)
        return Figure(
            count / answer["seconds"],
            cpu=answer["cpu"] / count * 1e6,
            server_cpu=(self._cpu() - before) / count * 1e6,
        )


def measure_postgres(
    environments: dict[str, Environment], rounds: int, scale: float
) -> Iterator[tuple[Part, str, Figure]]:
    """Measure on one PostgreSQL server."""
    with PostgresServer() as server:
        for number in range(rounds):
            names: list[str] = []

            def locate(name: str, names: list[str] = names) -> str:
                names.append(name)
                return server.create_database(name)

            turn = Round(
                f"round {number + 1} of {rounds}, PostgreSQL",
                _rotate(POSTGRES, number),
                environments,
                locate,
                _vacuum,
                lambda: read_cpu(server),
            )
            yield from turn.measure(
                max(10_000, round(50_000 * scale)), round(3_000 * scale), max(8, round(40 * scale))
            )
            for name in names:
                server.drop_database(name)


def measure_sqlite(
    environments: dict[str, Environment], rounds: int, scale: float
) -> Iterator[tuple[Part, str, Figure]]:
    """Measure on SQLite files."""
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            turn = Round(
                f"round {number + 1} of {rounds}, SQLite",
                _rotate(SQLITE, number),
                environments,
                lambda name, folder=folder: f"sqlite:///{folder}/{name}.db",  # type: ignore[misc]
                lambda _: None,
                lambda: 0.0,
            )
            yield from turn.measure(max(5_000, round(20_000 * scale)), 0, max(8, round(40 * scale)))


def _rotate(contenders: Sequence[Contender], number: int) -> list[Contender]:
    start = number * 2 % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def _vacuum(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def _show(text: str) -> None:
    """Show what is going on: on a terminal in one line, else a line each."""
    sys.stderr.write(f"\r\033[K{text}" if sys.stderr.isatty() else f"{text}\n")
    sys.stderr.flush()


def _describe_server() -> str:
    with PostgresServer() as server, psycopg.connect(server.url) as connection:
        row = connection.execute("SHOW server_version").fetchone()
        assert row is not None
        return str(row[0]).split()[0]


def main() -> int:
    """Measure, print the tables, and compare with the targets."""
    parser = argparse.ArgumentParser(description="the queue beside its peers")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, one round")
    parser.add_argument("--rounds", type=int, default=0, help="3, or 1 if quick")
    parser.add_argument("--only", choices=("sqlite", "postgres"), help="this database alone")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    scale = 0.1 if options.quick else 1.0
    environments = {each.name: install(each.wheels, each.packages) for each in (*POSTGRES, *SQLITE)}
    results = {"PostgreSQL": Results(), "SQLite": Results()}
    before = os.getloadavg()[0]
    if options.only != "sqlite":
        for measured in measure_postgres(environments, rounds, scale):
            results["PostgreSQL"].add(*measured)
    if options.only != "postgres":
        for measured in measure_sqlite(environments, rounds, scale):
            results["SQLite"].add(*measured)
    if sys.stderr.isatty():
        _show("")
    setting = Setting(
        rounds=rounds,
        postgres=_describe_server(),
        python=platform.python_version(),
        cores=os.cpu_count() or 0,
        load=(before, os.getloadavg()[0]),
    )
    text, is_met = render(results, setting)
    print(text)
    if options.write:
        PAGE.write_text(text)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
