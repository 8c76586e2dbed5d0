"""What a failed request to an object server means: absent, conflict, refused or unknown.

A request without a definite answer has an unknown outcome: 409 (nothing was decided), 5xx, a
lost or late reply. A record is absent only if the server says that the *key* is missing. 403
never means absent, and neither does the 404 of something in front of the server. Only the status,
the server's short code and how far the request got are read from the client's error text; the
rest may have addresses, key ids and signatures, and is dropped.
"""

import re

import msgspec

from jobsync.errors import JobsyncError, Misconfigured, Unavailable

__all__ = ["FailedRequest"]

_NOT_FOUND_CODES = ("NoSuchKey", "BlobNotFound")
_NO_CREDENTIALS = "NoCredentials"
_RIGHTS_FIX = "allow s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject on it"
_CREDENTIALS_FIX = "write s3://KEY:SECRET@…, or set AWS_…"

# The server's code, its meaning, and the fix.
_REFUSALS = {
    "AccessDenied": ("does not allow this with these credentials", _RIGHTS_FIX),
    "AccountProblem": ("is closed to this account", "ask the provider"),
    "AllAccessDisabled": ("is closed to all accounts", "ask the provider"),
    "AuthorizationHeaderMalformed": ("is in another region", "name it: ?region=…"),
    "ContainerNotFound": ("names a container that does not exist", "create it first"),
    "ExpiredToken": ("was given a session token that has expired", "renew it, connect again"),
    "InvalidAccessKeyId": ("does not know this access key", "correct the key"),
    "InvalidToken": ("does not accept the session token", "renew it, connect again"),
    _NO_CREDENTIALS: ("comes without credentials", _CREDENTIALS_FIX),
    "NoSuchBucket": (
        "names a bucket that does not exist",
        "create it, or correct its name",
    ),
    "NotImplemented": ("has no conditional writes", "use a server that has them"),
    "PermanentRedirect": ("is in another region", "name it: ?region=…"),
    "RequestTimeTooSkewed": ("has another time than this machine", "set this machine's clock"),
    "SignatureDoesNotMatch": ("does not accept this secret for this key", "correct the secret"),
}
_RENEWABLE = ("ExpiredToken", "InvalidToken")
_FORBIDDEN = (401, 403)
_UNSUPPORTED = (405, 501)
_BUSY = ("408", "429")
_REQUEST_TIMEOUT = "RequestTimeout"

_find_status = re.compile(r"status code: ([0-9]{3})").search
# In a response body, and in the client's text for one of many deletes in a request.
_find_code = re.compile(r"(?:<Code>|\(code: )([A-Za-z0-9]{1,60})(?:</Code>|\))").search
_find_kind = re.compile(r"HttpError \{\s*kind: (\w+)").search
_NOT_SENT = {"Connect"}
_METADATA_SERVICES = ("169.254.169.254", "169.254.170.2")


class FailedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that failed or whose outcome is unknown."""

    status: int = 0
    """The HTTP status; 0 without an answer, and for one of several deletes in a request."""
    code: str = ""
    """The server's error code."""
    was_sent: bool = True
    """Whether the request may have reached the server."""
    is_timeout: bool = False
    """Whether the request timed out."""
    lacks_credentials: bool = False
    """Whether the machine's metadata service, which has the credentials, did not answer."""

    @classmethod
    def from_error(cls, error: Exception) -> "FailedRequest":
        """Read an exception of the client library."""
        text = str(error)
        status = _find_status(text)
        if any(address in text for address in _METADATA_SERVICES):
            # The service answers 4xx if there are no credentials; anything else may be a fault.
            answer = status.group(1) if status else ""
            has_none = answer.startswith("4") and answer not in _BUSY
            code = _NO_CREDENTIALS if has_none else ""
            return cls(code=code, was_sent=False, lacks_credentials=not has_none)
        if "BareRedirect" in text:
            return cls(code="PermanentRedirect")
        if status or _find_code(text):
            return cls.from_response(int(status.group(1)) if status else 0, text)
        found = _find_kind(text)
        kind = found.group(1) if found else ""
        return cls(was_sent=kind not in _NOT_SENT, is_timeout=kind == "Timeout")

    @classmethod
    def from_response(cls, status: int, body: str) -> "FailedRequest":
        """Read a response of the server."""
        code = _find_code(body)
        return cls(status=status, code=code.group(1) if code else "")

    @property
    def is_absent(self) -> bool:
        """Whether the server has no such key."""
        return self.status == 404 and self.code in _NOT_FOUND_CODES  # noqa: PLR2004 - HTTP's number

    @property
    def is_conflict(self) -> bool:
        """Whether a write was refused because its condition was not met.

        If the object to replace is missing, some servers answer 412, and Amazon 404: see
        `is_absent`. If the name is in use, Azure answers 409 with its own code.
        """
        return self.status == 412 or self.code == "BlobAlreadyExists"  # noqa: PLR2004 - HTTP's number

    @property
    def is_refused(self) -> bool:
        """Whether a request was refused for its condition: not met, or not supported at all."""
        has_no_condition = self.status in _UNSUPPORTED or (
            self.status == 400  # noqa: PLR2004 - HTTP's number
            and self.code not in ("", _REQUEST_TIMEOUT, *_REFUSALS)
        )
        return self.is_conflict or self.is_absent or has_no_condition

    @property
    def is_rejected(self) -> bool:
        """Whether it is certain that nothing was written or will be."""
        return not self.was_sent or self._is_forbidden

    @property
    def _is_forbidden(self) -> bool:
        return self.code in _REFUSALS or self.status in _FORBIDDEN

    def __str__(self) -> str:
        if answer := " ".join(filter(None, [str(self.status or ""), self.code])):
            return f"the server answered {answer}"
        if self.lacks_credentials:
            return "no credentials came from the metadata service of this machine"
        if not self.was_sent:
            return "no connection to the server"
        return "no answer came in time" if self.is_timeout else "the connection was lost"

    def to_error(self, store: str, *, renews_credentials: bool) -> JobsyncError:
        """Return the error for the caller, with the fix.

        Args:
            store: the store's name.
            renews_credentials: whether the client library finds credentials by itself, so
                that an expired token will be replaced.
        """
        if self._is_forbidden and not (renews_credentials and self.code in _RENEWABLE):
            problem, fix = _REFUSALS.get(self.code, _REFUSALS["AccessDenied"])
            return Misconfigured("url", store, f"{problem} ({self})", fix)
        if self.lacks_credentials:
            fix = f"{_CREDENTIALS_FIX}; or try again later"
            return Unavailable(store, str(self), fix)
        if not self.was_sent:
            return Unavailable(store, str(self), "check that it runs, and its address")
        return Unavailable(store, str(self))
