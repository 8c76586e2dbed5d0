"""Keys are legal on every store, and sort like the names that they come from."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobsync.core.keys import (
    MAX_KEY,
    MAX_SEGMENT,
    MAX_SEGMENTS,
    check_key,
    check_prefix,
    escape,
    parent,
    unescape,
)
from jobsync.errors import Corrupt, Invalid

# 16 characters of at most 4 bytes, each 3 characters when escaped: always under 200.
texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=16
)
ascii_texts = st.text(st.characters(min_codepoint=1, max_codepoint=127), min_size=1, max_size=60)
segments = st.text("!.0123456789=ABCDEF_~-abcdefxyz", min_size=1, max_size=12)


@given(texts | ascii_texts)
@example(".")
@example("..")
@example("".join(map(chr, range(1, 67))))
@example("".join(map(chr, range(67, 128))))
def test_escape_can_be_undone(text: str) -> None:
    """Every text comes back as it was, and its segment is a legal key."""
    segment = escape(text)
    check_key(segment)
    assert unescape(segment) == text


@given(st.lists(texts | ascii_texts, max_size=20))
@example([chr(i) for i in range(1, 256)])
@example([f"a{chr(i)}" for i in range(1, 128)] + ["a", "aa"])
def test_escape_keeps_the_order_of_bytes(names: list[str]) -> None:
    """Sorting segments sorts the texts by their UTF-8 bytes."""
    assert sorted(names, key=escape) == sorted(names, key=str.encode)


@given(segments)
@example("!00")
@example("~C0~80")
@example("a!0Ab")
def test_unescape_accepts_only_escaped_text(segment: str) -> None:
    """A segment is either refused or the escaped form of its text."""
    try:
        text = unescape(segment)
    except Corrupt:
        return
    assert escape(text) == segment


@pytest.mark.parametrize(
    "segment",
    [
        "",
        "!",
        "!2",
        "!2f",
        "!00",
        "!41",
        ".",
        "..",
        ".A",
        "=41",
        "_",
        "_x",
        "~",
        "~C3",
        "~C3~28",
        "~41",
        "a b",
        "a/b",
        "é",
        "a\n",
        "a" * (MAX_SEGMENT + 1),
    ],
)
def test_a_malformed_segment_is_refused(segment: str) -> None:
    """A segment that `escape` cannot return is corrupt, and the error names it."""
    with pytest.raises(Corrupt, match="not an escaped name") as caught:
        unescape(segment)
    assert caught.value.key == segment


@pytest.mark.parametrize("text", ["Order-66", "abc", "A-z-0-9"])
def test_plain_names_stay_readable(text: str) -> None:
    """Letters, digits and dashes are unchanged."""
    assert escape(text) == text


@pytest.mark.parametrize(
    ("text", "segment"),
    [("snake_case", "snake__case"), ("a.b", "a.Eb"), ("a/b", "a.Fb"), ("a b", "a!20b")],
)
def test_common_marks_have_short_forms(text: str, segment: str) -> None:
    """The stored form is fixed: changing it would lose stored records."""
    assert escape(text) == segment


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must not be empty"),
        ("a\0b", "must not contain NUL"),
        ("a\ud800", "must not contain a lone surrogate"),
        ("a" * 201, "at most 200 bytes when escaped, and takes 201"),
        ("é" * 34, "at most 200 bytes when escaped, and takes 204"),
    ],
)
def test_text_that_does_not_fit_is_refused(text: str, problem: str) -> None:
    """A text that does not fit a segment is refused with field, problem and fix."""
    with pytest.raises(Invalid, match=problem) as caught:
        escape(text, "task_id")
    assert caught.value.field == "task_id"
    assert caught.value.fix


def test_a_name_of_exactly_the_limit_is_accepted() -> None:
    """200 bytes fit."""
    assert escape("a" * MAX_SEGMENT) == "a" * MAX_SEGMENT


@pytest.mark.parametrize(
    "key",
    [
        "a",
        "a/b",
        "!/-/=/_/~",
        "a/...",
        "a/..b",
        "a/.b",
        "/".join("a" * MAX_SEGMENTS),
        "a" * MAX_SEGMENT,
        f"{'a' * 200}/{'b' * 200}/{'c' * 200}/{'d' * 97}",
    ],
)
def test_legal_keys_pass(key: str) -> None:
    """A key within all limits is accepted, at the limits too."""
    check_key(key)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "must not have an empty segment"),
        ("/a", "must not have an empty segment"),
        ("a/", "must not have an empty segment"),
        ("a//b", "must not have an empty segment"),
        (".", "must not have '.' or '..' as a segment"),
        ("a/..", "must not have '.' or '..' as a segment"),
        ("a/./b", "must not have '.' or '..' as a segment"),
        ("a b", "must not contain ' '"),
        ("a\n", r"must not contain '\n'"),
        ("é", "must not contain 'é'"),
        ("a*", "must not contain '*'"),
        ("/".join("a" * 9), "must have at most 8 segments, and has 9"),
        ("a/" + "b" * 201, "must have segments of at most 200 bytes, and has one of 201"),
        (
            f"{'a' * 200}/{'b' * 200}/{'c' * 200}/{'d' * 98}",
            "must be at most 700 bytes long, and is 701",
        ),
    ],
)
def test_a_bad_key_names_its_problem(key: str, problem: str) -> None:
    """Each fault has its own message and fix."""
    with pytest.raises(Invalid, match=re.escape(problem)) as caught:
        check_key(key, "parent")
    assert (caught.value.field, caught.value.value) == ("parent", key)
    assert caught.value.fix


def test_a_store_prefix_takes_room() -> None:
    """With less room, shorter keys are refused, and the message states the room."""
    check_key("abcd", room=4)
    with pytest.raises(Invalid, match="must be at most 4 bytes long, and is 5"):
        check_key("abcde", room=4)


@pytest.mark.parametrize("prefix", ["a/", "a/b/", "/".join("a" * 7) + "/"])
def test_legal_prefixes_pass(prefix: str) -> None:
    """A prefix consists of complete segments and leaves room for one more."""
    check_prefix(prefix)


@pytest.mark.parametrize(
    ("prefix", "problem"),
    [
        ("", "must end in '/'"),
        ("a", "must end in '/'"),
        ("/", "must not have an empty segment"),
        ("a//", "must not have an empty segment"),
        ("../", "must not have '.' or '..' as a segment"),
        ("a b/", "must not contain ' '"),
        ("/".join("a" * 8) + "/", "must have at most 7 segments, and has 8"),
        ("a" * 201 + "/", "must have segments of at most 200 bytes, and has one of 201"),
        (
            f"{'a' * 200}/{'b' * 200}/{'c' * 200}/{'d' * 97}/",
            "must be at most 700 bytes long, and is 701",
        ),
    ],
)
def test_a_bad_prefix_names_its_problem(prefix: str, problem: str) -> None:
    """The message shows the prefix as it was given, and counts it as it was given."""
    with pytest.raises(Invalid, match=re.escape(problem)) as caught:
        check_prefix(prefix)
    assert (caught.value.field, caught.value.value) == ("prefix", prefix)
    assert caught.value.fix


@pytest.mark.parametrize(("key", "prefix"), [("a/b/c", "a/b/"), ("a/b", "a/"), ("a", "")])
def test_the_parent_lists_its_key(key: str, prefix: str) -> None:
    """The prefix that lists a key is all but its last segment."""
    assert parent(key) == prefix


@given(st.lists(texts.map(escape), min_size=2, max_size=MAX_SEGMENTS))
def test_a_parent_is_a_legal_prefix(parts: list[str]) -> None:
    """The parent of every legal key can be listed."""
    key = "/".join(parts)
    if len(key) <= MAX_KEY:
        check_key(key)
        check_prefix(parent(key))
