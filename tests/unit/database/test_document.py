"""Documents: the record's own fields, what the library adds, and nothing of its own business."""

import copy
import pickle
from typing import Any

import pytest

from jobsync import Corrupt, Document, Record
from jobsync.database.archive import ARCHIVING
from jobsync.database.index_entries import ENTRIES

SHOWN = {"id": "a", "user": "ann", "_created_at": 1.5, "_updated_at": 2.5, "_version": "v7"}


def make_document(**fields: Any) -> Document:
    """Return a document of a stored record."""
    stored = {name: value for name, value in SHOWN.items() if name != "_version"}
    return Document(Record("data/r/a", {**stored, **fields}, "v7", 1, 0, 1, ""))


@pytest.mark.parametrize("hidden", [{}, {ARCHIVING: {"to": "b"}, ENTRIES: {"k": "e"}}])
@pytest.mark.parametrize("duplicate", [lambda it: it, copy.copy, copy.deepcopy])
def test_a_document_has_what_its_readers_see(hidden: dict[str, Any], duplicate: Any) -> None:
    """However it is read, copied or pickled."""
    document: Any = duplicate(make_document(**hidden))
    for each in (document, pickle.loads(pickle.dumps(document))):
        assert dict(each) == SHOWN
        assert list(each) == list(SHOWN)
        assert (len(each), each == SHOWN, repr(each)) == (5, True, f"Document({SHOWN})")
        for name, value in SHOWN.items():
            assert name in each
            assert each[name] == each.get(name) == getattr(each, name) == value
    for key in (ARCHIVING, ENTRIES, "nobody", 5, None):
        assert key not in document
        assert document.get(key) is None
        with pytest.raises(KeyError, match="the record has no"):
            document[key]
    for name in (ARCHIVING, ENTRIES, "nobody"):
        with pytest.raises(AttributeError, match=f"the record has no '{name}'"):
            getattr(document, name)
        assert not hasattr(document, name)


def test_a_missing_field_is_named_with_the_closest_one() -> None:
    """As an item and as an attribute."""
    document: Any = make_document()
    with pytest.raises(KeyError, match=r"the record has no 'usr'; did you mean user\?"):
        document["usr"]
    with pytest.raises(AttributeError, match=r"the record has no 'usr'; did you mean user\?"):
        _ = document.usr


def test_a_document_cannot_be_changed() -> None:
    """Neither its own fields nor others."""
    document: Any = make_document()
    for name in ("user", "other", "_record", "_version"):
        with pytest.raises(AttributeError, match="documents are read-only; use update"):
            setattr(document, name, 1)
    with pytest.raises(TypeError):
        document["user"] = 1
    assert dict(document) == SHOWN


@pytest.mark.parametrize("value", [None, 5, "a", ["id"], {}, {"id": 5}, {"id": None}])
def test_a_record_without_an_id_is_no_document(value: Any) -> None:
    """The error has its key."""
    with pytest.raises(Corrupt, match=r"data/r/x .*a record is an object with an id"):
        Document(Record("data/r/x", value, "v", 1, 0, 1, ""))
