"""The log of `jobsync work`: text for people, or JSON for log collectors.

Each event of jobsync is a line. What the user's code logs while it handles a message has the
message's id, queue, attempt and task with it.
"""

import datetime as dt
import logging
import re
import sys
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from jobsync.events import Event
from jobsync.queue.handler_slots import describe_running
from jobsync.safe_text import format_error, safe_repr, safe_str

__all__ = ["log_facts", "start_logging"]

_log = logging.getLogger("jobsync.work")
_FIELDS = "jobsync_fields"
"""The attribute of a record that has the fields of a message of this command."""
_MAX_TRACE_LENGTH = 50_000
_MAX_VALUE_LENGTH = 500
_TIMES = {
    "at",
    "expired_at",
    "first",
    "last",
    "new_epoch",
    "scheduled_time",
    "since",
    "timestamp",
    "until",
}
"""The fields of events that have Unix seconds."""
_is_bare = re.compile(r"[^\s\"'=]+").fullmatch
_find_places = re.compile(r'^ *File "(.*)", line (\d+), in (.*)$', re.MULTILINE).findall


def start_logging(format: str, level: str, process: int | None = None) -> None:
    """Print log records on standard error: text for people, or JSON for log collectors.

    Args:
        format: text or json.
        level: the lowest that is printed.
        process: the number of this process, if there are several; every line has it.
    """
    handler = logging.StreamHandler(sys.stderr)
    kind = _JsonFormatter if format == "json" else _TextFormatter
    handler.setFormatter(kind(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_facts(message: str, facts: Mapping[str, object]) -> None:
    """Log a message of this command with fields."""
    _log.info("%s", message, extra={_FIELDS: facts})


class _SafeFormatter(logging.Formatter):
    """Writes an exception whatever its own methods do."""

    def __init__(self, process: int | None = None) -> None:
        super().__init__()
        self._process = process

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name that logging calls
        try:
            text = super().formatException(ei)
        except Exception:  # noqa: BLE001 - a user's exception may have methods that raise anything
            text = format_error(ei[1])
        return safe_str(text, _MAX_TRACE_LENGTH)


class _TextFormatter(_SafeFormatter):
    """Writes a record as time, level if it is a warning or worse, message and fields."""

    def format(self, record: logging.LogRecord) -> str:
        is_warning = record.levelno >= logging.WARNING
        level = f"{record.levelname.lower()}: " if is_warning else ""
        event = getattr(record, "fact", None)
        if isinstance(event, Event):
            message, fields = event.name, msgspec.structs.asdict(event)
        else:
            message, fields = record.getMessage(), _find_fields(record)
        words = [f"{name}={_show(name, value, record.created)}" for name, value in fields.items()]
        number = "" if self._process is None else f"[{self._process}] "
        line = f"{_read_time(record):%H:%M:%S} {number}{level}{' '.join([message, *words])}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(_SafeFormatter):
    """Writes a record as one JSON object per line, with the fields of its event.

    A field whose name is taken has an underscore after it: `event_`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": _read_time(record).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if self._process is not None:
            line["process"] = self._process
        event = getattr(record, "fact", None)
        if event is None:
            line |= {"message": record.getMessage(), **_find_fields(record)}
        else:
            line["event"] = event.name
            for name, value in msgspec.structs.asdict(event).items():
                line[f"{name}_" if name in line else name] = value
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=safe_repr).decode()
        except Exception:  # noqa: BLE001 - JSON cannot carry a value, or reading it raised anything
            texts = {name: safe_str(value, _MAX_TRACE_LENGTH) for name, value in line.items()}
            return msgspec.json.encode(texts).decode()


def _read_time(record: logging.LogRecord) -> dt.datetime:
    return dt.datetime.fromtimestamp(record.created, dt.UTC).astimezone()


def _find_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what a message of this command says, or of what the user's code handles."""
    if record.name.partition(".")[0] == "jobsync":
        return dict(getattr(record, _FIELDS, {}))
    return dict(describe_running())


def _show(name: str, value: object, now: float) -> str:
    """Return a value for people: times of this machine, and one line for an error."""
    # Exact types: an object of the user's may have methods that raise anything.
    if type(value) is float:
        return _show_time(value, now) if name in _TIMES else f"{value:.3f}".rstrip("0").rstrip(".")
    if type(value) in {tuple, list}:
        text = ",".join(safe_str(item) for item in cast("list[object]", value))
    elif type(value) is str and "\n" in value:
        text = _shorten_error(value)
    else:
        text = safe_str(value, _MAX_VALUE_LENGTH)
    return text if _is_bare(text) else safe_repr(text, _MAX_VALUE_LENGTH)


def _show_time(seconds: float, now: float) -> str:
    try:
        at = dt.datetime.fromtimestamp(seconds, dt.UTC).astimezone()
    except (OSError, OverflowError, ValueError):
        return str(seconds)
    is_today = at.date() == dt.datetime.fromtimestamp(now, dt.UTC).astimezone().date()
    return f"{at:%H:%M:%S}" if is_today else f"{at:%Y-%m-%dT%H:%M:%S}"


def _shorten_error(text: str) -> str:
    """Return the first line of an error, and the last line of code that it passed."""
    first = text.partition("\n")[0]
    places = _find_places(text)
    if not places:
        return first
    file, line, function = places[-1]
    return f"{first} ({file.rpartition('/')[2]}, line {line}, in {function})"
