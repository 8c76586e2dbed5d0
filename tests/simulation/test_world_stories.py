"""Stories: a seed that breaks one is reported with the command that reproduces it."""

import asyncio
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from jobsync import Conflict, Invalid, NotFound, Store
from jobsync.stores.memory import MemoryStore
from jobsync.testing import (
    INVARIANTS,
    Link,
    Node,
    Occurrence,
    SavedSeed,
    Violation,
    Weather,
    World,
    check_repeats,
    check_story,
    connect,
    find_story,
    load_seeds,
    replay_line,
    require,
    run_story,
)

ROOT = Path(__file__).parents[2]
SAVED = load_seeds(Path(__file__).with_name("seeds.json"))


async def count_up(store: Store, node: Node) -> None:
    """Count with conditional writes."""
    for _ in range(10):
        record = await store.get("n")
        with suppress(Conflict):
            await (store.put(record, record.value + 1) if record else store.create("n", 1))
        await node.clock.sleep(1)


async def fair(world: World) -> None:
    """Two nodes count with undecided writes."""
    shared = MemoryStore(components=world.components)
    for name in "ab":
        node = world.node(name)
        node.run(count_up(connect(node, shared, Weather(undecided=0.2)), node))
    await asyncio.sleep(60)


async def lines_come_once(world: World) -> None:
    """An entry that is appended over a link that doubles requests exists once."""
    shared = MemoryStore(components=world.components)
    link = Link(world, world.node("a"), shared, Weather(doubled=0.5, late_by=10))
    await link.append("h", ["once"])
    await asyncio.sleep(20)
    assert len(await shared.read("h")) == 1


async def unlucky(world: World) -> None:
    """Fails with every third seed."""
    await asyncio.sleep(3600)
    assert world.seed % 3, "a third of all seeds"


async def forgetful(world: World) -> None:
    """Depends on more than its seed."""
    world.note("a", "draw", number=hash("something"))


async def expectant(world: World) -> None:
    """Has a check that fails."""

    def find_jumps(history: list[Occurrence]) -> list[str]:
        return [f"{each.node} jumped" for each in history if each.what == "jump"]

    world.expect(find_jumps)
    world.note("b", "jump")


def test_a_correct_story_passes() -> None:
    """With every seed, by the contract of the store."""
    check_story(fair, seeds=range(10))


def test_the_checks_of_a_story_run() -> None:
    """In addition to the contract of the store."""
    with pytest.raises(AssertionError, match="b jumped"):
        check_story(expectant)


async def impatient(world: World) -> None:
    """Names the promise that is broken."""
    require(world.seed, "QL3", "not drained")
    require(world.seed == 1, "QL2", "not redelivered")


def test_a_violation_names_its_promise() -> None:
    """A check without an id gets "user", and an exception gets "crash"."""
    assert run_story(impatient, 0).violations == [Violation("QL3", "not drained")]
    assert run_story(impatient, 1).violations == []
    assert str(*run_story(impatient, 2).violations) == "QL2: not redelivered"
    assert run_story(expectant, 0).violations == [Violation("user", "b jumped")]
    (crash,) = run_story(unlucky, 3).violations
    assert crash.invariant == "crash"
    assert "a third of all seeds" in crash.detail


def test_an_unknown_id_is_rejected() -> None:
    """So that every id is documented."""
    with pytest.raises(Invalid, match="Q99"):
        Violation("Q99", "whatever")
    assert all(text.endswith(".") for text in INVARIANTS.values())


def test_a_defect_in_the_background_is_a_crash() -> None:
    """It breaks no promise: the code itself is wrong."""
    (found,) = run_story(misspelt, 0).violations
    assert found.invariant == "crash"
    assert "AttributeError" in found.detail


async def misspelt(world: World) -> None:
    """Starts a task that uses an unknown attribute."""

    async def work() -> None:
        world.node("b").clok.mono()  # type: ignore[attr-defined]

    world.node("a").run(work())
    await asyncio.sleep(1)


def test_a_broken_seed_is_reported_with_a_command() -> None:
    """The last line is a command that fails in the same way, in another process."""
    with pytest.raises(AssertionError) as caught:
        check_story(unlucky, seeds=range(1, 20))
    *_, line = str(caught.value).splitlines()
    assert "a third of all seeds" in str(caught.value)
    assert line == replay_line(unlucky, 3)
    ran = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "a third of all seeds" in ran.stdout
    assert run_story(unlucky, 3).fingerprint in ran.stdout


def test_the_command_has_the_path_of_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A story that imports local modules can be run again from the same folder."""
    support = tmp_path / "support folder"
    support.mkdir()
    (support / "worker_of_mine.py").write_text("WORK = 'done'\n")
    (tmp_path / "stories_of_mine.py").write_text(
        "from worker_of_mine import WORK\nasync def story(world):\n    raise RuntimeError(WORK)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(support))
    line = replay_line(find_story("stories_of_mine.py:story"), 5)
    assert "PYTHONPATH='support folder'" in line
    ran = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert "RuntimeError: done" in ran.stdout, ran.stderr


def test_a_story_must_be_importable() -> None:
    """One that is defined within a function is rejected."""

    async def hidden(world: World) -> None: ...

    with pytest.raises(Invalid, match="function of a module"):
        check_story(hidden)


def test_a_wrong_name_is_reported() -> None:
    """Malformed names and missing modules and stories."""
    assert find_story(f"{__file__}:fair") is fair
    assert find_story("jobsync.testing:storm") is not None
    with pytest.raises(Invalid, match="path/to/file"):
        find_story("fair")
    for name in (f"{__file__}:fare", "nowhere.py:story", "jobsync.nowhere:story"):
        with pytest.raises(NotFound):
            find_story(name)


def test_a_story_that_depends_on_more_than_its_seed_is_found() -> None:
    """A history that depends on hash values cannot be reproduced."""
    with pytest.raises(AssertionError, match="PYTHONHASHSEED"):
        check_repeats(forgetful)


def simulate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a campaign on one core."""
    command = [sys.executable, "-m", "jobsync.testing", "simulate", *arguments, "--jobs", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_a_campaign_ends_at_the_first_violation() -> None:
    """It prints the seed and the command that reproduces it."""
    name = f"{Path(__file__).relative_to(ROOT)}:unlucky"
    ran = simulate(name, "--hours", "10", "--first-seed", "4")
    assert ran.returncode == 1, ran.stderr
    assert "seed 6" in ran.stdout
    line = ran.stdout.splitlines()[-1]
    assert shlex.split(line)[-4:] == ["jobsync.testing", "replay", name, "6"]


def test_a_campaign_ends_after_so_many_hours() -> None:
    """Without a violation it prints how much was simulated."""
    name = f"{Path(__file__).relative_to(ROOT)}:fair"
    ran = simulate(name, "--hours", "0.05", "--first-seed", "4")
    assert ran.returncode == 0, ran.stderr
    assert "no violation" in ran.stdout
    ran = simulate("nowhere.py:fair")
    assert ran.returncode == 2
    assert "nowhere.py" in ran.stderr


@pytest.mark.parametrize("saved", SAVED, ids=lambda saved: f"{saved.story}:{saved.seed}")
def test_a_saved_seed_passes(saved: SavedSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that once broke a story does not break it any more."""
    monkeypatch.chdir(ROOT)
    check_story(find_story(saved.story), seeds=[saved.seed])


def test_seeds_are_saved_with_a_reason(tmp_path: Path) -> None:
    """Each states what it revealed."""
    assert SAVED
    assert all(saved.why for saved in SAVED)
    invalid = tmp_path / "seeds.json"
    invalid.write_text('[{"story": "a.py:b", "sead": 1, "why": "typo"}]')
    with pytest.raises(Invalid, match="sead"):
        load_seeds(invalid)


@pytest.mark.parametrize("form", ["stories_again.py", "./stories_again.py", "sub/../{}", "{path}"])
def test_a_file_is_loaded_once(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever form its path is given: a story found again is the same function."""
    name = f"stories_again_{abs(hash(form))}"
    path = tmp_path / f"{name}.py"
    path.write_text("async def story(world): ...\n")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    written = form.replace("stories_again.py", path.name).format(path.name, path=path)
    first = find_story(f"{written}:story")
    known = [*sys.path]
    assert find_story(f"{path}:story") is first
    assert find_story(f"{written}:story") is first
    assert sys.path == known
    assert replay_line(first, 1).endswith(f"replay {path.name}:story 1")


async def numbered(world: World) -> None:
    """Takes two hours with as many faults as its seed, and breaks promises twelve times."""
    node = world.node("a")
    world.expect(lambda _: [Violation("Q1", "at the end")] * 10)
    world.watch(lambda done: [f"saw {done.what}"] if done.what == "kill" else [])
    for _ in range(abs(world.seed) - 1):
        node.pause()
        node.resume()
    node.kill()
    await asyncio.sleep(7200)
    require(world.seed > 0, "Q2", "negative")


def test_a_report_has_what_happened() -> None:
    """The seed, the hours, the faults, the digest, and all violations: what was raised first."""
    ran, again = run_story(numbered, -3), run_story(numbered, -3)
    assert ran == again
    assert (ran.seed, ran.hours, ran.faults) == (-3, 2.0, 3)
    assert [each.invariant for each in ran.violations] == ["Q2", "user", *["Q1"] * 10]
    other = run_story(numbered, 4)
    assert (other.seed, other.hours, other.faults) == (4, 2.0, 4)
    assert other.fingerprint != ran.fingerprint
    assert [each.invariant for each in other.violations] == ["user", *["Q1"] * 10]


def test_a_failure_shows_the_first_ten_violations() -> None:
    """And says how many there are, of the first seed that breaks the story."""
    with pytest.raises(AssertionError) as caught:
        check_story(numbered, seeds=[-3, 5])
    first, *shown, command = str(caught.value).splitlines()
    assert first == "seed -3, 12 violations:"
    assert shown == ["Q2: negative", "user: saw kill", *["Q1: at the end"] * 8]
    assert command.endswith(f"replay -- {Path(__file__).relative_to(Path.cwd())}:numbered -3")
    assert shlex.split(command)[-1] == "-3"


def test_the_contract_of_the_store_is_part_of_each_story() -> None:
    """Commits and replies are checked, whatever a story expects."""
    assert {each.invariant for each in run_story(untrue, 1).violations} == {"C1", "C4"}


async def untrue(world: World) -> None:
    """Notes what contradicts the contract."""
    common = {"key": "n", "base": None, "nonce": "A"}
    world.note("a", "commit", **{**common, "base": "B"}, seq=2, epoch=0, deleted=False)
    world.note("a", "reply", **common, outcome="Refused", since=0)
