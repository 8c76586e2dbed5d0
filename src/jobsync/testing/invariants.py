"""What must hold in every history, whatever the weather.

Checked in the order in which the store committed, not in the order in which anybody heard
of it. Each function gives the violations that it found; none is what a run must show.
"""

from collections.abc import Iterable

from jobsync.testing.world import Occurrence

__all__ = ["check_commits", "check_roles", "check_told"]


def check_commits(history: Iterable[Occurrence]) -> list[str]:
    """Check the store's contract: each key is one chain, and no version comes twice."""
    latest: dict[str, Occurrence] = {}
    nonces: set[str] = set()
    violations = []
    for done in (each for each in history if each.what == "commit"):
        facts = done.details
        before = latest.get(facts["key"])
        expected = (before.details["nonce"], before.details["seq"]) if before else (None, 0)
        if (facts["base"], facts["seq"] - 1) != expected:
            violations.append(f"{facts['key']}: a write is not based on the one before it: {done}")
        if facts["nonce"] in nonces:
            violations.append(f"{facts['key']}: a write was applied twice: {done}")
        if before and facts["epoch"] < before.details["epoch"]:
            violations.append(f"{facts['key']}: the epoch went back: {done}")
        nonces.add(facts["nonce"])
        latest[facts["key"]] = done
    return violations


def check_roles(history: Iterable[Occurrence]) -> list[str]:
    """Check that each take of a role has an epoch of its own, higher than all before it."""
    highest: dict[str, int] = {}
    owners: dict[tuple[str, int], str] = {}
    violations = []
    for done in history:
        if done.what != "commit" or not done.details["key"].startswith("role/"):
            continue
        key, role = done.details["key"], done.details["value"]
        if role["epoch"] < highest.get(key, 0):
            violations.append(f"{key}: the epoch went back: {done}")
        owner = role["owner"]
        # A renewal keeps epoch and owner, a release the epoch.
        if owner is not None and owners.setdefault((key, role["epoch"]), owner) != owner:
            violations.append(f"{key}: an epoch has two owners: {done}")
        highest[key] = max(highest.get(key, 0), role["epoch"])
    return violations


def check_told(history: list[Occurrence]) -> list[str]:
    """Check that writers were told the truth: `told` notes hold a nonce and an outcome."""
    applied = {each.details["nonce"] for each in history if each.what == "commit"}
    violations = []
    for told in (each for each in history if each.what == "told"):
        happened = told.details["nonce"] in applied
        if told.details["outcome"] == "Applied" and not happened:
            violations.append(f"told applied, was not: {told}")
        if told.details["outcome"] == "Conflicted" and happened:
            violations.append(f"told conflicted, was applied: {told}")
    return violations
