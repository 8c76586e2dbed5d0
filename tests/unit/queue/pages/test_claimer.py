"""Requests to several pages at once: which error their caller gets."""

import pytest

from jobsync.errors import Misconfigured, OutcomeUnknown, Unavailable
from jobsync.queue.pages.claimer import gather_all

UNKNOWN = OutcomeUnknown("one", "the reply was lost")
REFUSED = Unavailable("two", "the request was refused")
FORBIDDEN = Misconfigured("url", "three", "does not allow this", "allow it")
BUG = TypeError("four")


async def answer(result: str | Exception) -> str:
    """Return the result, or raise it."""
    if isinstance(result, Exception):
        raise result
    return result


@pytest.mark.parametrize(
    ("results", "raised"),
    [
        ([REFUSED, UNKNOWN], UNKNOWN),
        ([UNKNOWN, REFUSED], UNKNOWN),
        ([REFUSED, "done", FORBIDDEN], REFUSED),
        (["done", FORBIDDEN, REFUSED], FORBIDDEN),
        ([UNKNOWN, REFUSED, BUG], BUG),
    ],
)
async def test_what_may_have_happened_is_not_reported_as_refused(
    results: list[str | Exception], raised: Exception
) -> None:
    """If one of several requests may have been executed, so says the error of all of them."""
    with pytest.raises(type(raised)) as caught:
        await gather_all([answer(each) for each in results])
    assert caught.value is raised


async def test_all_results_are_returned_in_order() -> None:
    """Without an error, each request has its result."""
    assert await gather_all([answer(each) for each in "abc"]) == ["a", "b", "c"]
