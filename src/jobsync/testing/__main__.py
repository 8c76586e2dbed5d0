"""`python -m jobsync.testing`: run a story with one seed, or with new seeds for hours."""

import sys
from functools import partial

import click

from jobsync.core.clock import SystemClock
from jobsync.errors import JobsyncError
from jobsync.testing.stories import find_story, replay_line, run_campaign, run_story


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Run stories in simulated worlds. A STORY is path/to/file.py:story or package.module:story.

    Exit codes: 0 no violation, 1 a violation, 2 wrong usage.
    """


@cli.command()
@click.argument("story")
@click.argument("seed", type=int)
def replay(story: str, seed: int) -> None:
    """Run a STORY with one SEED; show the violations and the digest of the history."""
    report = run_story(story, seed)
    click.echo("\n".join([*map(str, report.violations), report.fingerprint]))
    sys.exit(1 if report.violations else 0)


@cli.command()
@click.argument("story")
@click.option("--hours", type=float, default=10, show_default=True, help="Simulated hours.")
@click.option("--jobs", type=int, default=2, show_default=True, help="Processes.")
@click.option("--first-seed", type=int, help="The first seed; by default, the current time.")
def simulate(story: str, hours: float, jobs: int, first_seed: int | None) -> None:
    """Run a STORY with new seeds, for so many hours or until a violation is found."""
    clock = SystemClock()
    seed = int(clock.wall().seconds) if first_seed is None else first_seed
    start, simulated, faults, summary = clock.mono(), 0.0, 0, ""
    for report in run_campaign(partial(run_story, story), first_seed=seed, hours=hours, jobs=jobs):
        simulated, faults = simulated + report.hours, faults + report.faults
        speed = simulated / (clock.mono() - start)
        summary = f"{simulated:.1f} h, {speed:.1f} h/s, {faults:,} faults"
        if report.violations:
            click.echo(f"{summary}\nseed {report.seed}: {report.violations[0]}")
            click.echo(replay_line(find_story(story), report.seed))
            sys.exit(1)
        if sys.stdout.isatty():
            click.echo(f"\r{summary}, no violation", nl=False)
    click.echo(f"\r{summary}, no violation")


if __name__ == "__main__":
    try:
        cli()
    except JobsyncError as error:
        click.echo(f"jobsync.testing: {error}", err=True)
        sys.exit(2)
