"""What `jobsync doctor` finds out about a store: does it open, write, and keep the contract?"""

from collections.abc import Mapping

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.urls import StoreUrl
from jobsync.errors import Invalid, JobsyncError, Misconfigured, Unavailable
from jobsync.stores.opening import open_bare
from jobsync.stores.probe import Finding, probe
from jobsync.stores.settling import SettlingStore

__all__ = ["examine"]


async def examine(url: StoreUrl) -> list[Finding]:
    """Probe a store, under a name of its own that is removed again."""
    components = Components.system()
    try:
        store = await open_bare(url, components)
    except JobsyncError as error:
        return [_failure("the store can be opened", error)]
    opened = Finding("the store can be opened", ok=True, detail=store.name)
    try:
        findings = await probe(SettlingStore(store, components), components)
    except JobsyncError as error:
        return [opened, _failure("the store can be written", error)]
    finally:
        await store.close()
    return [opened, *findings, *_describe(store.traits)]


def _describe(traits: Mapping[str, Json]) -> list[Finding]:
    """Tell what is no fault and still worth knowing."""
    found = []
    if traits.get("bare_etags"):
        found.append(Finding("ETags", ok=True, detail="this server compares them without quotes"))
    if traits.get("conditional_delete") is False:
        detail = "this server ignores conditions on DELETE: tombstones stay and cost their storage"
        found.append(Finding("burial", ok=True, detail=detail))
    return found


def _failure(check: str, error: JobsyncError) -> Finding:
    match error:
        case Invalid() | Misconfigured():
            return Finding(check, ok=False, detail=error.problem, fix=error.fix)
        case Unavailable():
            return Finding(check, ok=False, detail=error.reason, fix=error.fix)
        case _:
            return Finding(check, ok=False, detail=str(error))
