"""Loader for `.sql` files: named statements that stores, queues and views run.

Stands alone because three packages use it. A file is read once, when its module is imported::

    _SQL = load_sql(__file__, "queries.sql")
    await connection.execute(_SQL["read"], [key])

A file is a list of blocks. Text before the first block is a comment on the file. A block starts
with `-- name:` (a statement) or `-- fragment:` (a part of statements, inserted where its name
stands in braces; fragments come before their users). The comment lines directly below that line
explain the block and are not part of it; the semicolon at its end is not either::

    -- fragment: is_live
    value IS NOT NULL

    -- name: read
    -- Read one record.
    SELECT value FROM {schema}.jobsync_record WHERE key = %s AND {is_live};

Other names in braces stay until `fill_in` replaces them (`{schema}`, `{where}`). Braces of
JSON and of arrays are left alone, because only the names passed are replaced.
"""

import re
from pathlib import Path

__all__ = ["fill_in", "load_sql"]

_BLOCK = re.compile(
    r"^-- (?P<kind>name|fragment): (?P<name>\w+)\n(?:--.*\n)*"
    r"(?P<text>(?s:.*?))(?=^-- (?:name|fragment):|\Z)",
    re.MULTILINE,
)


def load_sql(module: str, file: str) -> dict[str, str]:
    """Return the statements of a file beside the module, by name and in the file's order.

    Args:
        module: the `__file__` of the module.
        file: the name of the SQL file.
    """
    statements: dict[str, str] = {}
    fragments: dict[str, str] = {}
    for block in _BLOCK.finditer(Path(module).with_name(file).read_text(encoding="utf-8")):
        name = block["name"]
        if name in statements or name in fragments:
            raise ValueError(f"{file} has two blocks with the name {name!r}.")
        text = fill_in(block["text"].strip().removesuffix(";"), fragments)
        (statements if block["kind"] == "name" else fragments)[name] = text
    return statements


def fill_in(text: str, values: dict[str, str]) -> str:
    """Return the text with `{name}` replaced by its value, for each name in `values`."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text
