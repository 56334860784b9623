"""The command ``monitor-report``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from monitor.bars import bars
from monitor.cli import Command, Job, Tolerances, Version, Whole, Workers
from monitor.compare.runs import How
from monitor.compare.tolerances import Limits
from monitor.compare.values import ComparisonError
from monitor.coordinator.output import write_whole
from monitor.merge.execution import MergeError, NothingRecordedError, is_url
from monitor.report import facts
from monitor.report.against import OtherRun
from monitor.report.checks import CheckResult, checks_of
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, Verdict
from monitor.report.model import model_of, verdict_for_programs
from monitor.report.page import page_of
from monitor.report.verdict import verdict_of
from monitor.terminal import CLEAN, FLAWED, NOTHING, say

REPORT_FILE: Final = "report.html"
_STYLES: Final = {GOOD: "green", BAD: "red"}
_LAST: Final = (GOOD, NOT_LOOKED_AT, BAD)
_SIGNS: Final = {GOOD: "good          ", BAD: "bad           "}

app = Command()


@app.command()
def monitor_report(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The directory that contains the ranks' directories, or a merged set, also behind a URL."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The page to write.", show_default=f"{REPORT_FILE} in RUN"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict for programs instead. No page is written, unless -o names one.")
    ] = False,
    events: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The directory that contains the ranks' directories, if RUN is a merged set elsewhere."
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="A run that RUN is compared with, such as the last good one.")
    ] = None,
    other_job: Annotated[
        str | None, typer.Option("--against-job", metavar="ID", help="The same as --job, of OTHER.", show_default=False)
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="FROM=TO", help="What a tensor of OTHER is called in RUN, such as 'model.*=*'."),
    ] = None,
    limits: Tolerances = None,
    whole: Whole = None,
    job: Job = None,
    workers: Workers = 1,
    _version: Version = False,
) -> None:
    """Say whether a run is healthy, and what broke first.

    It writes one page, which needs no network.

    \b
      trainermon report monitor_output
      trainermon report monitor_output --json
      trainermon report monitor_output --against last_good_run

    Exit status: 0 the run is healthy, 1 something is wrong, or a needed check did not look, 2 nothing was reported.
    """
    errors = Console(stderr=True)
    try:
        path = _path(run, output, job, as_json)
        how = How(whole=whole, names=names or (), limits=None if limits is None else Limits.read(limits))
        other = _other(run, against, how, [one for one in (other_job, job) if one is not None])
        with bars(quiet=as_json) as progress, facts.facts_of(run, job, events, workers, progress) as found:
            compared = None if other is None else other.compared_with(found)
            checks = [*checks_of(found), *([] if compared is None else [compared.check])]
            verdict = verdict_of(found, checks)
            printed = verdict_for_programs(found, checks, verdict) if as_json else None
            if printed is not None and compared is not None:
                printed["against"] = compared.for_programs()
            if path is not None:
                model = model_of(found, checks, verdict)
                if compared is not None:
                    compared.show_in(model)
                _write(path, page_of(model).encode())
    except NothingRecordedError as error:
        say(errors, f"There is nothing to report: {error}", style="yellow")
        raise typer.Exit(FLAWED) from error
    except (ValueError, MergeError, ComparisonError, OSError) as error:
        say(errors, f"Nothing was reported: {error}", style="red")
        raise typer.Exit(NOTHING) from error
    _print(printed, checks, verdict, path)
    raise typer.Exit(CLEAN if verdict.state == GOOD else FLAWED)


def _path(run: str, output: Path | None, job: str | None, as_json: bool) -> Path | None:
    """Where the page goes; None if none is written. Of one of several jobs it has a name of its own.

    Raises:
        ValueError: It is a directory.
    """
    if output is not None and output.is_dir():
        raise ValueError(f"{output} is a directory. Name a file: -o {output / REPORT_FILE}")
    if output is not None or as_json:
        return output
    name = f"report-{Path(job).name[:8]}.html" if job else REPORT_FILE
    return Path(name) if is_url(run) else Path(run) / name


def _other(run: str, against: Path | None, how: How, jobs: Sequence[str]) -> OtherRun | None:
    """The run to compare with, if one is named.

    Raises:
        ComparisonError: It cannot be compared, or there are options of a comparison without it.
    """
    if against is None and how != How():
        raise ComparisonError("--map, --tolerances, --whole and --ranks are for a comparison. Name a run: --against OTHER.")
    return None if against is None else OtherRun.of(run, against, replace(how, jobs=jobs))


def _write(path: Path, page: bytes) -> None:
    if path.exists() and not path.is_file():  # a device or a pipe, which must not be replaced
        path.write_bytes(page)
    else:
        write_whole(path, page)


def _print(printed: dict[str, Any] | None, checks: list[CheckResult], verdict: Verdict, path: Path | None) -> None:
    if printed is not None:
        typer.echo(json.dumps(printed, indent=1))
        return
    console = Console()
    for one in sorted(checks, key=lambda one: _LAST.index(one.state)):  # a terminal shows the end
        look = f" To look: {one.look}" if one.state == NOT_LOOKED_AT else ""
        say(console, f"{_SIGNS.get(one.state, 'not looked at ')} {one.name}: {one.finding.says}{look}")
    say(console, verdict.says, style=_STYLES.get(verdict.state, ""))
    if verdict.then:
        say(console, verdict.then)
    say(console, f"written to {path}")
