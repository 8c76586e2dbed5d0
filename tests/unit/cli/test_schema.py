"""What `schema` prints for each kind of store, and what has none."""

import json
import re

import pytest
from click.testing import CliRunner

from jobsync.cli.schema import schema
from jobsync.errors import Misconfigured


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["memory://x"], "needs no schema"),
        (["gs://bucket-a/jobs"], "has no IAM policy"),
        (["az://bucket-a/jobs"], "has no IAM policy"),
        (["memory://x", "--check"], "has no tables"),
        (["s3://bucket-a", "--check"], "has no tables"),
    ],
)
def test_a_store_without_a_schema_is_refused(words: list[str], problem: str) -> None:
    """With what to do instead."""
    error = CliRunner().invoke(schema, words).exception
    assert isinstance(error, Misconfigured)
    assert (error.problem, bool(error.fix)) == (problem, True)
    assert words[0] in str(error)


@pytest.mark.parametrize("url", ["sqlite:///jobs.db", "postgresql://u@h/d", "s3://bucket-a/x"])
@pytest.mark.parametrize("words", [[], ["--tables-only"], ["--appname", "eu_"]])
def test_a_schema_is_the_same_text_as_json(url: str, words: list[str]) -> None:
    """The views are those of one fleet; a bucket has none."""
    text = CliRunner().invoke(schema, [url, *words]).stdout
    (row,) = json.loads(CliRunner().invoke(schema, [url, *words, "--json"]).stdout)
    assert f"{row['schema']}\n" == text
    views = set(re.findall(r"^ *CREATE (?:OR REPLACE )?VIEW (\S+)", text, re.MULTILINE))
    prefix = "eu_" if "eu_" in words else "sync_"
    if words == ["--tables-only"] or url.startswith("s3"):
        assert views == set()
    else:
        assert views
        assert {name.rpartition(".")[2].strip('"').startswith(prefix) for name in views} == {True}
