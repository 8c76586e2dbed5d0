"""Stories of schedulers in the simulated world: what happens to processes, jobs and clocks.

`jobsync.testing` checks every commit (K1 to K8), and the fleet its actions (K5). Each story lets
everything calm down and checks that everything was decided and executed (K2, KL2), and if firing
stopped, that it resumed in time (KL1).
"""

import asyncio

from schedule_fleet import BEAT, JOBS, TIMEOUT, ScheduleFleet, SchedulerProcess
from waiting import until

from jobsync.coordination.fleet_clock import MAX_SKEW
from jobsync.core.firing import MAX_RESUMES
from jobsync.core.gaps import OVERLAPPED
from jobsync.testing import (
    Occurrence,
    Violation,
    Weather,
    World,
    draw_forecast,
    mend,
    require,
    storm,
    strikes,
)
from jobsync.testing.nodes import WORLD_START
from jobsync.testing.stories import Story
from jobsync.testing.strikes import STRIKES, Strike

__all__ = [
    "STORIES",
    "asks_for_runs",
    "begins",
    "crowded",
    "cut",
    "deploys",
    "deploys_during_a_run",
    "dies_before_jitter",
    "dies_by_hand",
    "downtime",
    "edits",
    "edits_and_dies",
    "fast_clocks",
    "forgets_history",
    "kill",
    "lacks",
    "leave",
    "lost_replies",
    "mute",
    "outage",
    "pause",
    "pauses_jobs",
    "rare",
    "returns_to_its_run",
    "runs_by_hand",
    "skewed_buckets",
    "skewed_databases",
    "skips_elsewhere",
    "standalone",
    "stormy",
    "stormy_with_suspends",
    "suspend",
    "waits_in_line",
    "wakes_late",
]


MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
ELECTED = TIMEOUT + 2 * BEAT
"""Seconds after which there is a leader again, if the last one died."""
TICK = 1.0
FEW = {name: JOBS[name] for name in ("tick", "queue", "minute", "all")}


async def begins(world: World) -> None:
    """Three processes start at once on an empty store."""
    fleet = ScheduleFleet(world)
    fleet.add_all("abc")
    await asyncio.sleep(2 * MINUTE)
    await fleet.settle()
    require(fleet.count_runs("tick") > 3 * MINUTE, "K2", f"{fleet.count_runs('tick')} ticks")
    for job in JOBS:
        require(fleet.count_runs(job) >= 3, "K2", f"{job}: {fleet.count_runs(job)} runs")


async def run_strike(world: World, strike: Strike, within: float = ELECTED) -> None:
    """The leader is struck for a while: another process fires, and resumes its runs."""
    fleet = ScheduleFleet(world)
    fleet.add_all("abc", FEW)
    leader = await fleet.wait_for_leader()
    await asyncio.sleep(world.dice.uniform(MINUTE, 2 * MINUTE))
    since = world.loop.time()
    await strike([leader.node], world.dice.uniform(0.5, 4) * TIMEOUT)
    await fleet.settle()
    fleet.expect_resumption(since, within + TICK)


async def kill(world: World) -> None:
    """The leader is killed: its runs are resumed when its session is dead."""
    await run_strike(world, strikes.kill)


async def pause(world: World) -> None:
    """The leader is paused: what it does afterwards does not count."""
    await run_strike(world, strikes.pause)


async def cut(world: World) -> None:
    """The leader is cut off from the store."""
    await run_strike(world, strikes.cut)


async def mute(world: World) -> None:
    """The leader receives no replies, and its writes are applied."""
    await run_strike(world, strikes.mute, HOUR)


async def suspend(world: World) -> None:
    """The leader's machine is suspended with its clock."""
    await run_strike(world, strikes.suspend)


async def leave(world: World) -> None:
    """The leader stops cleanly: another one fires within a heartbeat."""
    await run_strike(world, strikes.leave, 2 * BEAT)


async def rare(world: World) -> None:
    """The process of a job dies that is not due for another hour: its run is resumed at once."""
    fleet = ScheduleFleet(world)
    # Worlds begin at 22:13:20.
    job = {"schedule": "15 * * * *", "seconds": 60.0, "at_least": 40.0}
    fleet.add_all("abc", {"rare": job, "tick": JOBS["tick"]})
    await asyncio.sleep(100 + world.dice.uniform(5, 35))
    (leader,) = fleet.leaders
    await strikes.kill([leader.node], MINUTE)
    await fleet.settle(3 * MINUTE)


async def wakes_late(world: World) -> None:
    """A process stands still between its decision to fire and the firing record.

    When it wakes, another one has resumed the run and executes it: it must leave that alone.
    """
    fleet = ScheduleFleet(world)
    job = {"schedule": "15 * * * *", "seconds": 60.0, "at_least": 50.0}
    fleet.add_all("abc", {"rare": job})
    stopped: list[str] = []

    def stop(done: Occurrence) -> list[Violation]:
        is_state = done.what == "commit" and done.details["key"].endswith("/job/rare")
        if is_state and done.details["value"].get("running") and not stopped:
            stopped.append(done.node)
            world.nodes[done.node].pause()
        return []

    world.watch(stop)
    await until(lambda: stopped, "the job is fired", 3 * MINUTE)
    await asyncio.sleep(world.dice.uniform(2, 4) * TIMEOUT)
    world.nodes[stopped[0]].resume()
    await fleet.settle(3 * MINUTE)


async def outage(world: World) -> None:
    """The store is gone for a while, then firing resumes at once."""
    fleet = ScheduleFleet(world)
    nodes = fleet.add_all("abc", FEW)
    await asyncio.sleep(world.dice.uniform(MINUTE, 2 * MINUTE))
    await strikes.cut(nodes, world.dice.choice((10.0, 100.0, 1000.0, 10_000.0)))
    since = world.loop.time()
    await fleet.settle()
    fleet.expect_resumption(since, ELECTED + TICK)


async def lost_replies(world: World) -> None:
    """Replies get lost, and requests are refused or decided by nobody: each instant fires once."""
    fleet = ScheduleFleet(world)
    nodes = fleet.add_all("abc", FEW)
    await asyncio.sleep(10)
    for node in nodes:
        for link in node.links:
            link.weather = Weather(lost=0.2, refused=0.1, unanswered=0.1, undecided=0.1)
    await asyncio.sleep(3 * MINUTE)
    mend(world)
    await fleet.settle()


async def crowded(world: World) -> None:
    """More is due than may run at once: every job gets its turn."""
    fleet = ScheduleFleet(world, max_concurrent_jobs=1)
    overlaps = ("skip", "skip", "allow", "queue", "skip")
    jobs = {
        f"job{n}": {"schedule": "* * * * * *", "seconds": 2.0, "overlap": overlap}
        for n, overlap in enumerate(overlaps)
    }
    fleet.add_all("ab", jobs)
    await asyncio.sleep(MINUTE)
    await fleet.settle()
    runs = {job: fleet.count_runs(job) for job in jobs}
    require(min(runs.values()) > 0.5 * max(runs.values()), "K2", f"unfair: {runs}")


async def fast_clocks(world: World) -> None:
    """Clocks run 5 % fast or slow, and the store is silent at times: nothing fires early."""
    fleet = ScheduleFleet(world)
    nodes = fleet.add_all("abc", FEW)
    await fleet.wait_for_leader()
    for _ in range(4):
        for node in nodes:
            node.clock.rate = world.dice.choice((0.951, 1.049))
        await strikes.cut(nodes, world.dice.uniform(0, MINUTE))
        await asyncio.sleep(world.dice.uniform(0, MINUTE))
    await fleet.settle()


async def edits(world: World) -> None:
    """An operator changes schedules while they fire: nothing of the past is fired."""
    fleet = ScheduleFleet(world)
    jobs = {name: JOBS[name] for name in ("minute", "all", "allow")}
    fleet.add_all("ab", jobs)
    await fleet.wait_for_leader()
    for _ in range(12):
        await asyncio.sleep(world.dice.uniform(1, 40))
        schedule = world.dice.choice(("* * * * * *", "*/20 * * * * *", "* * * * *"))
        process = world.dice.choice([fleet.find_process(name) for name in "ab"])
        job = world.dice.choice(sorted(jobs))
        await fleet.operate(process, job, "update", schedule=schedule)
    await fleet.settle()


BY_HAND = {
    overlap: {"schedule": "0 0 1 1 *", "seconds": 8.0, "overlap": overlap}
    for overlap in ("skip", "queue", "allow")
}
"""Jobs that are not due while a story lasts."""


async def runs_by_hand(world: World) -> None:
    """Jobs that are not due run by hand; callers are cancelled, processes killed, replies lost."""
    dice = world.dice
    fleet = ScheduleFleet(world, enable_coordinator=dice.random() < 0.8)
    fleet.add_all("abc", BY_HAND)
    await asyncio.sleep(TIMEOUT)
    if dice.random() < 0.5:
        for node in world.nodes.values():
            for link in node.links:
                link.weather = Weather(lost=0.2, refused=0.1, unanswered=0.1, undecided=0.1)
    for _ in range(40):
        await asyncio.sleep(dice.uniform(0, 5))
        started = fleet.started
        if not started:
            continue
        process, job = dice.choice(started), dice.choice(sorted(BY_HAND))
        patience = dice.choice((0.02, 0.1, 1.0, 60.0)) * dice.random()
        world.start(fleet.run_by_hand(process, job, patience))
        if dice.random() < 0.1:
            world.start(strikes.kill([process.node], dice.uniform(0, TIMEOUT)))
    mend(world)
    await fleet.settle(3 * MINUTE)
    await check_runs_by_hand(fleet)


async def skips_elsewhere(world: World) -> None:
    """A process that does not lead runs a job by hand: what is due meanwhile is skipped for it."""
    fleet = ScheduleFleet(world)
    jobs = {"slow": {"schedule": "*/10 * * * * *", "seconds": 9.0, "at_least": 1.0}}
    fleet.add_all("abc", jobs)
    leader = await fleet.wait_for_leader()
    for _ in range(8):
        await asyncio.sleep(world.dice.uniform(0, 10 * MINUTE))
        others = [each for each in fleet.processes if each is not leader]
        await fleet.run_by_hand(world.dice.choice(others), "slow", 10 * MINUTE)
    await fleet.settle()
    reasons = {gap["reason"] for gap in fleet.list_gaps("slow")}
    require(reasons == {OVERLAPPED}, "K2", f"other reasons than the run before: {reasons}")


async def waits_in_line(world: World) -> None:
    """Runs by hand and runs that were asked for get their turn, though there is too much to do."""
    fleet = ScheduleFleet(world)
    jobs = {
        "busy": {"schedule": "* * * * * *", "seconds": 2.0, "at_least": 1.2, "overlap": "queue"},
        "idle": {"schedule": "0 0 1 1 *", "seconds": 0.5, "overlap": "queue"},
    }
    fleet.add_all("abcd", jobs)
    await fleet.wait_for_leader()
    await asyncio.sleep(MINUTE)
    longest = dict.fromkeys(jobs, 0.0)
    end = world.loop.time() + 2 * MINUTE

    async def run_again_and_again(name: str, job: str) -> None:
        while world.loop.time() < end:
            begun = world.loop.time()
            await fleet.run_by_hand(fleet.find_process(name), job, 4 * MINUTE)
            longest[job] = max(longest[job], world.loop.time() - begun)

    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            for job in jobs:
                group.create_task(run_again_and_again(name, job))
        for _ in range(4):
            await asyncio.sleep(world.dice.uniform(0, 30))
            await fleet.operate(fleet.find_process("a"), world.dice.choice([*jobs]), "request")
    # Five in line, each with a run of two seconds at most and a moment to notice its turn.
    require(max(longest.values()) < 5 * 4.0 + BEAT, "KL2", f"a run by hand waited {longest} s")
    await fleet.settle()


async def asks_for_runs(world: World) -> None:
    """Operators ask for runs, and the store often does not answer: each run starts soon."""
    fleet = ScheduleFleet(world)
    nodes = fleet.add_all("ab", BY_HAND)
    await fleet.wait_for_leader()
    for _ in range(30):
        process = fleet.find_process(world.dice.choice("ab"))
        await fleet.operate(process, world.dice.choice(sorted(BY_HAND)), "request")
        for node in nodes:
            for link in node.links:
                link.weather = Weather(refused=0.4, unanswered=0.2, patience=1.0)
        await asyncio.sleep(world.dice.uniform(0, 3 * BEAT))
        mend(world)
    await fleet.settle()


async def dies_by_hand(world: World) -> None:
    """A process dies at one of the writes of its run by hand, whether it leads or not."""
    fleet = ScheduleFleet(world)
    fleet.add_all("abc", BY_HAND)
    await fleet.wait_for_leader()
    await asyncio.sleep(TIMEOUT)
    job, place = world.dice.choice(sorted(BY_HAND)), world.dice.choice(("edits/", "job/", "run/"))
    leads = world.dice.random() < 0.5
    victim = next(each for each in fleet.processes if each.is_coordinator == leads)
    struck: list[str] = []

    def strike(done: Occurrence) -> list[Violation]:
        is_write = done.what == "commit" and f"/{place}" in done.details["key"]
        if is_write and done.node == victim.node.name and not struck:
            struck.append(done.node)
            victim.node.kill()
        return []

    world.watch(strike)
    world.start(fleet.run_by_hand(victim, job, 60.0))
    await until(lambda: struck, "it is killed", MINUTE)
    await fleet.settle(2 * MINUTE)
    await check_runs_by_hand(fleet)


async def check_runs_by_hand(fleet: ScheduleFleet) -> None:
    """Check that nothing keeps the jobs from being run by hand, in any process that lives."""
    for process in fleet.started:
        for job in BY_HAND:
            runs = fleet.count_runs(job)
            await fleet.run_by_hand(process, job, 30.0)
            require(fleet.count_runs(job) == runs + 1, "KL2", f"{job} is blocked")


async def forgets_history(world: World) -> None:
    """Old history is removed while instants wait in a queue: no run loses its record."""
    fleet = ScheduleFleet(world, history_limit=1, history_retention=world.dice.choice((1.0, 1e6)))
    queue = {"schedule": "* * * * * *", "seconds": 4.0, "overlap": "queue"}
    fleet.add_all("ab", {"queue": queue, "tick": JOBS["tick"]})
    await asyncio.sleep(3 * MINUTE)
    await fleet.settle()


async def pauses_jobs(world: World) -> None:
    """An operator pauses jobs, edits them meanwhile, and resumes them: all is in the history."""
    fleet = ScheduleFleet(world)
    fleet.add_all("ab", FEW)
    leader = await fleet.wait_for_leader()
    await asyncio.sleep(10)
    for job in FEW:
        await fleet.operate(leader, job, "disable", reason="maintenance")
    await asyncio.sleep(world.dice.uniform(MINUTE, 2 * MINUTE))
    runs = {job: fleet.count_runs(job) for job in FEW}
    await fleet.operate(leader, "all", "update", schedule="*/25 * * * * *")
    await asyncio.sleep(MINUTE)
    require(runs == {job: fleet.count_runs(job) for job in FEW}, "K2", "fired while paused")
    for job in FEW:
        await fleet.operate(leader, job, "enable")
    await fleet.settle()
    for job in FEW:
        reasons = [gap["reason"] for gap in fleet.list_gaps(job)]
        require(any("maintenance" in reason for reason in reasons), "K2", f"{job}: {reasons}")


async def deploys(world: World) -> None:
    """Processes are replaced one by one by those of newer code, with other schedules and jobs."""
    fleet = ScheduleFleet(world)
    fleet.add_all("abc", FEW)
    await asyncio.sleep(MINUTE)
    newer = {**FEW, "minute": {**JOBS["minute"], "schedule": "*/15 * * * * *"}}
    newer["timely"] = JOBS["timely"]
    for old, new in zip("abc", "def", strict=True):
        fleet.add(new, newer)
        await asyncio.sleep(world.dice.uniform(1, 20))
        await world.nodes[old].stop()
        await asyncio.sleep(world.dice.uniform(1, 20))
    await fleet.settle()
    require(fleet.count_runs("timely") > 0, "K2", "a new job was never fired")


async def deploys_during_a_run(world: World) -> None:
    """All processes are replaced again and again during one run: it is handed over, and ends."""
    fleet = ScheduleFleet(world)
    job = {"schedule": "15 * * * *", "seconds": 60.0, "at_least": 50.0}
    nodes = fleet.add_all("ab", {"long": job, "tick": JOBS["tick"]})
    await until(lambda: fleet.count_runs("long"), "it is fired", 3 * MINUTE)
    for _ in range(MAX_RESUMES + 1):
        await asyncio.sleep(world.dice.uniform(0, 20))
        await strikes.leave([world.nodes[node.name] for node in nodes], 2.0)
    await fleet.settle(3 * MINUTE)
    require(fleet.list_statuses("long") == ["success"], "K2", f"{fleet.list_statuses('long')}")


async def dies_before_jitter(world: World) -> None:
    """The leader dies between an instant and the end of its jitter: another one fires it."""
    fleet = ScheduleFleet(world)
    job = {"schedule": "15 * * * *", "seconds": 1.0, "jitter": 60.0}
    jobs = {f"late-{number}": job for number in range(6)}
    fleet.add_all("abc", {**jobs, "tick": JOBS["tick"]})
    await asyncio.sleep(100 + world.dice.uniform(10, 50))
    (leader,) = fleet.leaders
    await strikes.kill([leader.node], MINUTE)
    await fleet.settle(3 * MINUTE)
    for name in jobs:
        require(fleet.count_runs(name) == 1, "K2", f"{name}: {fleet.count_runs(name)} runs")


async def edits_and_dies(world: World) -> None:
    """Operators change rare jobs in any order, and the leader dies: its successor knows of it."""
    fleet = ScheduleFleet(world)
    jobs = {f"yearly-{number}": {"schedule": "0 0 1 1 *", "seconds": 1.0} for number in range(4)}
    fleet.add_all("abc", {**jobs, "tick": JOBS["tick"]})
    await fleet.wait_for_leader()
    for _ in range(3):
        for job in jobs:
            deeds = ["update", *world.dice.choices(["disable", "enable", "request"], k=3), "enable"]
            for deed in deeds:
                options = {"schedule": "*/10 * * * * *"} if deed == "update" else {}
                await fleet.operate(world.dice.choice(fleet.started), job, deed, **options)
        await asyncio.sleep(world.dice.uniform(0, 2 * BEAT))
        leader = await fleet.wait_for_leader()
        since = world.loop.time()
        await strikes.kill([leader.node], 2 * TIMEOUT)
        for job in jobs:
            fleet.expect_resumption(since, ELECTED + 10.0 + TICK, job)
    await fleet.settle()


async def lacks(world: World) -> None:
    """The leader's code lacks jobs: members that have them fire them, also one after the other."""
    fleet = ScheduleFleet(world)
    fleet.add("a", {"tick": JOBS["tick"]})
    await fleet.wait_for_leader()
    fleet.add_all("bc", FEW)
    await asyncio.sleep(MINUTE)
    since = world.loop.time()
    await strikes.kill([world.nodes["b"]], 2 * MINUTE)
    await fleet.settle()
    fleet.expect_resumption(since, ELECTED + 15.0, "all")
    for job in FEW:
        require(fleet.count_runs(job) >= 3, "K2", f"{job}: {fleet.count_runs(job)} runs")


async def returns_to_its_run(world: World) -> None:
    """A process that alone has the jobs stands still, and resumes in its next session what it runs.

    The plain function that it began goes on meanwhile: nobody can cancel it.
    """
    fleet = ScheduleFleet(world)
    fleet.add("a", {"tick": JOBS["tick"]})
    await fleet.wait_for_leader()
    long = {"schedule": "* * * * *", "seconds": 200.0, "at_least": 100.0, "timeout": None}
    jobs = {"function": {**long, "is_function": True}, "coroutine": long}
    node = fleet.add("b", jobs)
    await until(lambda: all(map(fleet.count_runs, jobs)), "both have begun", 5 * MINUTE)
    await asyncio.sleep(world.dice.uniform(0, 30))
    await strikes.pause([node], world.dice.uniform(2, 4) * TIMEOUT)
    await fleet.settle(6 * MINUTE)
    for job in jobs:
        require(fleet.count_attempts(job) > fleet.count_runs(job), "K5", f"{job} was not resumed")


async def standalone(world: World) -> None:
    """Without an election every process fires, and the store lets one of them."""
    fleet = ScheduleFleet(world, enable_coordinator=False)
    fleet.add_all("abc", FEW)
    await asyncio.sleep(MINUTE)
    since = world.loop.time()
    await strikes.kill([world.nodes["a"]], MINUTE)
    await fleet.settle()
    fleet.expect_resumption(since, ELECTED + TICK)


async def skewed_databases(world: World) -> None:
    """Clocks are 90 s apart: the database's clock decides, whoever leads."""
    fleet = ScheduleFleet(world)
    await run_skewed(fleet, "tick")


async def skewed_buckets(world: World) -> None:
    """Clocks are 90 s apart, and the store has none: only a leader whose clock is right fires."""
    fleet = ScheduleFleet(world, has_clock=False)
    await run_skewed(fleet, "tick")


async def run_skewed(fleet: ScheduleFleet, job: str) -> None:
    """Start processes with wrong clocks first, then one whose clock is right."""
    world = fleet.world
    for name, skew in zip("abc", world.dice.sample((-90.0, 90.0, 0.0), 3), strict=True):
        fleet.add(name, FEW, skew=skew)
        await asyncio.sleep(world.dice.uniform(0, 20))
    since = world.loop.time()
    await asyncio.sleep(MINUTE)
    await strikes.kill([(await fleet.wait_for_leader()).node], 10.0)
    await fleet.settle()
    fleet.expect_resumption(since, ELECTED + 2 * BEAT, job)


async def downtime(world: World) -> None:
    """All processes are gone, for up to three years: a bounded catch-up, and one gap for a job."""
    fleet = ScheduleFleet(world)
    # Due when nobody is there, and long past when they are back.
    late = {"schedule": "15 * * * *", "misfire": "skip"}
    nodes = fleet.add_all("ab", {**FEW, "late": late})
    await asyncio.sleep(MINUTE)
    gaps = {job: len(fleet.list_gaps(job)) for job in FEW}
    await strikes.power_off(nodes, world.dice.choice((HOUR, 3 * 365 * DAY)))
    since = world.loop.time()
    await fleet.settle()
    fleet.expect_resumption(since, ELECTED + TICK)
    for job in FEW:
        missed = [gap for gap in fleet.list_gaps(job)[gaps[job] :] if gap["status"] == "missed"]
        long = [gap for gap in missed if gap["scheduled_time"] - gap["first"] > 0.9 * HOUR]
        require(len(long) == 1, "K2", f"{job}: the downtime is in {missed}")
    require(len(fleet.list_gaps("late")) == 1, "K2", f"{fleet.list_gaps('late')}")


async def run_stormy_time(world: World, kinds: tuple[Strike, ...]) -> None:
    """Run through a storm, and check what comes after it."""
    dice = world.dice
    has_clock = dice.random() < 0.6
    fleet = ScheduleFleet(
        world,
        has_clock=has_clock,
        max_concurrent_jobs=dice.choice((1, 5, 20)),
        enable_coordinator=dice.random() < 0.8,
    )
    names = dice.sample(sorted(JOBS), dice.choice((2, 4, 6)))
    for name in "abcd"[: dice.choice((1, 2, 3, 4))]:
        # One has all jobs and a good clock; otherwise some jobs are never fired.
        is_good = name == "a"
        lacking = dice.choice(names) if not is_good and dice.random() < 0.3 else ""
        jobs = {job: JOBS[job] for job in names if job != lacking}
        skew = 0.0 if is_good else dice.choice((0.0, 0.0, -90.0, -20.0, 20.0, 90.0))
        fleet.add(name, jobs, skew=skew)
    world.start(operate_now_and_then(fleet, names, 0.3 * HOUR))
    await storm(world, 0.3 * HOUR, draw_forecast(world, kinds))
    correct_clock(world, "a")
    await fleet.settle(5 * MINUTE)


def correct_clock(world: World, name: str) -> None:
    """Set the clock of a machine right, if it has drifted or stood still.

    It may drift on until the story ends, and must not be vetoed then.
    """
    clock = world.nodes[name].clock
    gained = clock.wall().seconds - WORLD_START - world.loop.time()
    if abs(gained) > MAX_SKEW / 6:
        clock.step_wall(-gained)


async def operate_now_and_then(fleet: ScheduleFleet, names: list[str], end: float) -> None:
    """Pause, resume, edit and run jobs, from any process, until a time."""
    world, dice = fleet.world, fleet.world.dice
    while world.loop.time() < end:
        await asyncio.sleep(dice.uniform(0, 2 * MINUTE))
        started = fleet.started
        if started:
            await operate_once(fleet, dice.choice(started), dice.choice(names))
    for name in names:
        started = fleet.started
        if started:
            await fleet.operate(dice.choice(started), name, "enable")


async def operate_once(fleet: ScheduleFleet, process: SchedulerProcess, name: str) -> None:
    """Do something to a job, as an operator does."""
    dice = fleet.world.dice
    match dice.choice(("enable", "disable", "update", "update", "run")):
        case "run":
            patience = dice.choice((0.1, 60.0)) * dice.random()
            fleet.world.start(fleet.run_by_hand(process, name, patience))
        case "update":
            schedule = dice.choice(("* * * * * *", "*/7 * * * * *", "* * * * *", "@every 40s"))
            await fleet.operate(process, name, "update", schedule=schedule)
        case deed:
            await fleet.operate(process, name, deed)


async def stormy(world: World) -> None:
    """All strikes under which clocks run on."""
    await run_stormy_time(world, STRIKES)


async def stormy_with_suspends(world: World) -> None:
    """Likewise, and clocks stop at times."""
    await run_stormy_time(world, (*STRIKES, strikes.suspend))


STORIES: tuple[Story, ...] = (
    begins,
    kill,
    pause,
    cut,
    mute,
    suspend,
    leave,
    rare,
    wakes_late,
    outage,
    lost_replies,
    crowded,
    fast_clocks,
    edits,
    runs_by_hand,
    skips_elsewhere,
    waits_in_line,
    asks_for_runs,
    dies_by_hand,
    forgets_history,
    pauses_jobs,
    deploys,
    deploys_during_a_run,
    dies_before_jitter,
    edits_and_dies,
    lacks,
    returns_to_its_run,
    standalone,
    skewed_databases,
    skewed_buckets,
    downtime,
)
