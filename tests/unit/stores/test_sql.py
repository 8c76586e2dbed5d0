"""The loader for `.sql` files."""

from pathlib import Path

import pytest

from jobsync.stores.sql import fill_in, load_sql

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
