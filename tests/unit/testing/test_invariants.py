"""How the simulated world tells defects from faults."""

import pytest

from jobsync.testing.invariants import (
    InvariantBroken,
    Violation,
    as_violation,
    describe_failure,
    fail,
    is_defect,
    require,
)


def test_a_defect_is_found_behind_other_errors() -> None:
    """In causes, in groups, and in the causes of what groups contain."""
    error = OSError("gone")
    error.__cause__ = ExceptionGroup("both", [OSError(), ValueError()])
    assert not is_defect(error)
    error.__cause__ = ExceptionGroup("both", [OSError(), AttributeError("typo")])
    assert is_defect(error)


def test_causes_may_form_a_circle() -> None:
    """Found: a process of the world was not started again, and its messages were left."""
    one, other = OSError("one"), OSError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_defect(one)
    other.__cause__ = ExceptionGroup("both", [one])
    assert not is_defect(one)


@pytest.mark.parametrize("kind", [AttributeError, ImportError, NameError, TypeError])
def test_each_kind_of_defect_is_one_wherever_it_stands(kind: type[Exception]) -> None:
    """Alone, as a cause, as what was handled when another was raised, and within a group."""
    defect = kind("typo")
    caused, handled = OSError("caused"), OSError("handled")
    caused.__cause__, handled.__context__ = defect, defect
    for error in (defect, caused, handled, ExceptionGroup("some", [OSError(), handled])):
        assert is_defect(error)
        assert describe_failure(error, "what") == Violation("crash", "what")
    chained = OSError("chained")
    chained.__context__ = handled
    assert is_defect(chained)
    # What is raised from something else says what led to it.
    chained.__cause__ = OSError("cause")
    assert not is_defect(chained)


@pytest.mark.parametrize("error", [OSError("gone"), ValueError(), KeyError("x"), None, "text"])
def test_what_is_no_defect_breaks_a_promise(error: object) -> None:
    """No background task dies unnoticed, of whatever."""
    assert not is_defect(error)
    assert describe_failure(error, "what") == Violation("A1", "what")


def test_what_a_check_finds_is_a_violation() -> None:
    """Text gets an id of its own, and a violation keeps its own."""
    assert as_violation("text") == Violation("user", "text")
    assert as_violation(Violation("Q1", "text")) == Violation("Q1", "text")
    require(1, "Q1", "fine")
    for empty in (None, 0, "", False, ()):
        with pytest.raises(InvariantBroken, match="Q2: not so") as caught:
            require(empty, "Q2", "not so")
        assert caught.value.violation == Violation("Q2", "not so")
    with pytest.raises(InvariantBroken, match="Q3: never"):
        fail("Q3", "never")
