"""All queues of a store without SQL, read-only: each page of a queue is read."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from jobsync.components import Components
from jobsync.core.codec import check_text
from jobsync.core.messages import LIVE
from jobsync.queue.backend import MessageInfo, QueuePart
from jobsync.queue.directory import TOPIC, QueueContent, QueueDirectory
from jobsync.queue.pages.contents import build_content, find_infos, read_infos
from jobsync.queue.pages.control import read_controls
from jobsync.queue.pages.page import DEAD_LANE, LIVE_LANE
from jobsync.queue.pages.page_reader import PageReader
from jobsync.stores.contract import Store
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.scan import check_limit

__all__ = ["PagesDirectory"]


class PagesDirectory(QueueDirectory):
    """All queues of a store without SQL.

    Args:
        store: the store.
        components: time and events.
    """

    def __init__(self, store: Store, components: Components) -> None:
        self._store = store
        self._components = components
        self._log = CorruptionLog(TOPIC, components.events)
        self.set_aside: set[str] = set()

    async def read_contents(self) -> Mapping[str, QueueContent]:
        """Return the content of each queue."""
        contents: dict[str, QueueContent] = {}
        for queue, pause in sorted((await read_controls(self._store, self._log)).items()):
            content = build_content(await self._read(queue))
            content.pause = pause
            if content.counts or pause is not None:
                contents[queue] = content
        return contents

    async def find(self, ids: Collection[str]) -> Sequence[MessageInfo]:
        """Return the messages with these ids."""
        wanted = set(ids)
        found: list[MessageInfo] = []
        now = self._components.clock.wall().seconds
        for queue in await read_controls(self._store, self._log):
            pages = PageReader(self._store, queue, self._components)
            found += await find_infos(pages, queue, now, wanted)
            if len(found) == len(wanted):
                break
        return [_hide_cursor(info) for info in found]

    async def list(
        self, queue: str, part: QueuePart, *, after: str, limit: int
    ) -> Sequence[MessageInfo]:
        """Return messages of a queue by id."""
        check_text(after, "after")
        check_limit(limit)
        infos = await self._read(queue, DEAD_LANE if part == "dead" else LIVE_LANE)
        states = ("dead",) if part == "dead" else LIVE
        found = [info for info in infos if info.state in states and info.id > after]
        return sorted(found, key=lambda info: info.id)[:limit]

    async def _read(self, queue: str, *lanes: str) -> Sequence[MessageInfo]:
        pages = PageReader(self._store, queue, self._components)
        now = self._components.clock.wall().seconds
        infos = await read_infos(pages, queue, now, lanes=lanes or (LIVE_LANE, DEAD_LANE))
        self.set_aside.update(pages.list_set_aside())
        return [_hide_cursor(info) for info in infos]


def _hide_cursor(info: MessageInfo) -> MessageInfo:
    """Return a message without the cursor of a finished one, as a database does."""
    return info if info.finished is None else msgspec.structs.replace(info, cursor="")
