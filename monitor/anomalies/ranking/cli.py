"""The command ``monitor-rank-anomalies``."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console

from monitor.anomalies.events import Event
from monitor.anomalies.ranking.coverage import StepFilter
from monitor.anomalies.ranking.loading import Flaw, NothingReadError, RecordingFiles, entries, files_in, folder_of
from monitor.anomalies.ranking.ranking import Ranked, Ranking, ranking_of
from monitor.anomalies.ranking.report import advice, counts, listing, notes
from monitor.cli import Command, Version, one_directory
from monitor.coordinator.manifest_format import ManifestError
from monitor.coordinator.output import write_whole
from monitor.merge.execution import MergeError
from monitor.terminal import CLEAN, FLAWED, NOTHING, say

ANALYSIS_FILE: Final = "anomaly_analyse.json"

_RANGE: Final = re.compile(r"(\d{1,18})(?:(:)(\d{1,18})?(?::([1-9]\d{0,17}))?)?")

_WIDTH: Final = 240
"""Characters of a line if the terminal's width is unknown, or there is no terminal."""

app = Command()


@app.command()
def monitor_rank_anomalies(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="The directory that contains the ranks' directories, or anomaly_detected in it.",
            show_default=False,
        ),
    ] = None,
    directory_option: Annotated[
        Path | None, typer.Option("-d", "--directory", "--data_path", metavar="DIR", help="The same as the argument DIR.")
    ] = None,
    out_path: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            "--out_path",
            metavar="OUTPUT",
            help="A directory, or a file that ends in .json.",
            show_default=f"{ANALYSIS_FILE}, beside the events",
        ),
    ] = None,
    topk: Annotated[int, typer.Option("-k", "--topk", min=1, help="The number of events to list.")] = 8,
    step_list: Annotated[
        str | None,
        typer.Option(
            "-s", "--step_list", metavar="STEPS", help="Only these steps: [1,2] or 1,2 or 10:20 (inclusive) or 10: or 0::5"
        ),
    ] = None,
    _version: Version = False,
) -> None:
    """Order the events of all ranks, and find the first fault.

    An event is one statistic of one tensor on which an alert rule fired. It is an origin if no tensor from which its tensor
    was computed has an earlier event.

      trainermon rank-anomalies monitor_output

    Exit status: 0 no rule has fired, and every step of every rank was judged, 1 a rule has fired, or steps, ranks or files are
    missing, 2 nothing was read.
    """
    base = one_directory(directory, directory_option)
    try:
        folder = folder_of(base)
        output = _output(folder, out_path)
        ranking = ranking_of(folder, topk, _chosen(step_list))
        _write(ranking, output)
    except (NothingReadError, MergeError, OSError) as error:
        say(Console(stderr=True), f"Nothing was ranked: {error}", style="red")
        raise typer.Exit(NOTHING) from error
    _print(ranking, output, Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH))
    raise typer.Exit(CLEAN if ranking.is_well else FLAWED)


def _write(ranking: Ranking, output: Path) -> None:
    found = {key: event.model_dump(mode="json") for key, event in entries_of(ranking.ranked, ranking.job.flaws).items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, (json.dumps(found, indent=1) + "\n").encode())


def _print(ranking: Ranking, output: Path, console: Console) -> None:
    if ranking.ranked:
        console.print(listing(ranking, console), soft_wrap=True)
        say(console, counts(ranking))
    for note in notes(ranking):
        say(console, note)
    say(console, f"written to {output}")
    say(console, advice(ranking))


def _output(folder: Path, given: Path | None) -> Path:
    if given is None:
        return folder / ANALYSIS_FILE
    output = given if given.suffix == ".json" else given / ANALYSIS_FILE
    if any(output.resolve() in (files.events.resolve(), files.judged.resolve()) for files in files_in(folder)):
        raise NothingReadError(f"--output is {given}, which a rank wrote and the ranking reads. Name another file.")
    return output


def _chosen(text: str | None) -> StepFilter | None:
    """A filter for the steps of ``--step_list``; None: all steps."""
    listed = re.sub(r"\s", "", text or "")
    if listed.startswith("[") and listed.endswith("]"):
        listed = listed[1:-1]
    if not listed:
        return None
    matches = [_RANGE.fullmatch(one) for one in listed.split(",")]
    ranges = [(int(one[1]), _end(one), int(one[4] or 1)) for one in matches if one is not None]
    if len(ranges) < len(matches) or any(last < first for first, last, _ in ranges):
        raise NothingReadError(
            f"--step_list is {text!r}. Write steps as in [1,2], or ranges as in 10:20, both included, 10: without an end, "
            "0::5 for every fifth step."
        )
    return lambda steps: np.logical_or.reduce(
        [(steps >= first) & (steps <= last) & ((steps - first) % every == 0) for first, last, every in ranges]
    )


def _end(match: re.Match[str]) -> int:
    if not match[2]:
        return int(match[1])
    return int(match[3]) if match[3] else np.iinfo(np.int64).max


def entries_of(ranked: Sequence[Ranked], flaws: list[Flaw]) -> dict[str, Event]:
    """The entries of the files that were ranked, in this order.

    Args:
        flaws: Files that have changed since they were read are appended.
    """
    files: dict[RecordingFiles, dict[str, Event]] = {}
    found: dict[str, Event] = {}
    for one in ranked:
        own = one.member.events.files
        if own not in files:
            try:
                files[own] = entries(own)
            except ManifestError as error:
                files[own] = {}
                flaws.append(Flaw(own.rank, own.label, f"has changed meanwhile: {error}"))
        key, event = next(((key, event) for key, event in files[own].items() if _is(one, event)), ("", None))
        if event is not None:
            found[_free(key, found, own.recording)] = event
    return found


def _is(one: Ranked, event: Event) -> bool:
    at = event.step, event.micro_step, event.call_id, event.tag_name
    return at == (one.step, one.micro_step, one.call_id, one.subject.recorded_as.tag(one.member.rank, one.micro_step)) and (
        event.signal.op == one.op
    )


def _free(key: str, taken: dict[str, Event], recording: int) -> str:
    """A key that is not taken: two recordings of a process may have the same key."""
    return f"{key}_recording_{recording}" if key in taken else key
