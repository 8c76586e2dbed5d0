"""Pages in a real bucket: what others put there, and the commands that show queues."""

import json
import os
from datetime import timedelta
from typing import Any

import obstore
import pytest
import servers
from obstore.store import S3Store
from terminal import jobsync
from waiting import until

from jobsync import Database, Event, QueuePlugin
from jobsync.core.urls import ObjectsUrl, parse_url

NAME = "51700000000000AAAAAAAAAAA"


@pytest.fixture
def bucket(bucket_url: str) -> S3Store:
    """The bucket, without the library."""
    url = parse_url(bucket_url)
    assert isinstance(url, ObjectsUrl)
    assert url.key is not None
    assert url.secret is not None
    return S3Store(
        url.bucket,
        prefix=url.prefix,
        endpoint=url.endpoint,
        region=url.region,
        access_key_id=url.key.reveal(),
        secret_access_key=url.secret.reveal(),
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": timedelta(seconds=60)},
    )


def find_pages(bucket: S3Store) -> dict[str, int]:
    """Return the names of all objects among the pages, with their sizes."""
    listed = obstore.list(bucket, prefix="r4/page").collect()
    return {item["path"].rpartition("/")[2]: item["size"] for item in listed}


async def test_foreign_objects_among_the_pages_stop_nothing(
    bucket_url: str, bucket: S3Store, s3: servers.S3Server
) -> None:
    """Corrupt, truncated, foreign and huge ones: reported, left as they are, and the rest flows."""
    folder = "r4/page/default.Ftasks/0"
    reported: list[Event] = []
    handled: list[int] = []

    async def handle(task: Any) -> None:
        handled.append(task.n)

    async with Database(bucket_url) as db:
        db.on("store:record-set-aside", reported.append)
        producer = await db.use_plugin(QueuePlugin(resource="tasks"))
        await producer.enqueue_many([{"n": n} for n in range(5)])
        (page,) = find_pages(bucket)
        content = obstore.get(bucket, f"{folder}/{page}").bytes().to_bytes()
        # Sizes whose marks say that there is something to claim.
        odd = {
            f"{NAME}1": content[: len(content) // 2].ljust(518),
            f"{NAME}2": b"x" * 518,
            f"{NAME}3": b"y" * (100 * 1024 * 1024 + 6),
            f"{NAME}4": b"{}",
            f"{NAME}5": b"",
            "README": b"z" * 518,
        }
        for name, data in odd.items():
            obstore.put(bucket, f"{folder}/{name}", data)
    async with Database(bucket_url) as db:
        db.on("store:record-set-aside", reported.append)
        queue = QueuePlugin(resource="tasks", on_message=handle)
        await db.use_plugin(queue)
        await queue.enqueue_many([{"n": n} for n in range(5, 10)])
        await until(lambda: queue.stats()["completed"] == 10, "all messages are handled")
        assert sorted(handled) == list(range(10))
        assert await queue.count("completed") == 10
    keys = {event["key"].rpartition("/")[2] for event in reported}
    assert keys == odd.keys()
    sizes = find_pages(bucket)
    assert {name: sizes[name] for name in odd} == {name: len(data) for name, data in odd.items()}


async def test_commands_show_and_change_queues(bucket_url: str) -> None:
    """As on a database: enqueue, list, browse, why, pause, resume and purge."""
    async with Database(bucket_url) as db:
        await db.create_resource("emails", attributes={"to": "string|required"})

    def run(*words: str) -> Any:
        done = jobsync(*words, "--json", environ={**os.environ, "JOBSYNC_URL": bucket_url})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    (first,) = run("enqueue", "emails", '{"to": "a@example.com"}')
    run("enqueue", "emails", '{"to": "b@example.com"}', "--delay", "100")
    (row,) = run("queues", "list")
    assert (row["queue"], row["ready"], row["waiting"]) == ("default/emails", 1, 1)
    (shown,) = run("queues", "browse", "emails", "--state", "ready")
    assert (shown["id"], shown["value"]["to"]) == (first["id"], "a@example.com")
    reason = run("why", first["id"])
    assert "no worker is active" in json.dumps(reason)
    run("queues", "pause", "emails", "--reason", "a deployment")
    (row,) = run("queues", "list")
    assert row["reason"] == "a deployment"
    run("queues", "resume", "emails")
    run("queues", "purge", "emails", "--yes")
    assert run("queues", "list") == []
