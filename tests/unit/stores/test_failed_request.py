"""The meaning of a failed request, read from the object client's error text."""

import pytest

from jobsync import Misconfigured, Unavailable
from jobsync.stores.objects.errors import FailedRequest

_PUT = "Error performing PUT http://h/jobs/k in 1ms - "


def answered(status: int, code: str = "") -> ValueError:
    """Return the client's error about a response."""
    body = f"<Error><Code>{code}</Code><Message>m</Message></Error>" if code else "<html>no</html>"
    text = f"{_PUT}Server returned non-2xx status code: {status} Words: {body}"
    return ValueError(text)


def one_delete(code: str) -> ValueError:
    """Return the client's error about one of many deletes in a request."""
    return ValueError(f"DeleteObjects request failed for key k: Oh (code: {code})")


def unanswered(kind: str) -> ValueError:
    """Return the client's error about the network."""
    debug = f"inner: Http(\n  HttpError {{\n    kind: {kind},\n    source: reqwest::Error"
    return ValueError(f"{_PUT}HTTP error: error sending request\n{debug}")


def metadata(text: str, address: str = "169.254.169.254") -> ValueError:
    """Return the client's error about a request for credentials."""
    return ValueError(f"PUT http://{address}/latest/token - {text}")


@pytest.mark.parametrize(
    ("error", "absent", "conflict", "rejected"),
    [
        (answered(412, "PreconditionFailed"), False, True, False),
        (answered(404, "NoSuchKey"), True, False, False),
        (answered(409, "BlobAlreadyExists"), False, True, False),
        (answered(409, "ConditionalRequestConflict"), False, False, False),
        (answered(500, "InternalError"), False, False, False),
        (answered(503, "SlowDown"), False, False, False),
        (answered(502), False, False, False),
        (answered(404), False, False, False),
        (answered(404, "NoSuchBucket"), False, False, True),
        (answered(403, "AccessDenied"), False, False, True),
        (answered(403), False, False, True),
        (answered(401), False, False, True),
        (answered(400, "ExpiredToken"), False, False, True),
        (one_delete("AccessDenied"), False, False, True),
        (one_delete("InternalError"), False, False, False),
        (unanswered("Connect"), False, False, True),
        (unanswered("Timeout"), False, False, False),
        (unanswered("Request"), False, False, False),
        (unanswered("Decode"), False, False, False),
        (unanswered("Interrupted"), False, False, False),
        (unanswered("Unknown"), False, False, False),
        (ValueError("something else"), False, False, False),
        (ValueError("inner: BareRedirect"), False, False, True),
        (metadata("status code: 404 Not Found"), False, False, True),
        (metadata("HTTP error: error sending request"), False, False, True),
    ],
)
def test_only_a_definite_answer_decides(
    error: ValueError, *, absent: bool, conflict: bool, rejected: bool
) -> None:
    """412 is a conflict, 404 a missing key; 409, 5xx, lost and late replies decide nothing."""
    failure = FailedRequest.from_error(error)
    assert (failure.is_absent, failure.is_conflict, failure.is_rejected) == (
        absent,
        conflict,
        rejected,
    )


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (answered(412, "PreconditionFailed"), True),
        (answered(404, "NoSuchKey"), True),
        (answered(501, "NotImplemented"), True),
        (answered(405), True),
        (answered(400, "InvalidArgument"), True),
        (answered(400), False),
        (answered(400, "RequestTimeout"), False),
        (answered(400, "ExpiredToken"), False),
        (answered(403, "AccessDenied"), False),
        (answered(404), False),
        (answered(408), False),
        (answered(409, "OperationAborted"), False),
        (answered(429), False),
        (answered(500, "InternalError"), False),
        (answered(503, "SlowDown"), False),
        (unanswered("Connect"), False),
        (unanswered("Request"), False),
        (answered(501), True),
        (unanswered("Timeout"), False),
        (ValueError("something else"), False),
    ],
)
def test_a_condition_is_refused_only_by_an_answer(error: ValueError, *, refused: bool) -> None:
    """One that was not met or that the server does not know; not one without an answer."""
    assert FailedRequest.from_error(error).is_refused is refused


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (answered(412, "PreconditionFailed"), FailedRequest(status=412, code="PreconditionFailed")),
        (answered(502), FailedRequest(status=502)),
        (one_delete("InternalError"), FailedRequest(code="InternalError")),
        (unanswered("Connect"), FailedRequest(was_sent=False)),
        (unanswered("Timeout"), FailedRequest(is_timeout=True)),
        (unanswered("Request"), FailedRequest()),
        (ValueError("something else"), FailedRequest()),
        (ValueError("inner: BareRedirect"), FailedRequest(code="PermanentRedirect")),
        *(
            pair
            for address in ("169.254.169.254", "169.254.170.2")
            for pair in (
                (
                    metadata("status code: 404 Not Found", address),
                    FailedRequest(code="NoCredentials", was_sent=False),
                ),
                (
                    metadata("status code: 503 Busy", address),
                    FailedRequest(was_sent=False, lacks_credentials=True),
                ),
                (
                    metadata("HTTP error: error sending request", address),
                    FailedRequest(was_sent=False, lacks_credentials=True),
                ),
            )
        ),
    ],
)
def test_an_error_is_read_as_a_whole(error: ValueError, failure: FailedRequest) -> None:
    """What the server answered, and how far the request got without an answer."""
    assert FailedRequest.from_error(error) == failure


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (answered(403, "SignatureDoesNotMatch"), Misconfigured, "Correct the secret"),
        (answered(403, "InvalidAccessKeyId"), Misconfigured, "Correct the key"),
        (answered(403, "RequestTimeTooSkewed"), Misconfigured, "Set this machine's clock"),
        (answered(403, "Strange"), Misconfigured, "403 Strange.*s3:PutObject"),
        (
            answered(404, "NoSuchBucket"),
            Misconfigured,
            "does not exist.*Create it, or correct its name",
        ),
        (answered(400, "ExpiredToken"), Misconfigured, "Renew it"),
        (one_delete("AccessDenied"), Misconfigured, r"\(the server answered AccessDenied\)"),
        (answered(503, "SlowDown"), Unavailable, "the server answered 503 SlowDown"),
        (answered(404), Unavailable, r"the server answered 404\."),
        (unanswered("Connect"), Unavailable, r"no connection to the server.*\. Check that it runs"),
        (unanswered("Timeout"), Unavailable, "no answer came in time"),
        (unanswered("Request"), Unavailable, "the connection was lost"),
        (metadata("status code: 404 Not Found"), Misconfigured, "without credentials"),
        (metadata("status code: 401 Who"), Misconfigured, "without credentials"),
        (metadata("status code: 408 Late"), Unavailable, "no credentials came"),
        (metadata("status code: 429 Slow"), Unavailable, "no credentials came"),
        (metadata("status code: 500 Oh"), Unavailable, "no credentials came.*set AWS_…; or try"),
        (metadata("HTTP error: error sending request"), Unavailable, "no credentials came"),
    ],
)
def test_the_error_has_the_fix(given: ValueError, kind: type[Exception], words: str) -> None:
    """A wrong set-up and a server that cannot answer now are different errors; both have a fix."""
    error = FailedRequest.from_error(given).to_error("s3://***@h/jobs", renews_credentials=False)
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error


@pytest.mark.parametrize(
    ("code", "is_renewed"),
    [
        ("ExpiredToken", True),
        ("InvalidToken", True),
        ("InvalidAccessKeyId", False),
        ("SignatureDoesNotMatch", False),
        ("AccessDenied", False),
    ],
)
@pytest.mark.parametrize("status", [400, 403])
def test_a_token_that_is_renewed_is_temporary(status: int, code: str, *, is_renewed: bool) -> None:
    """If the client finds its credentials itself, it will replace an old token, and no key."""
    failure = FailedRequest.from_error(answered(status, code))
    for renews in (False, True):
        error = failure.to_error("s3://jobs", renews_credentials=renews)
        assert type(error) is (Unavailable if renews and is_renewed else Misconfigured)


def test_only_the_code_is_read_from_the_text() -> None:
    """Addresses, key ids and messages are dropped."""
    failure = FailedRequest.from_response(
        403, "<Code>InvalidAccessKeyId</Code><AWSAccessKeyId>AKIDME</AWSAccessKeyId>"
    )
    shown = f"{failure!r} {failure} {failure.to_error('s3://jobs', renews_credentials=False)!r}"
    assert "AKIDME" not in shown
