"""The loader for `.sql` files."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobsync.stores.sql import (
    as_array,
    escape_copy,
    fill_in,
    load_schema_steps,
    load_sql,
    quote_name,
)

TEXT = """
-- Statements on records.

-- fragment: is_live
value IS NOT NULL

-- name: read
-- Read one record.
-- Two lines of comment.
SELECT value FROM {schema}.jobsync_record  -- a comment inside stays
WHERE key = %s AND {is_live};

-- name: define
CREATE FUNCTION {schema}.f() AS $$
  -- stays
  SELECT '{"a": {"b": 1}}'; SELECT '{tasks}';
$$;
"""


def load(folder: Path, text: str) -> dict[str, str]:
    """Write an SQL file and load it."""
    (folder / "queries.sql").write_text(text, encoding="utf-8")
    return load_sql(str(folder / "module.py"), "queries.sql")


def test_blocks_are_statements_by_name(tmp_path: Path) -> None:
    """The comment below a name and the last semicolon are left out; fragments are inserted."""
    statements = load(tmp_path, TEXT)
    assert list(statements) == ["read", "define"]
    assert statements["read"] == (
        "SELECT value FROM {schema}.jobsync_record  -- a comment inside stays\n"
        "WHERE key = %s AND value IS NOT NULL"
    )


def test_only_the_names_that_are_passed_are_replaced(tmp_path: Path) -> None:
    """Braces of JSON and of arrays stay as they are."""
    text = fill_in(load(tmp_path, TEXT)["define"], {"schema": '"s"'})
    assert text.startswith('CREATE FUNCTION "s".f() AS $$\n  -- stays\n')
    assert text.endswith("""SELECT '{"a": {"b": 1}}'; SELECT '{tasks}';\n$$""")


def test_a_name_is_used_once(tmp_path: Path) -> None:
    """Two blocks of one name are an error."""
    with pytest.raises(ValueError, match="two blocks with the name 'read'"):
        load(tmp_path, "-- name: read\nSELECT 1;\n-- fragment: read\nx\n")


def read_copy(data: str) -> list[list[str]]:
    """Read rows of COPY as the server does: the text format has these escapes, and no others."""
    codes = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\"}
    rows: list[list[str]] = [[""]]
    characters = iter(data)
    for character in characters:
        match character:
            case "\t":
                rows[-1].append("")
            case "\n":
                rows.append([""])
            case "\r":
                raise AssertionError("a carriage return is taken for the end of a row")
            case "\\":
                rows[-1][-1] += codes[next(characters)]
            case _:
                rows[-1][-1] += character
    assert rows.pop() == [""]
    return rows


texts = st.text(
    st.sampled_from("aé😀 \\\t\n\r\v\f\b\x7f\x85\u2028'\"{}.N")
    | st.characters(exclude_characters="\0", exclude_categories=["Cs"])
)


@given(st.lists(st.lists(texts, min_size=1, max_size=4), max_size=4))
@example([["\r\n"], ["\\."], ["\\N"]])
def test_rows_that_are_copied_are_read_back(rows: list[list[str]]) -> None:
    """Whatever is in a text, no field ends early, and no row."""
    data = "".join("\t".join(map(escape_copy, row)) + "\n" for row in rows)
    assert read_copy(data) == rows


@given(st.lists(texts.filter(lambda text: text.isprintable()) | st.none()))
def test_an_array_is_json_in_other_brackets(items: list[str | None]) -> None:
    """That is how the server reads it; NULL has no quotes."""
    text = as_array(items)
    assert (text[0], text[-1]) == ("{", "}")
    assert msgspec.json.decode(f"[{text[1:-1]}]") == items


@pytest.mark.parametrize("name", ["plain", "Upper", 'a"b', '"', "50%", "{schema}", "two words"])
def test_a_quoted_name_is_one_identifier(name: str) -> None:
    """A quote within it is doubled."""
    quoted = quote_name(name)
    assert (quoted[0], quoted[-1]) == ('"', '"')
    assert quoted[1:-1].replace('""', "") == name.replace('"', "")
    assert quoted[1:-1].count('"') == 2 * name.count('"')


@pytest.mark.parametrize("first", ["name", "fragment"])
@pytest.mark.parametrize("second", ["name", "fragment"])
def test_a_name_is_used_once_by_blocks_of_any_kind(first: str, second: str, tmp_path: Path) -> None:
    """Else one would hide the other."""
    with pytest.raises(ValueError, match="two blocks with the name 'read'"):
        load(tmp_path, f"-- {first}: read\nx\n-- {second}: read\ny\n")


def test_only_fragments_are_inserted(tmp_path: Path) -> None:
    """In the order of the file: also in other fragments, and only in what comes after them."""
    text = (
        "-- fragment: a\nA;\n-- fragment: b\n{a} B\n-- name: c\n{b} {later} {d};;\n"
        "-- name: d\nD\n-- fragment: later\nL\n-- name: e\n{c} {d} {later}\n"
    )
    assert load(tmp_path, text) == {"c": "A B {later} {d};", "d": "D", "e": "{c} {d} L"}


def test_the_steps_of_a_schema_are_in_the_order_of_their_versions(tmp_path: Path) -> None:
    """Also beyond the ninth; other statements belong to no step."""
    blocks = [f"-- name: v{n}_{part}\nS{n}{part};\n" for n in range(1, 13) for part in "ab"]
    others = "-- name: version\nV;\n-- name: view_1\nW;\n"
    (tmp_path / "schema.sql").write_text("".join(blocks) + others, encoding="utf-8")
    steps = load_schema_steps(str(tmp_path / "module.py"), "schema.sql")
    assert steps == tuple((f"S{n}a", f"S{n}b") for n in range(1, 13))
