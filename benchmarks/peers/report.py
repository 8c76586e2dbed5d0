"""The tables in Markdown: medians, ratios within a round, targets, and how each was configured."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from benchmarks.peers.contenders import (
    BARE,
    GRAPHILE,
    OURS,
    POSTGRES,
    REASONS,
    SQLITE,
    TUNED,
    Part,
)
from benchmarks.peers.environments import NODE_VERSION

__all__ = ["Figure", "Results", "Setting", "render"]

_LABELS: dict[Part, str] = {
    "drain": "drain by one process, messages a second",
    "bulk": "enqueue in batches of 1,000, messages a second",
    "singles": "enqueue one by one by 100 callers at once, messages a second",
    "starts": "enqueue to start in another process that is idle, milliseconds",
}
_SHORT: dict[Part, str] = {
    "drain": "drain",
    "bulk": "batches of 1,000",
    "singles": "100 callers",
    "starts": "start in another process",
}


class Figure(msgspec.Struct, frozen=True):
    """What one contender reached in one round: a rate, or milliseconds."""

    value: float
    p95: float = 0.0
    cpu: float = 0.0
    """Microseconds of its process for a message."""
    server_cpu: float = 0.0
    """Microseconds of PostgreSQL for a message, with connecting."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how it was measured."""

    rounds: int
    postgres: str
    python: str
    cores: int
    load: tuple[float, float]


class Results:
    """The figures of all rounds on one kind of database."""

    def __init__(self) -> None:
        self._figures: dict[tuple[Part, str], list[Figure]] = defaultdict(list)

    def add(self, part: Part, name: str, figure: Figure) -> None:
        """Add a round's figure."""
        self._figures[part, name].append(figure)

    def list_names(self, part: Part) -> list[str]:
        """Return who was measured, the best first."""
        names = [name for each, name in self._figures if each == part]
        return sorted(names, key=lambda name: self.find(part, name), reverse=part != "starts")

    def find(self, part: Part, name: str, field: str = "value") -> float:
        """Return the median of a contender."""
        return float(statistics.median(getattr(each, field) for each in self._figures[part, name]))

    def compare(self, part: Part, one: str, other: str) -> float:
        """Return the median of the ratios within each round; how many times better `one` is."""
        return statistics.median(self.list_ratios(part, one, other))

    def list_ratios(self, part: Part, one: str, other: str) -> list[float]:
        """Return the ratio of each round."""
        pairs = zip(self._figures[part, one], self._figures[part, other], strict=True)
        if part == "starts":
            return [theirs.value / ours.value for ours, theirs in pairs]
        return [ours.value / theirs.value for ours, theirs in pairs]


class _Target(msgspec.Struct, frozen=True):
    """What must be reached, and what was."""

    text: str
    reached: str
    is_met: bool


def render(results: Mapping[str, Results], setting: Setting) -> tuple[str, bool]:
    """Return the page, and whether all targets are met."""
    targets = [*_check_postgres(results["PostgreSQL"]), *_check_sqlite(results["SQLite"])]
    lines = [
        "# Benchmarks",
        "",
        "The queue beside its peers, measured by `make bench-peers`, which writes this page with",
        "`ARGS=--write`. Medians; a ratio is the median of the ratios within each round; in",
        "brackets the least and the greatest of them.",
        "",
        _describe(setting),
        "",
        *_render_targets(targets),
    ]
    for title, found in results.items():
        for part, label in _LABELS.items():
            if found.list_names(part):
                lines += ["", f"## {title}: {label}", "", *_render_part(found, part)]
    lines += ["", "## Where another one is faster", "", *_render_reasons(results)]
    lines += ["", "## How each was configured", "", *_render_configurations()]
    return "\n".join(lines) + "\n", all(target.is_met for target in targets)


def _describe(setting: Setting) -> str:
    peers = sorted({each.title for each in (*POSTGRES, *SQLITE) if each.wheels or each.packages})
    before, after = setting.load
    return (
        f"Versions: {', '.join(peers)}; Python {setting.python}, Node {NODE_VERSION}, PostgreSQL "
        f"{setting.postgres} (fsync on, loopback). {setting.cores} cores, "
        f"rounds: {setting.rounds}, load average {before:.1f} before and {after:.1f} after."
    )


def _check_postgres(found: Results) -> Iterator[_Target]:
    drains = found.list_names("drain")
    if OURS not in drains:
        return
    best = next(name for name in drains if name in (OURS, TUNED))
    if GRAPHILE in drains:
        yield _check_ratio(found, "drain", best, GRAPHILE, 1.1, "PostgreSQL drain")
    yield _check_ratio(found, "drain", best, BARE, 0.5, "PostgreSQL drain")
    peers = [name for name in found.list_names("bulk") if name not in (OURS, BARE)]
    if peers:
        yield _check_ratio(found, "bulk", OURS, peers[0], 3.0, "bulk enqueue")


def _check_sqlite(found: Results) -> Iterator[_Target]:
    drains = found.list_names("drain")
    if OURS not in drains:
        return
    best = next(name for name in drains if name in (OURS, TUNED))
    yield _check_ratio(found, "drain", best, BARE, 0.45, "SQLite drain")
    median = found.find("starts", OURS)
    yield _Target("SQLite start across processes: p50 ≤ 5 ms", f"{median:.1f} ms", median <= 5)


def _check_ratio(
    found: Results, part: Part, ours: str, other: str, least: float, label: str
) -> _Target:
    ratio, ratios = found.compare(part, ours, other), found.list_ratios(part, ours, other)
    text = f"{label} ({ours}) ≥ {least:g}x {other}"
    reached = f"{ratio:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
    return _Target(text, reached, ratio >= least)


def _render_targets(targets: Iterable[_Target]) -> Iterator[str]:
    yield "| target | reached | |"
    yield "|---|---|---|"
    for target in targets:
        yield f"| {target.text} | {target.reached} | {'met' if target.is_met else '**missed**'} |"


def _render_part(found: Results, part: Part) -> Iterator[str]:
    names = found.list_names(part)
    columns = _COLUMNS[part]
    if not any(found.find(part, name, "server_cpu") for name in names):
        columns = [column for column in columns if "PostgreSQL" not in column[0]]
    yield "| " + " | ".join(["queue", *(title for title, _ in columns), "jobsync is"]) + " |"
    yield "|---" + "|---:" * (len(columns) + 1) + "|"
    for name in names:
        cells = [render(found, part, name) for _, render in columns]
        ratio = "" if name == OURS else f"{found.compare(part, OURS, name):.2f}x"
        bold = f"**{name}**" if name in (OURS, TUNED) else name
        yield "| " + " | ".join([bold, *cells, ratio]) + " |"


def _render_reasons(results: Mapping[str, Results]) -> Iterator[str]:
    """Say why, for each row that is better than the best of ours."""
    has_any = False
    for title, found in results.items():
        for part in _LABELS:
            names = found.list_names(part)
            ours = next((place for place, name in enumerate(names) if name in (OURS, TUNED)), 0)
            for name in names[:ours]:
                has_any = True
                reason = REASONS.get((title, part, name), "Not explained yet.")
                yield f"- {title}, {_SHORT[part]}, {name}: {reason}"
    if not has_any:
        yield "Nowhere."


def _render_configurations() -> Iterator[str]:
    yield (
        "All peers store the same messages on the same server, and their handlers do nothing. "
        "A drain counts from the start of the first handler until the last message is settled "
        "in the database; all tables are vacuumed and analyzed before. CPU is microseconds a "
        "message, in the process and in PostgreSQL."
    )
    for title, contenders in (("PostgreSQL", POSTGRES), ("SQLite", SQLITE)):
        yield ""
        for each in contenders:
            yield f"- {title}, {each.name}: {each.configuration}."


_Cell = Callable[[Results, Part, str], str]
_RATE: tuple[str, _Cell] = ("a second", lambda found, part, name: f"{found.find(part, name):,.0f}")
_CPU: list[tuple[str, _Cell]] = [
    ("its CPU", lambda found, part, name: f"{found.find(part, name, 'cpu'):.0f} µs"),
    ("PostgreSQL's", lambda found, part, name: f"{found.find(part, name, 'server_cpu'):.0f} µs"),
]
_TIMES: list[tuple[str, _Cell]] = [
    ("p50", lambda found, part, name: f"{found.find(part, name):.1f} ms"),
    ("p95", lambda found, part, name: f"{found.find(part, name, 'p95'):.1f} ms"),
]
_COLUMNS: dict[Part, list[tuple[str, _Cell]]] = {
    "drain": [_RATE, *_CPU],
    "bulk": [_RATE, *_CPU],
    "singles": [_RATE, *_CPU],
    "starts": _TIMES,
}
