"""When a process counts as alive and as ready, and what `jobsync health` makes of its file."""

import json
import os
from pathlib import Path

import msgspec
import pytest
from chance import FakeClock
from click.testing import CliRunner

from jobsync.cli import health as module
from jobsync.cli.health import HealthState, Heartbeat, health, parse_address, write_heartbeat
from jobsync.core.clock import Wall
from jobsync.errors import Invalid, Misconfigured

NOW = 1_800_000_000.0
STUCK = 301.0


@pytest.mark.parametrize("failure", ["", "the store has changed"])
@pytest.mark.parametrize("reasons", [[], ["no session"]])
@pytest.mark.parametrize("idle", [0.0, STUCK])
def test_what_is_wrong_for_good_comes_before_what_is_wrong_now(
    idle: float, reasons: list[str], failure: str
) -> None:
    """A process that should be restarted is not ready either, for the same reasons."""
    clock = FakeClock()
    state = HealthState(clock, lambda: reasons)
    clock.mono_seconds += STUCK
    state.mark_alive()
    assert (state.live().status, state.live().is_healthy) == ("alive", True)
    state.failure = failure
    clock.mono_seconds += idle
    wrong = [failure] if failure else []
    wrong += ["the event loop has been blocked for 301 s"] if idle else []
    live, ready = state.live(), state.ready()
    assert (live.status, live.reasons) == ("stuck" if wrong else "alive", wrong)
    unready = wrong or reasons
    assert (ready.status, ready.reasons) == ("not_ready" if unready else "ready", unready)
    for report in (live, ready):
        expected = {"reasons": report.reasons} if report.reasons else {}
        assert report.body() == {"status": report.status, **expected}
        assert report.is_healthy is not bool(report.reasons)
    clock.wall_seconds += 3600
    assert state.live() == live


@pytest.mark.parametrize("words", [[], ["--ready"], ["--live"]])
@pytest.mark.parametrize("reasons", [[], ["no session", "no store"]])
@pytest.mark.parametrize(
    ("age", "limit", "is_late"),
    [
        (0.0, None, False),
        (15.0, None, False),
        (16.0, None, True),
        (16.0, "20", False),
        (3.0, "2", True),
        (100.0, "2m", False),
        # The clock was set back meanwhile.
        (-100.0, None, False),
    ],
)
def test_a_process_is_checked_by_its_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    reasons: list[str],
    age: float,
    limit: str | None,
    is_late: bool,
) -> None:
    """Why it cannot work now does not matter to whether it runs; an old file fails both."""
    path = tmp_path / "beat"
    path.write_bytes(msgspec.json.encode(Heartbeat(pid=42, at=NOW - age, reasons=reasons)))
    monkeypatch.setattr(module, "now", lambda: NOW)
    given = [*words, "--heartbeat-file", str(path), "--json"]
    done = CliRunner().invoke(health, [*given, *(["--max-age", limit] if limit else [])])
    is_live = words == ["--live"]
    found = [f"no heartbeat for {age:.0f} s"] if is_late else [] if is_live else reasons
    status = "unhealthy" if found else "alive" if is_live else "ready"
    assert json.loads(done.stdout) == [{"status": status, "pid": 42, "reasons": found}]
    assert done.exit_code == (3 if found else 0)


@pytest.mark.parametrize("words", [[], ["--live"]])
def test_a_process_without_a_file_is_unhealthy(tmp_path: Path, words: list[str]) -> None:
    """A file of something else, or none that can be read, is a mistake of the caller."""
    path = tmp_path / "beat"
    given = [*words, "--heartbeat-file", str(path), "--json"]
    done = CliRunner().invoke(health, given)
    (row,) = json.loads(done.stdout)
    assert (done.exit_code, row["status"], row["pid"]) == (3, "unhealthy", None)
    assert row["reasons"] == [f"{path} does not exist: no process has started to work"]
    path.write_text('{"pid": "42"}')
    error = CliRunner().invoke(health, given).exception
    assert isinstance(error, Misconfigured)
    assert str(error).startswith("--heartbeat-file cannot be read: ")


def test_a_file_has_what_was_found_and_when(tmp_path: Path) -> None:
    """It replaces the one before, and leaves nothing else."""
    path = tmp_path / "beat"
    state = HealthState(FakeClock(), lambda: ["no session"])
    for at in (5.0, 7.5):
        write_heartbeat(path, state.ready(), Wall(at))
        found = msgspec.json.decode(path.read_bytes(), type=Heartbeat)
        assert found == Heartbeat(pid=os.getpid(), at=at, reasons=["no session"])
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8080", ("127.0.0.1", 8080)),
        (":8080", ("127.0.0.1", 8080)),
        ("0", ("127.0.0.1", 0)),
        ("65535", ("127.0.0.1", 65_535)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:80", ("::1", 80)),
        ("::1:80", ("::1", 80)),
        ("host:080", ("host", 80)),
        *((text, None) for text in ("", "host", "host:", "65536", "-1", "80 ", "8.0", "²", "a:²")),
    ],
)
def test_an_address_has_a_port(text: str, address: tuple[str, int] | None) -> None:
    """Without a host, it is reachable from this machine only."""
    if address is not None:
        assert parse_address(text) == address
        return
    with pytest.raises(Invalid, match=r"^--http is not an address") as raised:
        parse_address(text)
    assert raised.value.value == text
