"""Schedules: what is accepted, which instants it means, and the same backwards as forwards."""

import pickle
import zoneinfo
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from cron_oracle import Clock, Matcher, find_changes, list_firings
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from jobsync.core import cron
from jobsync.core.cron import Schedule
from jobsync.errors import Invalid

DAY = 86400
YEAR = 366 * DAY
BERLIN = "Europe/Berlin"


def _at(text: str) -> int:
    """Return the instant of a time in UTC."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def _list_dates(text: str, after: str, count: int, zone: str = "UTC") -> list[str]:
    schedule = Schedule.parse(text, zone)
    found = schedule.between(_at(after), _at("9000-01-01"), count)
    return [schedule.in_zone(instant).strftime("%Y-%m-%d %H:%M:%S") for instant in found]


def _list_days(text: str, after: str, count: int) -> list[str]:
    return [found.removesuffix(" 00:00:00") for found in _list_dates(text, after, count)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0 0 29 2 *", ["2028-02-29", "2032-02-29", "2036-02-29"]),
        ("0 0 31 * *", ["2026-01-31", "2026-03-31", "2026-05-31", "2026-07-31"]),
        ("0 0 13 * FRI", ["2026-01-02", "2026-01-09", "2026-01-13", "2026-01-16"]),
        ("0 0 */13 * FRI", ["2026-02-27", "2026-03-27", "2026-05-01"]),
        ("0 0 30 2 1", ["2026-02-02", "2026-02-09", "2026-02-16", "2026-02-23", "2027-02-01"]),
        ("0 0 * * 7", ["2026-01-04", "2026-01-11"]),
        ("0 0 * * 0", ["2026-01-04", "2026-01-11"]),
        ("0 0 * * sun", ["2026-01-04", "2026-01-11"]),
        ("0 0 * * 5-7", ["2026-01-02", "2026-01-03", "2026-01-04", "2026-01-09"]),
        ("0 0 1 jan,JUL *", ["2026-07-01", "2027-01-01"]),
        ("0 0 L * *", ["2026-01-31", "2026-02-28", "2026-03-31"]),
        ("0 0 LW * *", ["2026-01-30", "2026-02-27", "2026-03-31"]),
        ("0 0 2-6/2 * *", ["2026-01-02", "2026-01-04", "2026-01-06", "2026-02-02"]),
        ("0 0 1 3-9/3 *", ["2026-03-01", "2026-06-01", "2026-09-01", "2027-03-01"]),
        ("0 0 1 MAR-9/3 *", ["2026-03-01", "2026-06-01", "2026-09-01", "2027-03-01"]),
        ("0 0 * * 1-5/2", ["2026-01-02", "2026-01-05", "2026-01-07", "2026-01-09"]),
        ("0 0 * * MON-FRI/2", ["2026-01-02", "2026-01-05", "2026-01-07", "2026-01-09"]),
        ("0 0 * * 1-mon/2", ["2026-01-05", "2026-01-12"]),
        ("0 0 * * MON#1", ["2026-01-05", "2026-02-02", "2026-03-02"]),
        ("0 0 * * MON#5", ["2026-03-30", "2026-06-29"]),
        ("0 0 * * 5L", ["2026-01-30", "2026-02-27"]),
        ("@daily", ["2026-01-02", "2026-01-03"]),
        ("@midnight", ["2026-01-02", "2026-01-03"]),
        ("@WEEKLY", ["2026-01-04", "2026-01-11"]),
        ("@monthly", ["2026-02-01", "2026-03-01"]),
        ("@yearly", ["2027-01-01", "2028-01-01"]),
        ("@annually", ["2027-01-01", "2028-01-01"]),
    ],
)
def test_days(text: str, wanted: list[str]) -> None:
    """An expression means these days, counted from New Year 2026."""
    assert _list_days(text, "2026-01-01", len(wanted)) == wanted


def test_leap_days_skip_2100() -> None:
    """The year 2100 has no 29 February, and the search goes on."""
    assert _list_days("0 0 29 2 *", "2096-01-01", 2) == ["2096-02-29", "2104-02-29"]
    assert _list_days("0 0 * 2 MON#5", "2072-03-01", 1) == ["2112-02-29"]
    assert Schedule.parse("0 0 * 2 MON#5").latest_until(_at("2112-02-28")) == _at("2072-02-29")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("*/7 * * * *", ["00:49:00", "00:56:00", "01:00:00", "01:07:00"]),
        ("50-50/5 * * * *", ["00:50:00", "01:50:00"]),
        ("50/5 * * * *", ["00:50:00", "00:55:00", "01:50:00"]),
        ("10-30/10 * * * *", ["01:10:00", "01:20:00", "01:30:00", "02:10:00"]),
        ("50-58/4,7-07/5 * * * *", ["00:50:00", "00:54:00", "00:58:00", "01:07:00", "01:50:00"]),
        ("10-30/10 45 * * * *", ["00:45:10", "00:45:20", "00:45:30", "01:45:10"]),
        ("0 2-6/2 * * *", ["02:00:00", "04:00:00", "06:00:00", "02:00:00"]),
        ("7-07/5,1 * * * *", ["01:01:00", "01:07:00", "02:01:00"]),
        ("@hourly", ["01:00:00", "02:00:00"]),
        ("*/25 * * * * *", ["00:45:25", "00:45:50", "00:46:00"]),
        ("59 59 23 31 12 *", ["23:59:59"]),
        ("30 0 9 * * *", ["09:00:30"]),
        ("@every 90s", ["00:46:30", "00:48:00"]),
        ("@every 1h30m", ["01:30:00", "03:00:00"]),
        ("@EVERY 7s", ["00:45:01", "00:45:08"]),
    ],
)
def test_times(text: str, wanted: list[str]) -> None:
    """An expression means these times, counted from 00:45 of New Year's Eve 2025."""
    found = _list_dates(text, "2025-12-31 00:45", len(wanted))
    assert [time.split()[1] for time in found] == wanted


@pytest.mark.parametrize("zone", ["UTC", BERLIN, "Asia/Kathmandu"])
def test_every_counts_from_the_epoch_in_each_zone(zone: str) -> None:
    """`@every` is the same in all zones: multiples of its time since 1970."""
    schedule = Schedule.parse("@every 7m", zone)
    assert schedule.next_after(0) == 420
    assert schedule.next_after(-1) == 0
    assert schedule.latest_until(420) == 420
    assert schedule.latest_until(419) == 0
    assert schedule.between(_at("2026-03-29 00:00"), 2**40, 1)[0] % 420 == 0


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("61 * * * *", "minute, not '61'", "0 to 59"),
        ("* 24 * * *", "hour, not '24'", "0 to 23"),
        ("* * 0 * *", "day of month, not '0'", "1 to 31"),
        ("* * * 13 *", "month, not '13'", "JAN to DEC"),
        ("* * * * 8", "day of week, not '8'", "0 to 7"),
        ("60 * * * * *", "second, not '60'", "0 to 59"),
        ("* * * * MONDAY", "day of week, not 'MONDAY'", "SUN to SAT"),
        ("* * * * FRI-MON", "day of week, not 'FRI-MON'", "ascending ranges"),
        ("* * ? * MON", r"day of month, not '\?'", "1 to 31"),
        ("*/0 * * * *", "minute, not '\\*/0'", "0 to 59"),
        ("-1 * * * *", "minute, not '-1'", "0 to 59"),
        ("*/90 * * * *", "step 90 in its minute", "@every 90m"),
        ("* * *", "has 3 fields instead of 5 or 6", "five fields"),
        ("hello", "has 1 field instead of 5 or 6", "five fields"),
        ("0 0 * * * * 2026", "has 7 fields instead of 5 or 6", "six with seconds first"),
        ("CRON_TZ=UTC 0 3 * * *", "must not set a variable", "option timezone"),
        ("0 3 * * MON=1", "day of week, not 'MON=1'", "SUN to SAT"),
        ("3 = 0 3 * *", "minute, not '='", "0 to 59"),
        ("", "must not be empty", "five fields"),
        (" \n", "must not be empty", "five fields"),
        (None, "must be text", "five fields"),
        (300, "must be text", "five fields"),
        ("1," * 300, "at most 500 characters", "five fields"),
        ("9" * 400 + " * * * *", "must have a valid minute", "0 to 59"),
        ("30 2 30 2 *", "never fires", "a day that occurs"),
        ("0 0 31 4,6 *", "never fires", "a day that occurs"),
        ("0 0 30 2-2/1 *", "never fires", "a day that occurs"),
        ("5-5/0 * * * *", "minute, not '5-5/0'", "0 to 59"),
        ("* * */20 * 1L", "never fires", "a day that occurs"),
        ("@reboot", "cannot be @reboot", "run_on_start=True"),
        ("@Reboot", "cannot be @reboot", "run_on_start=True"),
        ("@dayly", "not a known preset", "did you mean @daily"),
        ("@DAYLY", "not a known preset", "did you mean @daily"),
        ("@YEERLY", "not a known preset", "did you mean @yearly"),
        ("@fortnightly-ish", "not a known preset", "@hourly, @daily"),
        ("@daily 3", "not a known preset", "did you mean @daily"),
        ("@every", "cannot be read", "@every 90s"),
        ("@every 1d", "cannot be read", "@every 90s"),
        ("@every 1.5h", "cannot be read", "@every 90s"),
        ("@every 500ms", "cannot be read", "@every 90s"),
        ("@every 90", "cannot be read", "@every 90s"),
        ("@every -5s", "cannot be read", "@every 90s"),
        ("@every ٣s", "cannot be read", "@every 90s"),
        ("@every 0s", "1 second to 50 years", "@every 90s"),
        ("@every 1581120001s", "1 second to 50 years", "@every 90s"),
        ("@every 999999999h", "1 second to 50 years", "@every 90s"),
    ],
)
def test_a_wrong_schedule_is_refused(text: str, problem: str, fix: str) -> None:
    """The error names the field, shows the text and has a fix."""
    with pytest.raises(Invalid, match=problem) as caught:
        Schedule.parse(text)
    assert (caught.value.field, caught.value.value) == ("schedule", text)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("zone", "fix"),
    [
        ("Europe/Berln", "did you mean Europe/Berlin?"),
        ("europe/berlin", "did you mean Europe/Berlin?"),
        ("Berlin", "did you mean Europe/Berlin?"),
        ("America/New York", "did you mean America/New_York?"),
        ("utc", "did you mean UTC?"),
        ("right/Europe/Berlin", "did you mean Europe/Berlin?"),
        ("PST", "use a name such as UTC or Europe/Berlin"),
        ("CEST", "use a name such as UTC or Europe/Berlin"),
        ("UTC+2", "use a name such as UTC or Europe/Berlin"),
        ("Etc/GMT+20", "use a name such as UTC or Europe/Berlin"),
        ("GMT+15", "use a name such as UTC or Europe/Berlin"),
        ("localtime", "use a name such as UTC or Europe/Berlin"),
        ("Europe", "use a name such as UTC or Europe/Berlin"),
        ("../etc/passwd", "use a name such as UTC or Europe/Berlin"),
        ("/etc/localtime", "use a name such as UTC or Europe/Berlin"),
        ("a\0b", "use a name such as UTC or Europe/Berlin"),
        ("\ud800", "use a name such as UTC or Europe/Berlin"),
        ("x" * 101, "use a name such as UTC or Europe/Berlin"),
        ("", "use a name such as UTC or Europe/Berlin"),
        (None, "use a name such as UTC or Europe/Berlin"),
    ],
)
def test_a_wrong_zone_is_refused(zone: str, fix: str) -> None:
    """The error names the zone that was probably meant. The machine's own zone is never used."""
    with pytest.raises(Invalid) as caught:
        Schedule.parse("@daily", zone)
    assert (caught.value.field, caught.value.value, caught.value.fix) == ("timezone", zone, fix)


def test_zones_need_no_database_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a zone database on the machine, the one that comes with the package is used."""
    monkeypatch.setattr(cron, "ZoneInfo", ZoneInfo.no_cache)
    zoneinfo.reset_tzpath(to=())
    try:
        schedule = Schedule.parse("0 3 * * *", BERLIN)
        with pytest.raises(Invalid, match="Did you mean Europe/Berlin"):
            Schedule.parse("0 3 * * *", "Europe/Berln")
    finally:
        zoneinfo.reset_tzpath()
    assert schedule.next_after(_at("2026-07-01")) == _at("2026-07-01 01:00")


def test_equality_and_identity() -> None:
    """Schedules are equal by text and zone, and can be keys and be pickled."""
    schedule = Schedule.parse("  0  3 * * *\n", BERLIN)
    assert schedule == Schedule.parse("0 3 * * *", BERLIN)
    assert schedule != Schedule.parse("0 3 * * *")
    assert schedule != Schedule.parse("0 4 * * *", BERLIN)
    assert (schedule.text, schedule.timezone) == ("0 3 * * *", BERLIN)
    assert len({schedule, Schedule.parse("0 3 * * *", BERLIN)}) == 1
    assert repr(schedule) == "Schedule(text='0 3 * * *', timezone='Europe/Berlin')"
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert copy.next_after(0) == schedule.next_after(0)
    with pytest.raises(AttributeError):
        schedule.text = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 3 * * *", "At 03:00 every day"),
        ("@daily", "At 00:00 every day"),
        ("@midnight", "At 00:00 every day"),
        ("@hourly", "At the start of every hour"),
        ("@weekly", "At 00:00 on Sunday"),
        ("@monthly", "At 00:00 on the first day of every month"),
        ("@yearly", "At 00:00 on January 1"),
        ("@annually", "At 00:00 on January 1"),
        ("@Daily", "At 00:00 every day"),
        ("*/15 * * * *", "Every 15th minute of every hour"),
        ("*/10 * * * * *", "Every 10th second of every minute"),
        ("0 9 * * MON-FRI", "At 09:00 on Monday through Friday"),
        ("0 0 31 * *", "At 00:00 on the 31st day of every month"),
        ("0 0 11,12,13 * *", "At 00:00 on the 11th, the 12th, and the 13th day of month"),
        ("0 0 21,22,23 * *", "At 00:00 on the 21st, the 22nd, and the 23rd day of month"),
        ("0 0 L * *", "At 00:00 on the last day of every month"),
        ("*/2 * * * * *", "Every other second of every minute"),
        ("* */2 * * * *", "Every second every other minute past every hour"),
        ("*/2 * * * *", "Every other minute of every hour"),
        ("0 */2 * * *", "At minute 0 past every other hour"),
        ("0 0 * */2 *", "At 00:00 in every other month"),
        ("* * * * * *", "Every second"),
        ("0 0 1 */2 *", "At 00:00 on the first day of every other month"),
        ("0 0 30 2 SUN", "At 00:00 on the 30th day of month or on Sunday in February"),
        (
            "0 9 1,15 * MON#1",
            "At 09:00 on the first and the 15th day of month or on the first Monday of the month",
        ),
        ("0 9,17 * * MON", "At 09:00 and 17:00 on Monday"),
        ("0 0 */2 * MON", "At 00:00 on every other day of month if it's on Monday"),
        ("0 0 1-31 * MON", "At 00:00 every day"),
        ("0 0 5 3 1-7", "At 00:00 every day in March"),
        ("0 0 5 * MON-SAT", "At 00:00 on the fifth day of month or on Monday through Saturday"),
        ("@every 1s", "Every second"),
        ("@every 90s", "Every 90 seconds"),
        ("@every 60s", "Every minute"),
        ("@every 119s", "Every 119 seconds"),
        ("@every 120s", "Every 2 minutes"),
        ("@every 121s", "Every 2 minutes and 1 second"),
        ("@every 1h1s", "Every 1 hour and 1 second"),
        ("@every 1h", "Every hour"),
        ("@every 2h", "Every 2 hours"),
        ("@every 1h30m", "Every 1 hour and 30 minutes"),
        ("@every 49h1m1s", "Every 49 hours, 1 minute and 1 second"),
        ("@every 1581120000s", "Every 439200 hours"),
    ],
)
def test_words(text: str, words: str) -> None:
    """People read a schedule in words."""
    assert Schedule.parse(text).in_words() == words


def test_local_time() -> None:
    """An instant is shown as the clocks of the schedule's zone show it."""
    shown = Schedule.parse("@daily", "Asia/Kathmandu").in_zone(0)
    assert shown.isoformat() == "1970-01-01T05:30:00+05:30"


@pytest.mark.parametrize("text", ["* * * * *", "30 2 * * *", "@every 7s", "0 0 29 2 *"])
@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago"])
def test_the_ends_of_time(text: str, zone: str) -> None:
    """Before 1970 and after the year 9894 there is no instant, and no call fails."""
    schedule = Schedule.parse(text, zone)
    first = schedule.next_after(-(10**15))
    assert first is not None
    assert 0 <= first < 4 * YEAR
    assert schedule.next_after(first - 1) == first
    assert schedule.latest_until(first) == first
    assert schedule.latest_until(first - 1) is None
    assert schedule.latest_until(-1) is None
    last = schedule.latest_until(10**15)
    assert last is not None
    assert schedule.next_after(last) is None
    assert schedule.next_after(last - 1) == last
    assert schedule.next_after(10**15) is None


def test_between_is_bounded() -> None:
    """Three years of seconds are not listed to return a few; the bounds are as documented."""
    schedule = Schedule.parse("* * * * * *", BERLIN)
    start = _at("2026-01-01")
    end = start + 3 * YEAR
    assert schedule.between(start, end, 3) == [start + 1, start + 2, start + 3]
    assert schedule.newest_between(start, end, 3) == [end - 2, end - 1, end]
    assert schedule.between(start, start + 2, 9) == [start + 1, start + 2]
    assert schedule.newest_between(start, start + 2, 9) == [start + 1, start + 2]
    for empty in (schedule.between, schedule.newest_between):
        assert empty(start, start, 9) == []
        assert empty(start, end, 0) == []
        assert empty(end, start, 9) == []


ZONES = (
    "UTC",
    BERLIN,
    "America/New_York",
    "America/Havana",
    "Africa/Casablanca",
    "Antarctica/Troll",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",
    "Pacific/Apia",
)
CHANGES = [
    (zone, change)
    for zone in ZONES
    for change, _ in find_changes(ZoneInfo(zone), _at("2010-01-01"), _at("2028-01-01"))
]


def _fields(low: int, high: int, *special: str) -> st.SearchStrategy[str]:
    """Draw what may stand in a field, with a good share of `*`."""
    number = st.integers(low, high)
    step = st.integers(1, min(high, high - low + 1))
    pair = st.tuples(number, number).map(sorted)
    part = st.one_of(
        number.map(str),
        step.map("*/{}".format),
        pair.map(lambda ends: f"{ends[0]}-{ends[1]}"),
        st.builds("{0[0]}-{0[1]}/{1}".format, pair, step),
        st.builds("{}/{}".format, number, step),
        *([st.sampled_from(special)] if special else []),
    )
    return st.just("*") | st.lists(part, min_size=1, max_size=3).map(",".join)


times = st.tuples(_fields(0, 59), _fields(0, 23)).map(" ".join)
days = st.tuples(
    _fields(1, 31, "L", "LW"),
    _fields(1, 12, "JAN", "feb", "OCT-DEC"),
    _fields(0, 7, "SUN", "mon-fri", "TUE#1", "3#5", "5L"),
).map(" ".join)
often = st.just("* * *") | days
expressions = st.builds("{} {}".format, times, often) | st.builds(
    "{} {} {}".format, _fields(0, 59), times, often
)
moments = st.tuples(st.sampled_from(CHANGES), st.integers(-2 * DAY, 2 * DAY)).map(
    lambda drawn: (drawn[0][0], drawn[0][1] + drawn[1])
) | st.tuples(st.sampled_from(ZONES), st.integers(_at("1975-01-01"), _at("2150-01-01")))


def _parse_possible(text: str, zone: str) -> Schedule:
    try:
        return Schedule.parse(text, zone)
    except Invalid as refused:
        assume("never fires" not in refused.problem)
        raise


@given(expressions, moments, st.integers(1, 2 * DAY))
@example("0-59 0-23 * * *", (BERLIN, _at("2026-10-25 01:00")), 7200)
@example("15,45 10,20 2 * * *", (BERLIN, _at("2026-03-29 01:00") + 30), 7200)
@example("30 12 30 12 *", ("Pacific/Apia", _at("2011-12-30 10:00")), 60)
@settings(max_examples=80, deadline=None)
def test_firings_are_those_of_the_oracle(text: str, moment: tuple[str, int], length: int) -> None:
    """Any expression in any zone has the oracle's instants, forwards and backwards."""
    zone, start = moment
    schedule = _parse_possible(text, zone)
    length = min(length, 40 * 60 if Matcher(text).seconds != [0] else length)
    wanted = list_firings(text, Clock(ZoneInfo(zone), start + 1, start + length + 1))
    first, last = wanted[:60], wanted[-60:]
    assert schedule.between(start, start + length, 60) == first
    assert schedule.newest_between(start, start + length, 60) == last


@given(expressions, moments)
@example("0 0 29 2 *", ("UTC", _at("2100-01-01")))
@example("0 0 * 2 MON#5", ("UTC", _at("2080-01-01")))
@example("*/5 0 7 1 *", ("Africa/Monrovia", _at("1972-01-07 00:44:00")))
@example("50 5 0 7 1 *", ("Africa/Monrovia", _at("1972-01-07 00:45:30")))
@settings(max_examples=150, deadline=None)
def test_backwards_is_the_inverse_of_forwards(text: str, moment: tuple[str, int]) -> None:
    """No instant lies between the last one until now and the first one after now."""
    zone, now = moment
    schedule = _parse_possible(text, zone)
    later, earlier = schedule.next_after(now), schedule.latest_until(now)
    assert later is not None
    assert later > now
    assert schedule.latest_until(later) == later
    assert schedule.latest_until(later - 1) == earlier
    if earlier is not None:
        assert earlier <= now
        assert schedule.next_after(earlier) == later
        assert schedule.next_after(earlier - 1) == earlier


@given(expressions)
@settings(max_examples=100, deadline=None)
def test_every_schedule_has_words(text: str) -> None:
    """Whatever is accepted can be put into words."""
    words = _parse_possible(text, "UTC").in_words()
    assert words[0].isupper()
    assert not words.endswith(" ")


@given(st.text(max_size=30) | st.text("0123456789*/-,#LW@ MONJAevryhms", max_size=30))
@settings(max_examples=200, deadline=None)
def test_no_text_fails_in_another_way(text: str) -> None:
    """A text is a schedule that fires, or is refused."""
    try:
        schedule = Schedule.parse(text)
    except Invalid:
        return
    assert schedule.next_after(0) is not None
