"""Stories: a seed that breaks one is reported with the line that breaks it again."""

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
    """Count with conditional writes, through whatever comes."""
    for _ in range(10):
        record = await store.get("n")
        with suppress(Conflict):
            await (store.put(record, record.value + 1) if record else store.create("n", 1))
        await node.clock.sleep(1)


async def fair(world: World) -> None:
    """Two nodes count through undecided writes."""
    shared = MemoryStore(components=world.components)
    for name in "ab":
        node = world.node(name)
        node.run(count_up(connect(node, shared, Weather(undecided=0.2)), node))
    await asyncio.sleep(60)


async def lines_come_once(world: World) -> None:
    """What is added to a history over a link that doubles requests is there once."""
    shared = MemoryStore(components=world.components)
    link = Link(world, world.node("a"), shared, Weather(doubled=0.5, late_by=10))
    await link.append("h", ["once"])
    await asyncio.sleep(20)
    assert len(await shared.read("h")) == 1


async def unlucky(world: World) -> None:
    """Ends badly with every third seed."""
    await asyncio.sleep(3600)
    assert world.seed % 3, "a third of all seeds"


async def forgetful(world: World) -> None:
    """Rests on more than its seed."""
    world.note("a", "draw", number=hash("something"))


async def expectant(world: World) -> None:
    """Expects what does not come."""

    def nobody_jumps(history: list[Occurrence]) -> list[str]:
        return [f"{each.node} jumped" for each in history if each.what == "jump"]

    world.expect(nobody_jumps)
    world.note("b", "jump")


def test_a_story_that_holds_says_nothing() -> None:
    """Seed after seed, by the store's contract."""
    check_story(fair, seeds=range(10))


def test_what_a_story_expects_is_checked() -> None:
    """Its own checks count as the contract's do."""
    with pytest.raises(AssertionError, match="b jumped"):
        check_story(expectant)


async def impatient(world: World) -> None:
    """Names the promise that it finds broken."""
    require(world.seed, "QL3", "not drained")
    require(world.seed == 1, "QL2", "not redelivered")


def test_a_violation_names_its_promise() -> None:
    """Whoever names none breaks a promise of its own, or has crashed."""
    assert run_story(impatient, 0).violations == [Violation("QL3", "not drained")]
    assert run_story(impatient, 1).violations == []
    assert str(*run_story(impatient, 2).violations) == "QL2: not redelivered"
    assert run_story(expectant, 0).violations == [Violation("user", "b jumped")]
    (crash,) = run_story(unlucky, 3).violations
    assert crash.invariant == "crash"
    assert "a third of all seeds" in crash.detail


def test_an_unknown_promise_is_refused() -> None:
    """So that no check names one that is not written down."""
    with pytest.raises(Invalid, match="Q99"):
        Violation("Q99", "whatever")
    assert all(text.endswith(".") for text in INVARIANTS.values())


def test_a_defect_in_the_background_is_a_crash() -> None:
    """No promise: the code is not what it was meant to be."""
    (found,) = run_story(misspelt, 0).violations
    assert found.invariant == "crash"
    assert "AttributeError" in found.detail


async def misspelt(world: World) -> None:
    """Starts something that fails by a name that is not there."""

    async def work() -> None:
        world.node("b").clok.mono()  # type: ignore[attr-defined]

    world.node("a").run(work())
    await asyncio.sleep(1)


def test_a_broken_seed_is_reported_with_the_line_that_repeats_it() -> None:
    """The last line is a command; it fails in the same way, in another process."""
    with pytest.raises(AssertionError) as caught:
        check_story(unlucky, seeds=range(1, 20))
    *_, line = str(caught.value).splitlines()
    assert "a third of all seeds" in str(caught.value)
    assert line == replay_line(unlucky, 3)
    ran = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "a third of all seeds" in ran.stdout
    assert run_story(unlucky, 3).fingerprint in ran.stdout


def test_the_line_knows_where_modules_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A story that stands on modules beside it is told again from the same folder."""
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


def test_a_story_must_be_found_again() -> None:
    """One that is defined within a function is refused at once."""

    async def hidden(world: World) -> None: ...

    with pytest.raises(Invalid, match="function of a module"):
        check_story(hidden)


def test_what_is_not_there_is_said() -> None:
    """A wrong name says what is wrong with it."""
    assert find_story(f"{__file__}:fair") is fair
    assert find_story("jobsync.testing:storm") is not None
    with pytest.raises(Invalid, match="path/to/file"):
        find_story("fair")
    for name in (f"{__file__}:fare", "nowhere.py:story", "jobsync.nowhere:story"):
        with pytest.raises(NotFound):
            find_story(name)


def test_a_story_that_rests_on_more_than_its_seed_is_found() -> None:
    """A history that depends on how the process hashes is no history to replay."""
    with pytest.raises(AssertionError, match="PYTHONHASHSEED"):
        check_repeats(forgetful)


def simulate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a campaign on one core."""
    command = [sys.executable, "-m", "jobsync.testing", "simulate", *arguments, "--jobs", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_a_campaign_ends_at_the_first_violation() -> None:
    """It tells the seed, and the line that repeats it."""
    name = f"{Path(__file__).relative_to(ROOT)}:unlucky"
    ran = simulate(name, "--hours", "10", "--first-seed", "4")
    assert ran.returncode == 1, ran.stderr
    assert "seed 6" in ran.stdout
    line = ran.stdout.splitlines()[-1]
    assert shlex.split(line)[-4:] == ["jobsync.testing", "replay", name, "6"]


def test_a_campaign_ends_after_so_many_hours() -> None:
    """Without a violation it says how much was simulated."""
    name = f"{Path(__file__).relative_to(ROOT)}:fair"
    ran = simulate(name, "--hours", "0.05", "--first-seed", "4")
    assert ran.returncode == 0, ran.stderr
    assert "no violation" in ran.stdout
    ran = simulate("nowhere.py:fair")
    assert ran.returncode == 2
    assert "nowhere.py" in ran.stderr


@pytest.mark.parametrize("saved", SAVED, ids=lambda saved: f"{saved.story}:{saved.seed}")
def test_a_saved_seed_holds(saved: SavedSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """What once broke a story does so no more."""
    monkeypatch.chdir(ROOT)
    check_story(find_story(saved.story), seeds=[saved.seed])


def test_seeds_are_saved_with_a_reason(tmp_path: Path) -> None:
    """Each says what it showed."""
    assert SAVED
    assert all(saved.why for saved in SAVED)
    odd = tmp_path / "seeds.json"
    odd.write_text('[{"story": "a.py:b", "sead": 1, "why": "typo"}]')
    with pytest.raises(Invalid, match="sead"):
        load_seeds(odd)
