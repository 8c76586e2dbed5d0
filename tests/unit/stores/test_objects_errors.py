"""What a failed request means, read from the words of the object client."""

import pytest

from jobsync import Misconfigured, Unavailable
from jobsync.stores.objects.errors import Refusal

_PUT = "Error performing PUT http://h/jobs/k in 1ms - "


def answered(status: int, code: str = "") -> Refusal:
    """Read an answer in the client's words."""
    body = f"<Error><Code>{code}</Code><Message>m</Message></Error>" if code else "<html>no</html>"
    text = f"{_PUT}Server returned non-2xx status code: {status} Words: {body}"
    return Refusal.read(ValueError(text))


def one_delete(code: str) -> Refusal:
    """Read the answer to one of many deletes in a request, in the client's words."""
    return Refusal.read(ValueError(f"DeleteObjects request failed for key k: Oh (code: {code})"))


def unanswered(kind: str) -> Refusal:
    """Read a failure of the network in the client's words."""
    debug = f"inner: Http(\n  HttpError {{\n    kind: {kind},\n    source: reqwest::Error"
    return Refusal.read(ValueError(f"{_PUT}HTTP error: error sending request\n{debug}"))


@pytest.mark.parametrize(
    ("refusal", "absent", "conflict", "harmless"),
    [
        (answered(412, "PreconditionFailed"), False, True, False),
        (answered(404, "NoSuchKey"), True, True, False),
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
        (Refusal.read(ValueError("inner: BareRedirect")), False, False, True),
    ],
)
def test_only_a_definite_answer_decides(
    refusal: Refusal, *, absent: bool, conflict: bool, harmless: bool
) -> None:
    """412 and a missing key are conflicts; 409, 5xx, lost and late replies decide nothing."""
    assert (refusal.absent, refusal.conflict, refusal.harmless) == (absent, conflict, harmless)


@pytest.mark.parametrize(
    ("refusal", "kind", "words"),
    [
        (answered(403, "SignatureDoesNotMatch"), Misconfigured, "Correct the secret"),
        (answered(403, "InvalidAccessKeyId"), Misconfigured, "Correct the key"),
        (answered(403, "RequestTimeTooSkewed"), Misconfigured, "Set this machine's clock"),
        (answered(403, "Strange"), Misconfigured, "403 Strange.*s3:PutObject"),
        (answered(404, "NoSuchBucket"), Misconfigured, "does not exist.*Create it first"),
        (answered(400, "ExpiredToken"), Misconfigured, "Renew it"),
        (one_delete("AccessDenied"), Misconfigured, r"\(the server answered AccessDenied\)"),
        (answered(503, "SlowDown"), Unavailable, "the server answered 503 SlowDown"),
        (answered(404), Unavailable, r"the server answered 404\."),
        (unanswered("Connect"), Unavailable, r"no connection to the server.*\. Check that it runs"),
        (unanswered("Timeout"), Unavailable, "no answer came in time"),
        (unanswered("Request"), Unavailable, "the connection was lost"),
        (
            Refusal.read(ValueError("PUT http://169.254.169.254/latest/api/token")),
            Misconfigured,
            "without credentials",
        ),
    ],
)
def test_the_error_tells_what_to_do(refusal: Refusal, kind: type[Exception], words: str) -> None:
    """Set-up that is wrong is told from a server that cannot answer now; both with the fix."""
    error = refusal.explain("s3://***@h/jobs", renewing=False)
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error


def test_a_token_that_is_renewed_by_itself_is_only_late() -> None:
    """Where the client looks for credentials, an expired one will be followed by another."""
    error = answered(400, "ExpiredToken").explain("s3://jobs", renewing=True)
    assert isinstance(error, Unavailable)


def test_nothing_but_the_code_is_taken_from_the_text() -> None:
    """Addresses, key ids and messages stay behind."""
    refusal = Refusal.answer(
        403, "<Code>InvalidAccessKeyId</Code><AWSAccessKeyId>AKIDME</AWSAccessKeyId>"
    )
    shown = f"{refusal!r} {refusal} {refusal.explain('s3://jobs', renewing=False)!r}"
    assert "AKIDME" not in shown
