"""How the simulated world tells defects from faults."""

from jobsync.testing.invariants import is_defect


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
