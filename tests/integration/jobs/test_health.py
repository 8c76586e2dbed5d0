"""What a readiness probe answers while the server is gone, hangs or is back."""

import re
from collections.abc import Callable

import pytest
from proxy import Proxy
from servers import Locate
from waiting import until

from jobsync import CoordinationConfig, Job

HEARTBEAT, TIMEOUT = 2.0, 30.0


def vanish(proxy: Proxy) -> None:
    """Close all connections and refuse new ones."""
    proxy.refuse()
    proxy.cut()


def hang(proxy: Proxy) -> None:
    """Answer nothing, on connections that stay open."""
    proxy.hold_request(count=10**6)


@pytest.mark.parametrize("fail", [vanish, hang])
@pytest.mark.parametrize("kind", ["postgres", "s3"])
def test_a_node_is_not_ready_within_a_heartbeat_after_the_server_is_gone(
    locate: Locate, kind: str, fail: Callable[[Proxy], None]
) -> None:
    """Although it is trusted for long; and it is ready again when the server is back."""
    url = locate(kind)
    port = int(re.findall(r"127\.0\.0\.1:(\d+)", url)[0])
    config = CoordinationConfig(
        total_tokens=10, heartbeat_interval_sec=HEARTBEAT, heartbeat_timeout_sec=TIMEOUT
    )
    with Proxy("127.0.0.1", port) as proxy:
        through = url.replace(f":{port}/", f":{proxy.port}/")
        with Job("a", "s", coordination_config=config, url=through) as job:
            assert job.health_ready()[1] == 200
            fail(proxy)
            job._call(until(lambda: job.health_ready()[1] == 503))
            assert job._membership is not None
            # A heartbeat was due, and no second one.
            assert job._membership.trust_left > 0.9 * TIMEOUT - 2 * HEARTBEAT
            assert job.am_i_healthy()
            assert job.health_ready() == ({"status": "not_ready"}, 503)
            proxy.pass_through()
            proxy.accept()
            job._call(until(lambda: job.health_ready()[1] == 200))
