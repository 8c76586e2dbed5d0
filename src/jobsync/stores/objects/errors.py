"""What a request that failed came to, read from what the object client says about it.

Only the status, the server's short code and how far the request got are taken from the
client's text; the rest may hold addresses, key ids and signatures, and is dropped here.

Whatever is not a definite answer to this one request is unknown: 409 (nothing was
decided), 5xx, a reply that was lost or late. A record is absent only if the server says
that the *key* is missing. 403 never means absent, nor does the 404 of something that
stands before the server.
"""

import re

import msgspec

from jobsync.errors import JobsyncError, Misconfigured, Unavailable

__all__ = ["Refusal"]

_ABSENT = ("NoSuchKey", "BlobNotFound")
_NO_CREDENTIALS = "NoCredentials"
_RIGHTS = "allow s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject on it"

# The server's code, what that means, and what to do about it.
_REFUSED = {
    "AccessDenied": ("does not allow this to these credentials", _RIGHTS),
    "AccountProblem": ("is closed to this account", "ask the provider"),
    "AllAccessDisabled": ("is closed to everybody", "ask the provider"),
    "AuthorizationHeaderMalformed": ("is in another region", "name it: ?region=…"),
    "ContainerNotFound": ("names a container that does not exist", "create it first"),
    "ExpiredToken": ("was given a session token that has expired", "renew it, connect again"),
    "InvalidAccessKeyId": ("does not know this access key", "correct the key"),
    "InvalidToken": ("does not take the session token", "renew it, connect again"),
    _NO_CREDENTIALS: ("comes without credentials", "write s3://KEY:SECRET@…, or set AWS_…"),
    "NoSuchBucket": ("names a bucket that does not exist", "create it first"),
    "NotImplemented": ("has no conditional writes", "use a server that has"),
    "PermanentRedirect": ("is in another region", "name it: ?region=…"),
    "RequestTimeTooSkewed": ("has another time than this machine", "set this machine's clock"),
    "SignatureDoesNotMatch": ("does not take this secret for this key", "correct the secret"),
}
_RENEWED = ("ExpiredToken", "InvalidToken")
_FORBIDDEN = (401, 403)

_find_status = re.compile(r"status code: ([0-9]{3})").search
# In an answer's body; and in the client's words for one of many deletes in a request.
_find_code = re.compile(r"(?:<Code>|\(code: )([A-Za-z0-9]{1,60})(?:</Code>|\))").search
_find_kind = re.compile(r"HttpError \{\s*kind: (\w+)").search
_SENT_NOTHING = {"Connect"}
_METADATA_SERVICES = ("169.254.169.254", "169.254.170.2")


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was not simply carried out."""

    status: int = 0
    """The HTTP status; 0 if no answer came, or one for each of several requests in one."""
    code: str = ""
    """The server's own word for it."""
    sent: bool = True
    """Whether anything may have reached the server."""
    late: bool = False
    """Whether time ran out."""

    @classmethod
    def read(cls, error: Exception) -> "Refusal":
        """Read what the client library raised."""
        text = str(error)
        if any(address in text for address in _METADATA_SERVICES):
            return cls(code=_NO_CREDENTIALS, sent=False)
        if "BareRedirect" in text:
            return cls(code="PermanentRedirect")
        status = _find_status(text)
        if status or _find_code(text):
            return cls.answer(int(status.group(1)) if status else 0, text)
        found = _find_kind(text)
        kind = found.group(1) if found else ""
        return cls(sent=kind not in _SENT_NOTHING, late=kind == "Timeout")

    @classmethod
    def answer(cls, status: int, body: str) -> "Refusal":
        """Read a server's answer."""
        code = _find_code(body)
        return cls(status=status, code=code.group(1) if code else "")

    @property
    def absent(self) -> bool:
        """Whether the server has no such key."""
        return self.status == 404 and self.code in _ABSENT  # noqa: PLR2004 - HTTP's number

    @property
    def conflict(self) -> bool:
        """Whether a write was refused because of what is, or is not, there.

        Amazon answers 404 where the record to replace is missing, others 412; Azure has a
        409 of its own for a name in use.
        """
        return self.status == 412 or self.absent or self.code == "BlobAlreadyExists"  # noqa: PLR2004

    @property
    def harmless(self) -> bool:
        """Whether it is certain that nothing was written, now or later."""
        return not self.sent or self._forbidden

    @property
    def _forbidden(self) -> bool:
        return self.code in _REFUSED or self.status in _FORBIDDEN

    def __str__(self) -> str:
        if answer := " ".join(filter(None, [str(self.status or ""), self.code])):
            return f"the server answered {answer}"
        if not self.sent:
            return "no connection to the server"
        return "no answer came in time" if self.late else "the connection was lost"

    def explain(self, store: str, *, renewing: bool) -> JobsyncError:
        """Make the error that tells what to do.

        Args:
            store: how the store is called.
            renewing: whether the client library looks for credentials by itself, so that
                a token that has expired will be followed by another.
        """
        if self._forbidden and not (renewing and self.code in _RENEWED):
            problem, fix = _REFUSED.get(self.code, _REFUSED["AccessDenied"])
            return Misconfigured("url", store, f"{problem} ({self})", fix)
        if not self.sent:
            return Unavailable(store, str(self), "check that it runs, and its address")
        return Unavailable(store, str(self))
