"""`jobsync demo`: see a fleet lose its leader, and nothing else."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from jobsync.cli.options import FAILED, WholeNumberType, json_option, option

if TYPE_CHECKING:
    from jobsync.components import Components
    from jobsync.demo.show import DemoScreen

__all__ = ["demo"]


def _open_screen(components: Components) -> DemoScreen:
    """Return a live picture if this is a terminal and `rich` is installed; else lines."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from jobsync.demo.live_screen import LiveScreen

        return LiveScreen(components.clock)
    from jobsync.demo.screens import LineScreen

    return LineScreen(components.clock)


@click.command()
@option("--url", envvar="JOBSYNC_DEMO_URL", help="URL of an empty store; a new file by default.")
@option(
    "--workers",
    default=4,
    envvar="JOBSYNC_DEMO_WORKERS",
    show_default=True,
    type=WholeNumberType(3, 16),
    help="Number of worker processes.",
)
@option(
    "--seconds",
    default=30.0,
    envvar="JOBSYNC_DEMO_SECONDS",
    show_default=True,
    type=click.FloatRange(20, 3600),
    help="How long messages are enqueued.",
)
@option("--keep", is_flag=True, envvar="JOBSYNC_DEMO_KEEP", help="Keep the file and the logs.")
@json_option
def demo(url: str | None, workers: int, seconds: float, *, keep: bool, as_json: bool) -> None:
    """Run a fleet of real processes, kill its leader, and count what was lost.

    Exits with 1 if anything was lost or done twice.
    """
    import asyncio

    from jobsync.components import Components
    from jobsync.core.urls import parse_url
    from jobsync.demo.show import DemoFailed, DemoScreen, DemoShow

    components = Components.system()
    if url:
        # Refused before there is anything to remove.
        parse_url(url)
    folder = Path(tempfile.mkdtemp(prefix="jobsync-demo-"))
    url = url or f"sqlite:///{folder / 'demo.db'}"
    screen = DemoScreen() if as_json else _open_screen(components)
    screen.start(str(parse_url(url)), workers, seconds)
    try:
        show = DemoShow(url, workers, seconds, screen, folder, components)
        verdict = asyncio.run(show.run())
        screen.finish(verdict)
        if as_json:
            facts = {**msgspec.structs.asdict(verdict), "is_good": verdict.is_good}
            click.echo(msgspec.json.encode(facts).decode())
        if not verdict.is_good:
            sys.exit(FAILED)
    except DemoFailed as failure:
        screen.stop()
        for log in failure.logs:
            click.echo(log, err=True)
        raise click.ClickException(str(failure)) from failure
    finally:
        screen.stop()
        if keep:
            # Nothing but JSON may follow where JSON is expected.
            click.echo(f"kept: {folder}", err=as_json)
        else:
            shutil.rmtree(folder, ignore_errors=True)
