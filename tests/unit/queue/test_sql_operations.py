"""What queues on both databases do with one message, with dead letters and with lists."""

from typing import Any

import pytest
from sql_queue_stage import AWAY, LOST, TOPIC, WRONG, SqlStage, build_row

from jobsync import OutcomeUnknown
from jobsync.errors import JobsyncError
from jobsync.queue.backend import EndedClaim
from jobsync.queue.directory import Pause, QueueContent
from jobsync.queue.sql import _build_contents, common

LIVE = ["ready", "waiting", "blocked", "claimed"]
OVER = ["completed", "cancelled", "dead"]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([], None),
        ([build_row()], "ready"),
        ([build_row("letters")], None),
        ([build_row("letters", "dead"), build_row("emails", "claimed")], "claimed"),
    ],
)
async def test_a_message_of_another_queue_is_unknown(rows: list[Any], found: str | None) -> None:
    """Each queue shows its own, whatever else has that id."""
    stage = SqlStage(find=[rows])
    info = await stage.backend.get("a")
    assert (None if info is None else info.state) == found
    assert stage.asked == [("_find", ["a"])]


@pytest.mark.parametrize("state", [*LIVE, *OVER, None])
async def test_a_message_that_moves_meanwhile_is_cancelled_all_the_same(state: str | None) -> None:
    """A statement may miss it, so it is looked for again while it is not finished."""
    rows: list[Any] = [] if state is None else [build_row(state=state)]
    stage = SqlStage(find=[rows], cancel=[None, None, (3, "w")])
    ended = await stage.backend.cancel("a")
    if state in LIVE:
        assert ended == EndedClaim(id="a", state="cancelled", attempt=3, session="w")
        assert stage.list_asked("cancel") == [["a"]] * 3
    else:
        assert ended is None
        assert stage.list_asked("cancel") == [["a"]]
    stage = SqlStage(find=[rows], cancel=None)
    assert await stage.backend.cancel("a") is None
    assert len(stage.list_asked("cancel")) == (5 if state in LIVE else 1)


@pytest.mark.parametrize("state", [*LIVE, *OVER, None])
async def test_a_message_that_moves_meanwhile_is_deleted_unless_it_is_claimed(
    state: str | None,
) -> None:
    """Whatever became of it in between: who asks is told what holds."""
    rows: list[Any] = [] if state is None else [build_row(state=state)]
    stage = SqlStage(find=[rows], delete=[False, False, True])
    answer = await stage.backend.delete("a")
    stops = {"claimed": "claimed", None: "absent"}
    assert answer == stops.get(state, "deleted")
    assert len(stage.list_asked("delete")) == (1 if state in stops else 3)
    stage = SqlStage(find=[rows], delete=False)
    assert await stage.backend.delete("a") == stops.get(state, "absent")
    assert stage.access.woken == []


REDRIVES: dict[str, tuple[int | None, int | None, list[Any], int, list[int | None], int | None]] = {
    "all in one part": (None, None, [7], 7, [10], None),
    "all in several": (None, None, [10, 10, 3], 23, [10, 10, 10], 50),
    "no more than there were": (None, None, [10, 10, 5, 9], 25, [10, 10, 5], 15),
    "none left": (None, None, [10], 10, [10], 0),
    "up to a limit": (None, 25, [10, 10, 5, 9], 25, [10, 10, 5], None),
    "fewer than the limit": (None, 25, [10, 3, 9], 13, [10, 10], None),
    "as many as the limit": (None, 10, [10, 9], 10, [10], None),
    "by id": (25, None, [10, 0, 4], 14, [10, 10, 10], None),
    "by id up to a limit": (25, 12, [8, 4, 9], 12, [10, 4], None),
    "by id, none": (0, None, [9], 0, [], None),
}
"""How many ids there are, the limit, how many each part has put back and all together, how many
each part may put back, and how many dead letters are left after the first."""


@pytest.mark.parametrize("name", REDRIVES)
async def test_dead_letters_are_put_back_in_parts_until_they_are_all(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of many, as many as there were; of some, those up to the limit; each id once."""
    count, limit, parts, total, sizes, left = REDRIVES[name]
    monkeypatch.setattr(common, "_REDRIVE_BATCH", 10)
    stage = SqlStage(redrive=[*parts, 0], count=[[("dead", left or 0), ("ready", 99)]])
    ids = None if count is None else [f"id-{n}" for n in range(count)]
    asked = None if ids is None else [*ids, *ids]
    assert await stage.backend.redrive(asked, limit=limit) == total
    chosen = [part for part, _ in stage.list_asked("redrive")]
    assert [size for _, size in stage.list_asked("redrive") if size] == sizes
    if ids is None:
        assert set(chosen) <= {None}
    else:
        assert chosen == [ids[n : n + 10] for n in range(0, len(ids), 10)][: len(sizes)]
    assert stage.access.woken == [TOPIC]


@pytest.mark.parametrize("error", [AWAY, WRONG, LOST])
@pytest.mark.parametrize("done", [[], [10], [10, 10]])
async def test_a_redrive_that_stops_says_what_it_has_done(
    monkeypatch: pytest.MonkeyPatch, done: list[int], error: JobsyncError
) -> None:
    """An error that means that nothing was done is shown only then; workers look in any case."""
    monkeypatch.setattr(common, "_REDRIVE_BATCH", 10)
    stage = SqlStage(redrive=[*done, error], count=[[("dead", 99)]])
    with pytest.raises(type(error) if not done else OutcomeUnknown) as raised:
        await stage.backend.redrive()
    if done and error is not LOST:
        assert f"{sum(done)} messages were queued again before" in str(raised.value)
        assert raised.value.__cause__ is error
    else:
        assert raised.value is error
    assert stage.access.woken == [TOPIC]


@pytest.mark.parametrize("state", [*LIVE, *OVER])
async def test_messages_are_listed_from_where_those_in_their_state_are(state: Any) -> None:
    """With the position and the limit that were asked for."""
    after = "7" if state in LIVE else "1.5 x"
    rows = [build_row(state=state, id=name) for name in "ab"]
    stage = SqlStage(browse_live=[rows], browse_finished=[rows])
    found = await stage.backend.browse(state, after=after, limit=9)
    assert [(each.id, each.state) for each in found] == [("a", state), ("b", state)]
    name = "_browse_live" if state in LIVE else "_browse_finished"
    assert stage.asked == [(name, state, after, 9)]


async def test_what_is_asked_of_all_messages_is_asked_as_it_was() -> None:
    """Ages, limits, reasons, sessions and states; states without messages are not shown."""
    stage = SqlStage(
        forget=3,
        pause=[True, False],
        resume=[True, False],
        count=[[("ready", 2), ("dead", 0)]],
        find_newer=[[(9, 4), (8, 1)]],
        purge=5,
        end_claims=[[]],
    )
    backend = stage.backend
    assert await backend.forget("dead", older_than=7, limit=9) == 3
    assert [await backend.pause("why"), await backend.pause()] == [True, False]
    assert [await backend.resume(), await backend.resume()] == [True, False]
    assert await backend.count() == {"ready": 2}
    assert await backend.find_newer() == {9: 4, 8: 1}
    assert await backend.purge(["dead", "ready"]) == 5
    assert await backend.end_claims(["s"], keep=["a"]) == []
    assert stage.asked == [
        ("_forget", "dead", 7, 9),
        ("_pause", "why"),
        ("_pause", ""),
        ("_resume",),
        ("_resume",),
        ("_count",),
        ("_find_newer",),
        ("_purge", ["dead", "ready"]),
        ("_end_claims", ["s"], ["a"]),
    ]


def test_a_directory_adds_up_the_messages_of_each_queue() -> None:
    """By state and by session; the oldest is that of those which nobody has."""
    found = _build_contents(
        [
            ("b", "dead", "", 2, 1.0),
            ("a", "claimed", "s1", 3, 2.0),
            ("a", "claimed", "s2", 4, 1.5),
            ("a", "waiting", "", 5, 4.0),
            ("a", "ready", "", 6, 3.0),
            ("a", "blocked", "", 7, 5.0),
            ("a", "ready", "", 1, 6.0),
            ("a", "completed", "", 8, 0.5),
            ("c", "blocked", "", 1, 9.0),
        ],
        [("b", 7.0, "why"), ("0", 8.0, "")],
    )
    assert [*found] == ["0", "a", "b", "c"]
    assert found == {
        "0": QueueContent(pause=Pause(8.0, "")),
        "a": QueueContent(
            counts={"claimed": 7, "waiting": 5, "ready": 7, "blocked": 7, "completed": 8},
            oldest=3.0,
            claims={"s1": 3, "s2": 4},
        ),
        "b": QueueContent(counts={"dead": 2}, pause=Pause(7.0, "why")),
        "c": QueueContent(counts={"blocked": 1}, oldest=9.0),
    }
