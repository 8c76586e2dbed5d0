"""Recorded tests: when they are recorded again, and which run for a mutant."""

import base64
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import block_recordings
import pytest
from block_recordings import RecordedTest, Recordings, split_by_time
from source_blocks import Block, SourceIndex

SOURCE = """
def first(flag):
    if flag:
        return 1
    return 2


def second():
    return 3
"""
TESTS = ("tests/unit/test_a.py", "tests/unit/test_b.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a module and two test files."""
    for file, text in {"src/module.py": SOURCE, TESTS[0]: "a", TESTS[1]: "b"}.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def recordings(root: Path) -> Recordings:
    """No recordings yet."""
    return Recordings(root / "recordings", root)


def _fact(
    source: SourceIndex,
    test: str,
    lines: Iterable[int],
    seconds: float = 0.1,
    *,
    passed: bool = True,
) -> dict[str, Any]:
    """Return what the recorder reports of a test that runs the blocks which begin at lines."""
    ran = sum(1 << place for place, block in enumerate(source.blocks) if block.first in {*lines})
    packed = zlib.compress(ran.to_bytes(10, "little"))
    return {
        "test": test,
        "seconds": seconds,
        "passed": passed,
        "ran": base64.b64encode(packed).decode(),
    }


def _get_block(source: SourceIndex, line: int) -> Block:
    (block,) = (each for each in source.blocks if each.first == line and not each.runs_at_import)
    return block


def _choose(recordings: Recordings, *blocks: Block) -> list[str]:
    return [test.id.rpartition("::")[2] for test in recordings.choose(blocks)]


def test_only_new_and_changed_test_files_are_recorded(root: Path, recordings: Recordings) -> None:
    """Also in the next run, which reads what was saved."""
    assert recordings.find_missing(TESTS) == [*TESTS]
    recordings.save(SourceIndex(root), TESTS, [])
    assert Recordings(root / "recordings", root).find_missing(TESTS) == []
    (root / TESTS[1]).write_text("changed", encoding="utf-8")
    assert Recordings(root / "recordings", root).find_missing(TESTS) == [TESTS[1]]


def test_a_test_file_that_changes_while_it_is_recorded_is_recorded_again(
    root: Path, recordings: Recordings
) -> None:
    """What was recorded is that of the file as it was when the run began."""
    assert recordings.find_missing(TESTS) == [*TESTS]
    (root / TESTS[1]).write_text("changed", encoding="utf-8")
    recordings.save(SourceIndex(root), TESTS, [])
    assert Recordings(root / "recordings", root).find_missing(TESTS) == [TESTS[1]]


def test_a_test_file_is_recorded_again_if_its_data_have_changed(
    root: Path, recordings: Recordings
) -> None:
    """They are in a file beside it, whose name it has."""
    (root / TESTS[1]).write_text('load("seeds.json")', encoding="utf-8")
    data = (root / TESTS[1]).with_name("seeds.json")
    data.write_text("[1]", encoding="utf-8")
    recordings.save(SourceIndex(root), TESTS, [])
    assert Recordings(root / "recordings", root).find_missing(TESTS) == []
    data.write_text("[1, 2]", encoding="utf-8")
    assert Recordings(root / "recordings", root).find_missing(TESTS) == [TESTS[1]]


def test_tests_that_run_a_block_are_chosen_the_specific_and_quick_first(
    root: Path, recordings: Recordings
) -> None:
    """One test of each function comes before the other parameters; failures are left out."""
    source = SourceIndex(root)
    facts = [
        _fact(source, f"{TESTS[0]}::slow", [4], seconds=9),
        _fact(source, f"{TESTS[0]}::wide", [3, 4, 5, 9]),
        _fact(source, f"{TESTS[1]}::other", [3, 5]),
        _fact(source, f"{TESTS[1]}::fails", [4], passed=False),
        _fact(source, f"{TESTS[1]}::many[1]", [3, 4]),
        _fact(source, f"{TESTS[1]}::many[2]", [3, 4]),
        _fact(source, f"{TESTS[1]}::many[3]", [3, 4]),
    ]
    recordings.save(source, TESTS, facts)
    order = ["many[1]", "many[2]", "wide", "many[3]", "slow"]
    assert _choose(recordings, _get_block(source, 4)) == order
    assert _choose(recordings, _get_block(source, 9)) == ["wide"]


def test_tests_of_files_that_name_what_changes_come_first(
    root: Path, recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that run none of its code; a name that many files have is not used."""
    source = SourceIndex(root)
    (root / TESTS[1]).write_text("assert Box.size == 3", encoding="utf-8")
    (root / TESTS[0]).write_text("assert Boxes and size", encoding="utf-8")
    facts = [_fact(source, f"{TESTS[0]}::runs", [4]), _fact(source, f"{TESTS[1]}::looks", [9], 5.0)]
    recordings.save(source, TESTS, facts)
    block = _get_block(source, 4)

    def choose(*names: str) -> list[str]:
        return [test.id.rpartition("::")[2] for test in recordings.choose([block], names)]

    assert choose() == choose("Bo", "ox.") == ["runs"]
    assert choose("Box") == ["looks", "runs"]
    monkeypatch.setattr(block_recordings, "_FEW_FILES", 1)
    assert choose("size") == ["runs"]


def test_a_recording_of_an_older_source_is_used_by_function_and_file(
    root: Path, recordings: Recordings
) -> None:
    """A block that it does not know was run by those that ran the function, or else the file."""
    source = SourceIndex(root)
    facts = [_fact(source, f"{TESTS[0]}::one", [3]), _fact(source, f"{TESTS[0]}::two", [9])]
    recordings.save(source, TESTS, facts)
    assert recordings.count_outdated(source) == 0
    longer = SOURCE.replace("    return 2", "    for each in ():\n        flag(each)\n    return 2")
    (root / "src/module.py").write_text(f"{longer}\ndef third():\n    return 4\n", encoding="utf-8")
    changed = SourceIndex(root)
    assert recordings.count_outdated(changed) == 2
    assert _choose(recordings, _get_block(changed, 6)) == ["one"]
    assert _choose(recordings, _get_block(changed, 11)) == ["two"]
    assert {*_choose(recordings, _get_block(changed, 14))} == {"one", "two"}


def test_tests_run_in_batches_until_the_time_is_used_up() -> None:
    """A first short batch catches most mutants; a test that is longer than all is run too."""

    def split(*seconds: float) -> list[list[float]]:
        tests = [RecordedTest(id="a", seconds=each, ran=1, blocks=1) for each in seconds]
        return [[test.seconds for test in batch] for batch in split_by_time(tests, 100)]

    assert split(4, 4, 4, 40, 30, 15, 15) == [[4, 4], [4, 40], [30, 15]]
    assert split() == []
    assert split(500, 1) == [[500]]
