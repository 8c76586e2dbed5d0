"""Append figures to `proof/runs.jsonl`, with the commit that showed them, and find the last."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["find_last", "record"]

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "proof" / "runs.jsonl"


def record(what: str, **figures: Any) -> None:
    """Append a line with the time, the commit, what was shown, and its figures."""
    line = {"at": int(time.time()), "commit": _describe_commit(), "what": what, **figures}
    with RUNS.open("a", encoding="utf-8") as runs:
        runs.write(json.dumps(line) + "\n")


def find_last(what: str) -> dict[str, Any]:
    """Return the last figures of something; nothing if there are none."""
    lines = map(json.loads, RUNS.read_text(encoding="utf-8").splitlines())
    found: list[dict[str, Any]] = [line for line in lines if line["what"] == what]
    return found[-1] if found else {}


def _describe_commit() -> str:
    """Return the current commit; changes in `proof` do not make it dirty."""

    def git(*arguments: str) -> str:
        result = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT
        )
        return result.stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)proof")
    return git("describe", "--always").strip() + ("-dirty" if changed else "")
