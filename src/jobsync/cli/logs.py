"""Facts as lines: for people, or as JSON for those who collect them."""

import datetime as dt
import logging
import sys
from typing import Literal, TypeAlias

import msgspec

__all__ = ["Format", "start_logging"]

Format: TypeAlias = Literal["text", "json"]


class _Text(logging.Formatter):
    """The time of day, the level where it matters, and the fact."""

    def format(self, record: logging.LogRecord) -> str:
        """Give one line, and a trace below it where something was raised."""
        loud = record.levelno >= logging.WARNING
        mark = f"{record.levelname.lower()}: " if loud else ""
        line = f"{_date(record):%H:%M:%S} {mark}{record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    """One object a line, with the fields of the fact."""

    def format(self, record: logging.LogRecord) -> str:
        """Give one line."""
        line: dict[str, object] = {
            "at": _date(record).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fact = getattr(record, "fact", None)
        if fact is None:
            line["message"] = record.getMessage()
        else:
            line |= {"event": fact.name, **msgspec.to_builtins(fact)}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def _date(record: logging.LogRecord) -> dt.datetime:
    return dt.datetime.fromtimestamp(record.created, dt.UTC).astimezone()


def start_logging(format: Format, level: str) -> None:
    """Print what this process logs, on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if format == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
