"""A prefix of a bucket as a place for the conformance suite."""

from datetime import timedelta

import obstore
from obstore.store import S3Store

from jobsync import Components, Store
from jobsync.core.urls import ObjectsUrl
from jobsync.stores.objects.layout import ObjectNames, decode_object, encode_object
from jobsync.stores.objects.store import ObjectsStore
from jobsync.stores.settling import SettlingStore

__all__ = ["ObjectsPlace"]


class ObjectsPlace:
    """A prefix that nobody else uses, in a bucket that is there.

    Args:
        url: the bucket and the prefix.
        bare_etags: whether the server compares ETags without their quotes.
        conditional_delete: whether it honours a condition on DELETE.
    """

    def __init__(
        self, url: ObjectsUrl, *, bare_etags: bool = False, conditional_delete: bool = True
    ) -> None:
        assert url.key is not None
        assert url.secret is not None
        self._url = url
        self._bare_etags = bare_etags
        self._conditional_delete = conditional_delete
        self._names = ObjectNames(url.prefix)
        self._bucket = S3Store(
            url.bucket,
            endpoint=url.endpoint,
            region=url.region,
            access_key_id=url.key.reveal(),
            secret_access_key=url.secret.reveal(),
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
        )

    async def open(self, components: Components | None = None) -> Store:
        """Open one more store on the same records."""
        components = components or Components.system()
        store = await ObjectsStore.connect(
            self._url,
            components,
            bare_etags=self._bare_etags,
            conditional_delete=self._conditional_delete,
        )
        return SettlingStore(store, components)

    def damage(self, key: str, text: str) -> None:
        """Overwrite a value behind the library's back."""
        name = self._names.of_record(key)
        found = obstore.get(self._bucket, name).bytes().to_bytes()
        obstore.put(self._bucket, name, encode_object(decode_object(key, found, ""), text))

    def stored(self, key: str) -> str | None:
        """Read a value's text behind the library's back; None without one."""
        try:
            found = obstore.get(self._bucket, self._names.of_record(key)).bytes().to_bytes()
        except FileNotFoundError:
            return None
        # Padding stands behind the bracket; four commas before the value.
        *head, text = found.rstrip(b" ").removesuffix(b"]").split(b",", 4)
        return text.decode() if len(head) == 4 else None
