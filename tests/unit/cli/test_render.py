"""How the command line shows values to people."""

import re

import pytest

from jobsync.cli.render import format_time, show_facts


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (1_700_000_000, r"2023-11-1[45] .*"),
        (1_700_000_000_000, "after the year 9999"),
        (253_402_300_799.9, "(9999-12-31|after the year 9999).*"),
        (1e300, "after the year 9999"),
        (-1e12, "before the year 1"),
        (None, "-"),
    ],
)
def test_any_number_of_seconds_is_shown(seconds: object, shown: str) -> None:
    """Also one that no calendar has, such as milliseconds by mistake."""
    assert re.fullmatch(shown, format_time(seconds))


@pytest.mark.parametrize("columns", range(24, 120))
def test_lines_end_between_words_only(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids and names stay whole, in the title and in the facts, at any width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    text = "message 01a1e741-acaa-79ce-addb-ff8a9d94c379 of mail-server is corrupt\tand stays so"
    show_facts(text, [("why", text), ("empty", "")])
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines).split() == [*text.split(), "why", *text.split(), "empty"]
    assert all(len(line) <= columns or len(line.split()[-1]) > 30 for line in lines)
