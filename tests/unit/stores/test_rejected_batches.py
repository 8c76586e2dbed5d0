"""A batch of objects, some of which the server has refused."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobsync import Unavailable
from jobsync.stores.objects.errors import FailedRequest
from jobsync.stores.objects.store import ObjectsStore

REFUSED = FailedRequest.from_error(
    ValueError(
        "Error performing PUT http://h/jobs/k in 1ms - Server returned non-2xx status code: 403 "
        "Forbidden: <Error><Code>AccessDenied</Code><Message>m</Message></Error>"
    )
)
LOST = FailedRequest.from_error(ValueError("Error performing PUT http://h/jobs/k in 1ms - gone"))
KINDS: dict[str, str | FailedRequest] = {"written": '"etag"', "refused": REFUSED, "lost": LOST}


@pytest.mark.parametrize("replies", [*itertools.product(KINDS, repeat=3)], ids="-".join)
def test_a_batch_is_refused_only_if_nothing_of_it_can_be_written(replies: tuple[str, ...]) -> None:
    """Otherwise each change has an outcome of its own."""
    bucket = SimpleNamespace(to_error=lambda _: Unavailable("bucket", "refused"))
    store = cast("Any", SimpleNamespace(_bucket=bucket))
    answers = [KINDS[reply] for reply in replies]
    if set(replies) == {"refused"}:
        with pytest.raises(Unavailable):
            ObjectsStore._raise_if_all_rejected(store, answers)
    else:
        ObjectsStore._raise_if_all_rejected(store, answers)
