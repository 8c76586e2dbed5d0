"""The options of a TTL plugin and of the resources that it governs. Durations are seconds."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, cast

import msgspec

from jobsync.coordination.settings import CoordinatorOptions
from jobsync.core.arguments import check_choice, check_count, check_resource_name, check_seconds
from jobsync.core.expiry import LONGEST_TTL, ON_EXPIRE, ExpiryOptions, OnExpire
from jobsync.errors import Invalid, closest_name, plain_text
from jobsync.safe_text import safe_str
from jobsync.settings import Settings, in_section
from jobsync.user_code import check_no_generator

__all__ = ["GovernedResource", "TTLOptions", "TTLSettings", "parse_resources"]

_MAX_BATCH = 10_000
_OPTIONS = (
    *("ttl", "field", "on_expire", "delete_field"),
    *("archive_resource", "keep_original_id", "callback"),
)
_NEEDED_BY = {
    "delete_field": "soft-delete",
    "archive_resource": "archive",
    "keep_original_id": "archive",
    "callback": "callback",
}
"""Options that one strategy alone uses."""


class TTLOptions(CoordinatorOptions, total=False):
    """Options as they are passed to `TTLPlugin`: see `TTLSettings`."""

    default_ttl: float | None
    cleanup_interval: float
    batch_size: int


@in_section("ttl")
class TTLSettings(Settings, frozen=True, kw_only=True):
    """The options of a TTL plugin.

    Attributes:
        default_ttl: seconds after which records of resources without a `ttl` and without
            `expires_at` expire. Without `resources`, how long completed messages are kept.
        cleanup_interval: seconds between two sweeps; 60. A record is removed at most that long
            after its expiry, and the duration of a sweep.
        batch_size: how many records are read and removed at a time; 100.
    """

    default_ttl: float | None = None
    cleanup_interval: float = 60.0
    batch_size: int = 100

    def __post_init__(self) -> None:
        if self.default_ttl is not None:
            check_seconds("default_ttl", self.default_ttl, is_zero_allowed=False, most=LONGEST_TTL)
        check_seconds("cleanup_interval", self.cleanup_interval, is_zero_allowed=False)
        check_count("batch_size", self.batch_size, least=1, most=_MAX_BATCH)


class GovernedResource(msgspec.Struct, frozen=True):
    """One resource whose records expire, as its user describes it."""

    options: ExpiryOptions
    callback: Callable[..., Any] | None = None
    """What decides about an expired record: `callback(record, resource)`."""


def parse_resources(resources: object, settings: TTLSettings) -> dict[str, GovernedResource]:
    """Return the checked resources by name.

    Args:
        resources: a list of names, or options by name; None for no resources.
        settings: the plugin's.

    Raises:
        Invalid: names the field, the value and the fix.
    """
    if resources is None:
        if settings.default_ttl is None:
            fix = 'pass resources=["sessions"], or default_ttl for completed messages of queues'
            raise Invalid("resources", None, "is missing: nothing would expire", fix)
        return {}
    governed = {}
    for name, options in _list_resources(resources):
        if name in governed:
            raise Invalid("resources", name, "is listed twice", "list it once")
        governed[name] = _parse_resource(name, options, settings)
    if not governed:
        fix = "name a resource, or leave it out to govern completed messages of queues"
        raise Invalid("resources", resources, "must not be empty", fix)
    for name in governed:
        _check_circle(name, governed)
    return governed


def _check_circle(name: str, governed: Mapping[str, GovernedResource]) -> None:
    """Check that archived records never come back to the resource that they were in."""
    passed = [name]
    while (found := governed.get(passed[-1])) and (archive := found.options.archive_resource):
        if archive == name:
            way = " to ".join([*passed, name])
            place = f"resources.{passed[-1]}.archive_resource"
            problem = f"moves records in a circle: {way}"
            raise Invalid(place, archive, problem, f'write archive_resource="{name}_archive"')
        if archive in passed:
            # A circle that this one leads into; it is found from there.
            return
        passed.append(archive)


def _list_resources(resources: object) -> Iterable[tuple[str, Mapping[str, Any]]]:
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(resources, Mapping):
        pairs = resources.items()
    elif isinstance(resources, list | tuple | set | frozenset):
        pairs = ((name, {}) for name in resources)
    else:
        fix = 'write ["sessions"] or {"sessions": {"ttl": 3600}}'
        raise Invalid("resources", resources, "must be a list of names or a dict by name", fix)
    for name, options in pairs:
        if not isinstance(name, str) or not name:
            raise Invalid("resources", name, "must have names of resources", 'write "sessions"')
        plain_name = check_resource_name("resources", name)
        if not isinstance(options, Mapping | None):
            fix = 'write {"ttl": 3600, "on_expire": "hard-delete"}'
            raise Invalid(f"resources.{plain_name}", options, "must be a dict of options", fix)
        yield plain_name, options or {}


def _parse_resource(
    name: str, options: Mapping[str, Any], settings: TTLSettings
) -> GovernedResource:
    place = f"resources.{name}"
    _check_known(place, options)
    given = {option: value for option, value in options.items() if value is not None}
    chosen = given.get("on_expire", "hard-delete")
    on_expire = cast("OnExpire", check_choice(f"{place}.on_expire", chosen, ON_EXPIRE))
    for option, strategy in _NEEDED_BY.items():
        if option in given and strategy != on_expire:
            fix = f"write on_expire={strategy!r}, or leave it out"
            raise Invalid(f"{place}.{option}", given[option], f"has no effect on {on_expire}", fix)
    for option in [each for each in ("field", "delete_field", "archive_resource") if each in given]:
        text = plain_text(given[option])
        if not text:
            raise Invalid(f"{place}.{option}", given[option], "must be text", "write a name")
        given[option] = text
    ttl = given.get("ttl")
    if ttl is not None:
        ttl = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
        ttl = check_seconds(f"{place}.ttl", ttl, is_zero_allowed=False, most=LONGEST_TTL)
    keep_original_id = given.get("keep_original_id", False)
    if not isinstance(keep_original_id, bool):
        field = f"{place}.keep_original_id"
        raise Invalid(field, keep_original_id, "must be True or False", "write True")
    archive, callback = given.get("archive_resource"), given.get("callback")
    if on_expire == "archive":
        _check_archive(f"{place}.archive_resource", archive, name)
    if on_expire == "callback":
        _check_callback(f"{place}.callback", callback)
    parsed = ExpiryOptions(
        resource=name,
        ttl=ttl,
        default_ttl=settings.default_ttl,
        field=given.get("field"),
        on_expire=on_expire,
        delete_field=given.get("delete_field"),
        archive_resource=archive,
        keep_original_id=keep_original_id,
    )
    parsed.check_names()
    return GovernedResource(parsed, callback)


def _check_known(place: str, options: Mapping[Any, Any]) -> None:
    for option, value in options.items():
        if plain_text(option) not in _OPTIONS:
            hint = closest_name(option, _OPTIONS)
            fix = f"did you mean {hint}?" if hint else f"use one of {', '.join(_OPTIONS)}"
            raise Invalid(f"{place}.{safe_str(option)}", value, "is not an option", fix)


def _check_archive(field: str, archive: str | None, name: str) -> None:
    if archive is None:
        fix = f'write archive_resource="{name}_archive"'
        raise Invalid(field, None, "is missing: there is nowhere to archive to", fix)
    check_resource_name(field, archive)
    if archive == name:
        fix = f'write archive_resource="{name}_archive"'
        raise Invalid(field, archive, "must be another resource than the archived one", fix)


def _check_callback(field: str, callback: Any) -> None:
    if not callable(callback):
        problem = "is missing" if callback is None else "must be a function"
        fix = "pass a function of the record and the resource that returns True to delete it"
        raise Invalid(field, callback, problem, fix)
    check_no_generator(field, callback)
    try:
        signature = inspect.signature(callback)
    except (TypeError, ValueError):
        # Some functions that are written in C do not tell what they take.
        return
    try:
        signature.bind("record", "resource")
    except TypeError:
        fix = "write async def callback(record, resource)"
        raise Invalid(field, callback, "does not take a record and its resource", fix) from None
