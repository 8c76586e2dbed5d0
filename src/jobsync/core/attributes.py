"""Schemas as users write them: `{"name": "string|required|min:3", "tags": "array|items:string"}`.

The first word is a type, the others are rules. A dictionary in place of the text describes an
object; its own rules, if any, are under `$$type`. Fields are optional unless they are `required`.
Anything unknown is refused, with the nearest known word.

`parse` reads schemas, `render` writes them; `parse(render(fields))` returns the same fields.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jobsync.core.codec import Json, decode, encode
from jobsync.core.schema import KINDS, SIZED, TEXTS, Field, FieldKind, Fields, conform
from jobsync.errors import Corrupt, Invalid, closest_name

__all__ = ["parse", "render"]

_OWN_RULES = "$$type"
_RULES = (
    *("required", "optional", "default", "enum", "items"),
    *("min", "max", "minlength", "maxlength"),
)
_WITHOUT_ARGUMENT = {"required", "optional"}
_MAX_DEPTH = 16
_MAX_NAME = 200


def parse(attributes: Json, place: str = "attributes") -> Fields:
    """Read a description of fields.

    Raises:
        Invalid: names the field and its text, and suggests what was probably meant.
    """
    fields = _parse_fields(attributes, place, 0)
    # An id is part of a record's key.
    if (id_field := fields.get("id")) and id_field.kind not in TEXTS:
        raise Invalid(f"{place}.id", attributes["id"], "must be text", "write 'string' or 'uuid'")
    return fields


def _parse_fields(attributes: Json, place: str, depth: int) -> dict[str, Field]:
    if not isinstance(attributes, Mapping):
        raise Invalid(place, attributes, "must be a dictionary", "write {'name': 'string'}")
    if depth >= _MAX_DEPTH:
        raise Invalid(place, "…", f"must not be nested deeper than {_MAX_DEPTH}", "use json there")
    return {
        _check_name(name, place): _parse_field(definition, f"{place}.{name}", depth)
        for name, definition in attributes.items()
        if name != _OWN_RULES
    }


def _check_name(name: Any, place: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        problem = f"must have field names of 1 to {_MAX_NAME} characters"
        raise Invalid(place, name, problem, "use a short text")
    if name.startswith(("_", "$")) or "." in name:
        problem = "must not have field names that begin with '_' or '$', or contain '.'"
        raise Invalid(place, name, problem, "begin with a letter, and nest objects")
    return name


def _parse_field(definition: Json, place: str, depth: int) -> Field:
    if isinstance(definition, str):
        return _parse_text(definition, place)
    fields = _parse_fields(definition, place, depth + 1)
    own = _parse_text(definition.get(_OWN_RULES, "object"), f"{place}.{_OWN_RULES}")
    if own.kind != "object":
        problem = "must be an object, because it has fields"
        raise Invalid(place, definition[_OWN_RULES], problem, "write 'object'")
    return _check_default(msgspec.structs.replace(own, fields=fields), definition, place)


def _parse_text(text: Json, place: str) -> Field:
    if not isinstance(text, str):
        raise Invalid(place, text, "must describe a field", "write text such as 'string|required'")
    first, *rest = text.split("|")
    word, _, argument = first.strip().partition(":")
    if word == "enum":
        # Documented as a type; implemented as text with choices.
        rest.insert(0, f"enum:{argument}")
        word, argument = "string", ""
    if word not in KINDS or argument:
        raise _describe_unknown(place, text, first, "type", [*KINDS, "enum"])
    draft = _FieldDraft(_as_kind(word), place, text)
    for rule in rest:
        name, _, argument = rule.strip().partition(":")
        draft.add(name, argument)
    return _check_default(Field(kind=draft.kind, **draft.options), text, place)


class _FieldDraft:
    """The rules of one field, while they are read."""

    def __init__(self, kind: FieldKind, place: str, text: str) -> None:
        self.kind = kind
        self.options: dict[str, Any] = {}
        self._place = place
        self._text = text
        self._seen: set[str] = set()

    def add(self, name: str, argument: str) -> None:
        """Read one rule."""
        if name in TEXTS and self.kind == "string" and not argument:
            # `string|email` is `email`.
            self.kind = _as_kind(name)
            return
        if name not in _RULES:
            raise _describe_unknown(self._place, self._text, name, "rule", _RULES)
        if bool(argument) is (name in _WITHOUT_ARGUMENT) and name != "default":
            raise self._describe_wrong(
                name, "must not have a value" if argument else "needs a value"
            )
        self._check_repeats(name)
        match name:
            case "required" | "optional":
                self.options["required"] = name == "required"
            case "min" | "minlength":
                self.options["least"] = self._size(name, argument)
            case "max" | "maxlength":
                self.options["most"] = self._size(name, argument)
            case "enum":
                self.options["choices"] = self._choices(argument)
            case "items":
                self.options["items"] = self._items(argument)
            case "default":
                self.options["default"] = self._literal(name, argument)

    def _check_repeats(self, name: str) -> None:
        meaning = {"optional": "required", "minlength": "min", "maxlength": "max"}.get(name, name)
        if meaning in self._seen:
            raise self._describe_wrong(name, "is given twice")
        self._seen.add(meaning)

    def _size(self, name: str, argument: str) -> int | float:
        allowed = SIZED if name in {"min", "max"} else {*TEXTS, "array"}
        if self.kind not in allowed:
            raise self._describe_wrong(name, f"does not apply to {self.kind}")
        size = _read_number(argument)
        if size is None:
            raise self._describe_wrong(name, f"must be a number, not {argument!r}")
        return size

    def _choices(self, argument: str) -> tuple[Json, ...]:
        if self.kind not in {*TEXTS, "number", "integer"}:
            raise self._describe_wrong("enum", f"does not apply to {self.kind}")
        return tuple(self._literal("enum", choice.strip()) for choice in argument.split(","))

    def _items(self, argument: str) -> FieldKind:
        if self.kind != "array":
            raise self._describe_wrong("items", f"does not apply to {self.kind}")
        if argument not in KINDS:
            raise _describe_unknown(self._place, self._text, argument, "type", KINDS)
        return _as_kind(argument)

    def _literal(self, name: str, text: str) -> Json:
        """Read a value of this kind."""
        if self.kind in TEXTS:
            return text
        if self.kind in {"number", "integer"}:
            number = _read_number(text)
            if number is None:
                raise self._describe_wrong(name, f"must be a number, not {text!r}")
            return number
        try:
            return decode(text, self._place)
        except Corrupt:
            raise self._describe_wrong(name, f"must be JSON, not {text!r}") from None

    def _describe_wrong(self, rule: str, problem: str) -> Invalid:
        return Invalid(self._place, self._text, f"has a wrong rule: {rule} {problem}", "correct it")


def _check_default(field: Field, definition: Json, place: str) -> Field:
    """Check that a record can have the default, and that the bounds are in order."""
    if field.least is not None and field.most is not None and field.least > field.most:
        raise Invalid(place, definition, "must not have a min above its max", "exchange them")
    if field.default is not msgspec.UNSET:
        _, problems = conform({"default": field}, {"default": field.default})
        if problems:
            problem = f"has a wrong default: it {problems[0].problem}"
            raise Invalid(place, definition, problem, "correct the default")
    return field


def _describe_unknown(
    place: str, text: str, word: str, what: str, known: list[Any] | tuple[Any, ...]
) -> Invalid:
    hint = closest_name(word.partition(":")[0], known)
    fix = f"did you mean {hint}?" if hint else f"use one of {', '.join(known)}"
    return Invalid(place, text, f"has the unknown {what} {word!r}", fix)


def _as_kind(word: str) -> FieldKind:
    kind: FieldKind = msgspec.convert(word, FieldKind)
    return kind


def _read_number(text: str) -> int | float | None:
    for read in (int, float):
        try:
            number = read(text)
        except ValueError:
            continue
        # nan and inf can be neither compared nor stored.
        return number if number - number == 0 else None
    return None


def render(fields: Fields) -> dict[str, Json]:
    """Return fields in the form that `parse` reads."""
    return {name: _render_field(field) for name, field in fields.items()}


def _render_field(field: Field) -> Json:
    words = [str(field.kind)]
    if field.required:
        words.append("required")
    if field.items is not None:
        words.append(f"items:{field.items}")
    write = _writer(field.kind)
    if field.choices:
        words.append(f"enum:{','.join(map(write, field.choices))}")
    if field.least is not None:
        words.append(f"min:{field.least}")
    if field.most is not None:
        words.append(f"max:{field.most}")
    if field.default is not msgspec.UNSET:
        words.append(f"default:{write(field.default)}")
    text = "|".join(words)
    if field.fields is None:
        return text
    nested = render(field.fields)
    return nested if text == "object" and nested else {_OWN_RULES: text, **nested}


def _writer(kind: FieldKind) -> Callable[[Json], str]:
    return str if kind in TEXTS else lambda value: encode(value).decode()
