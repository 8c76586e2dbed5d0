"""Fenced writes on every store: a term recognises its own records, however often it writes."""

from jobsync import Components, Store, Term

WRITES = 1_001


async def test_a_term_that_writes_often_keeps_its_other_records(store: Store) -> None:
    """Found: a term knew its last 1,000 writes, so records before those seemed to be another's."""
    replaced: list[int] = []
    term = Term(store, 1, lambda: True, Components.system().ids, replaced.append)
    await term.seal(["single/busy", "single/quiet"])
    for count in range(WRITES):
        await term.put("single/busy", count)
    assert await term.get("single/quiet") is None
    await term.put("single/quiet", "still ours")
    assert await term.get("single/busy") == WRITES - 1
    assert replaced == []
