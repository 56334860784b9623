"""The command ``monitor-top``, and its screen of 80 columns."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from monitor.cli import Command, Directory, DirectoryOption, Job, Version, one_directory
from monitor.merge.execution import MergeError, NothingRecordedError
from monitor.series import CLIPPED_NORM, GRAD_NORM
from monitor.terminal import CLEAN, FLAWED, NOTHING, counted, in_json, plain, say
from monitor.top.newest_rows import Unusual
from monitor.top.watching import ENDED, RUNNING, SILENT, UNKNOWN, WAITING, Look, RankState, Watch

STYLES: Final = {RUNNING: "green", WAITING: "yellow", SILENT: "bold red", ENDED: "dim", UNKNOWN: "dim"}
MOST_LISTED: Final = 12
"""Ranks in the table: the silent, then those that wait, then the slowest."""

_URGENT: Final = (SILENT, WAITING, UNKNOWN, RUNNING, ENDED)

app = Command()


@app.command()
def monitor_top(
    argument: Directory = None,
    directory: DirectoryOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it for programs, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="The time between two updates.")] = 2.0,
    job: Job = None,
    _version: Version = False,
) -> None:
    """Show a running job: ranks, loss, unusual tensors, alerts.

    It only reads the files that ranks write. It ends with the job, or with Ctrl-C. Without a terminal it acts as with --once.
    Of several jobs in the directory it shows the one that began last.

    \b
      trainermon top monitor_output
      trainermon top monitor_output --once
      trainermon top monitor_output --json

    Exit status: 0 all is well, 1 something is wrong or could not be looked at, 2 there is nothing to show.
    """
    base = one_directory(argument, directory)
    console, errors = Console(highlight=False), Console(stderr=True)
    try:
        if once or as_json or not console.is_terminal:
            look = Watch(base, job).look()
            if as_json:
                typer.echo(json.dumps(for_programs(look), indent=1))
            else:
                console.print(screen(look))
        else:
            look = _live(console, base, job, interval)
    except (ValueError, MergeError, OSError) as error:
        say(errors, f"There is nothing to show: {error}", style="yellow")
        raise typer.Exit(NOTHING) from error
    raise typer.Exit(CLEAN if look.is_well else FLAWED)


def _live(console: Console, directory: Path, job: str | None, interval: float) -> Look:
    """Show looks until the job has ended or Ctrl-C is pressed. Returns the last."""
    look: Look | None = None
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        try:
            watch = _watched(live, directory, job, interval)
            while look is None or not look.has_ended:
                if look is not None:
                    time.sleep(interval)
                look = watch.look()
                live.update(screen(look), refresh=True)
        except KeyboardInterrupt:
            if look is None:
                raise
    return look


def _watched(live: Live, directory: Path, job: str | None, interval: float) -> Watch:
    """The job, once it has begun to record."""
    while True:
        try:
            return Watch(directory, job)
        except NothingRecordedError as error:
            live.update(Text(f"{plain(str(error))} Looking again every {interval:g} s."), refresh=True)
            time.sleep(interval)


def for_programs(look: Look) -> dict[str, Any]:
    """``look`` as JSON takes it: numbers that are not finite are the texts ``nan``, ``inf`` and ``-inf``."""
    found: dict[str, Any] = in_json(dataclasses.asdict(look))
    return found | {"stands_still_s": look.stands_still_s, "well": look.is_well}


def screen(look: Look) -> RenderableType:
    """All of it, for 80 columns."""
    parts: list[RenderableType] = [*_head(look), Text(), _table(look), Text(), *_tensors(look), *_alerts(look)]
    parts += [Text(f"wrong bits: {plain(one)}", style="bold red") for one in look.wrong_bits]
    return Group(*parts, *(Text(f"not looked at: {plain(one)}", style="yellow") for one in look.notes))


def _head(look: Look) -> Iterator[Text]:
    clock = time.strftime("%H:%M:%S", time.localtime(look.at))
    yield Text(f"{plain(look.run)}  job {plain(look.job)[:12]}  {clock}", style="bold", overflow="ellipsis", no_wrap=True)
    states = Counter(one.state for one in look.ranks)
    shown = ", ".join(f"{states[one]} {one}" for one in _URGENT if states[one])
    yield Text(f"{len(look.ranks)} of {counted(look.world_size, 'rank')}: {shown}; {_steps(look.ranks)}")
    if missing := look.world_size - len(look.ranks):
        yield Text(f"{counted(missing, 'rank has', 'ranks have')} no directory here yet", style="yellow")
    silent = sorted((one for one in look.ranks if one.state == SILENT), key=lambda one: -(one.silent_s or 0))
    for one in silent[:3]:
        where = f"rank {one.rank} (process {one.pid} on {plain(one.host)})"
        yield Text(
            f"silent: {where} for {one.silent_s:.0f} s, its last sign came after step {_or(one.step)}", style=STYLES[SILENT]
        )
    if len(silent) > 3:
        yield Text(f"silent: {len(silent) - 3} more", style=STYLES[SILENT])
    if (still := look.stands_still_s) is not None:
        yield Text(f"no rank has ended a step for {still:.0f} s", style=STYLES[WAITING])
    if look.slowest is not None:
        (slow,) = (one for one in look.ranks if one.rank == look.slowest)
        yield Text(f"slowest: rank {slow.rank}, after step {_or(slow.step)} when it gave its last sign, {_rate(slow)} steps/s")
    yield Text(_numbers(look))
    dropped, failures = sum(one.dropped for one in look.ranks), sum(one.failures for one in look.ranks)
    shares = [one.writer_share for one in look.ranks if one.writer_share is not None]
    cost = f"the writer thread takes {max(shares):.1%} of a core at most" if shares else "no rank says what monitoring costs"
    yield Text(
        f"dropped {counted(dropped, 'step')}, {counted(failures, 'failure')} of the monitor; {cost}",
        style="yellow" if dropped or failures else "",
    )


def _steps(ranks: list[RankState]) -> str:
    steps = [one.step for one in ranks if one.step is not None]
    rates = sorted(one.steps_per_second for one in ranks if one.steps_per_second is not None)
    if not steps:
        return "no step has ended yet"
    ended = f"step {max(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
    return f"{ended}, {rates[len(rates) // 2]:.3g} steps/s" if rates else ended


def _numbers(look: Look) -> str:
    first = ("loss", GRAD_NORM, CLIPPED_NORM)
    if not look.numbers:
        return "loss and gradient norm: not recorded"
    names = [*(one for one in first if one in look.numbers), *sorted(set(look.numbers) - set(first))]
    names.sort(key=lambda one: isfinite(look.numbers[one].value))  # what is not finite must not be cut off
    step = max(one.step for one in look.numbers.values())
    late = {one: f" (step {number.step})" for one, number in look.numbers.items() if number.step < step}
    shown = [f"{plain(one)} {look.numbers[one].value:.5g}{late.get(one, '')}" for one in names]
    return f"step {step}: " + ", ".join(shown[:6])


def _table(look: Look) -> Table:
    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "state", "step", "steps/s", "same step", "recorded", "dropped", "failures", "writer"):
        found.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    urgent = sorted(look.ranks, key=lambda one: (_URGENT.index(one.state), -1 if one.step is None else one.step, one.rank))
    for one in urgent[:MOST_LISTED]:
        same = "" if one.same_step_s is None else f"{one.same_step_s + (one.silent_s or 0):.0f} s"
        share = "" if one.writer_share is None else f"{one.writer_share:.1%}"
        cells = (_or(one.step), _rate(one), same, _or(one.recorded), str(one.dropped), str(one.failures), share)
        found.add_row(str(one.rank), Text(one.state, style=STYLES[one.state]), *cells)
    if len(urgent) > MOST_LISTED:
        found.add_row("", f"and {len(urgent) - MOST_LISTED} more")
    return found


def _tensors(look: Look) -> Iterator[Text]:
    if look.rows_to is None:
        yield Text("most unusual: no rows were read yet")
        return
    ranks = len(look.rows_of)
    of = f"of {ranks} of {len(look.ranks)} ranks, " if ranks < len(look.ranks) else ""
    yield Text(f"most unusual now ({of}up to step {look.rows_to}){'' if look.unusual else ': nothing'}", style="bold")
    for one in look.unusual:
        yield Text(f"  {_unusual(one)}", style="red" if one.deviations is None else "", overflow="ellipsis", no_wrap=True)


def _unusual(one: Unusual) -> str:
    """The name comes last, since it may be longer than the line."""
    usual = "" if one.typical is None else f" usually {one.typical:.3g} ({one.deviations:.0f} deviations)"
    return f"rank {one.rank} step {one.step}: {one.op} {one.value:.3g}{usual} {plain(one.kind)} {plain(one.name)}"


def _alerts(look: Look) -> Iterator[Text]:
    if look.alerts is None:
        yield Text("alerts: no rule is configured, or nothing was judged yet (the field alert)")
        return
    style = "bold red" if look.alerts.events else "bold"
    yield Text(f"alerts: {look.alerts.events or 'none'}. {plain(look.alerts.first)}".rstrip(), style=style)
    for line in look.alerts.newest:
        yield Text(f"  {plain(line)}", overflow="ellipsis", no_wrap=True)


def _or(number: int | None) -> str:
    return "-" if number is None or number < 0 else str(number)


def _rate(one: RankState) -> str:
    return "-" if one.steps_per_second is None else f"{one.steps_per_second:.3g}"
