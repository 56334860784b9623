"""The command ``monitor-ctl``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from monitor.cli import Command, DirectoryOption, Job, Version, one_directory
from monitor.config import ConfigError, MonitorConfig
from monitor.config.jsonc import JsonError, Path as FieldPath, parse
from monitor.config.loading import config_in, content_of
from monitor.coordinator.manifest_format import ConfigurationRecord, ManifestRecord
from monitor.dynamic.config_file import EditError, change_file, path_of
from monitor.dynamic.controller import NOTHING as NO_DIFFERENCE, WATCHING_RANK, digest_of, summary
from monitor.merge.discovery import Found, choose, discover
from monitor.merge.execution import MergeError
from monitor.terminal import CLEAN, FLAWED, NOTHING, counted, plain, say

# --- The configurations of a job, read from the ranks' manifests: which one is in force, since when, and whether ranks agree.

MOST_REMARKS: Final = 20

MOST_RANKS: Final = 1_000_000
"""Upper bound, so that a damaged number in a manifest does not cost hours of counting."""


class ControlError(ValueError):
    """The command did nothing. The message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """The manifests of a job's ranks.

    Attributes:
        ranks: Sorted by rank, then by recording.
    """

    job_id: str
    ranks: tuple[ManifestRecord, ...]

    @property
    def config_path(self) -> str:
        """The file that the job watches: the path of the watching rank, or of the first known rank."""
        return next((one for one in self.ranks if one.rank == WATCHING_RANK), self.ranks[0]).config_path

    @property
    def is_dynamic(self) -> bool:
        """Whether the job watches its file."""
        return any(one.configurations for one in self.ranks)

    @property
    def running(self) -> tuple[ManifestRecord, ...]:
        """The recordings that have not ended cleanly."""
        return tuple(one for one in self.ranks if not one.closed)

    def took_over(self, digest: str) -> bool:
        """Whether a configuration is the latest of every running rank."""
        return all(one.configurations and one.configurations[-1].digest == digest for one in self.running)


def job_in(base: Path, job: str | None) -> WatchedJob:
    """The named job, the only running job, or the only job.

    Args:
        base: The directory that contains the ranks' directories.
        job: The beginning of the job id; None: the user named no job.

    Raises:
        ControlError: No job fits, or more than one does.
    """
    try:
        found = discover(base)
        return _watched(found, _only_running(found) if job is None else choose(found, job))
    except MergeError as error:
        raise ControlError(str(error)) from error


def _only_running(found: Found) -> str:
    running = [job for job in found.job_ids() if any(not run.manifest.closed for run in found.jobs[job])]
    return running[0] if len(running) == 1 else choose(found, None)


def _watched(found: Found, job: str) -> WatchedJob:
    manifests = [run.manifest for run in found.jobs[job]]
    return WatchedJob(job, tuple(sorted(manifests, key=lambda one: (one.rank, one.recording))))


def disagreements(job: WatchedJob) -> list[str]:
    """Problems, one sentence each, at most ``MOST_REMARKS``.

    Ranks rewrite their manifests at different times: a rank that has not written a change yet does not disagree.
    """
    said = [*_missing(job), *_different(job), *_undecided(job), *_late(job)]
    more = [f"and {len(said) - MOST_REMARKS} others"] if len(said) > MOST_REMARKS else []
    return said[:MOST_REMARKS] + more


def _missing(job: WatchedJob) -> Iterator[str]:
    """A rank that is to be monitored has a manifest from the first step on."""
    first = job.ranks[0]
    ranks = range(min(first.world_size, MOST_RANKS))
    expected = set(first.config.get("module_ranks") or ranks) & set(ranks)
    if missing := sorted(expected - {one.rank for one in job.ranks}):
        shown = ", ".join(map(str, missing[:MOST_REMARKS]))
        more = f" and {len(missing) - MOST_REMARKS} more" if len(missing) > MOST_REMARKS else ""
        yield f"no manifest of rank {shown}{more}: it has not begun, or its directory was removed"


def _different(job: WatchedJob) -> Iterator[str]:
    first: dict[tuple[int, int, str], tuple[int, ConfigurationRecord]] = {}
    for one in job.ranks:
        for record in one.configurations:
            rank, known = first.setdefault((one.recording, record.number, record.origin), (one.rank, record))
            if (record.from_step, record.digest) != (known.from_step, known.digest):
                ranks = f"ranks {rank} and {one.rank} have different configurations for change {record.number}"
                yield f"{ranks}: {_described(known)}, and {_described(record)}"


def _described(record: ConfigurationRecord) -> str:
    return f"{record.digest} from step {record.from_step} on"


def _undecided(job: WatchedJob) -> Iterator[str]:
    for one in job.ranks:
        if one.undecided_since is not None:
            since = f"from step {one.undecided_since} on it uses its own configuration"
            yield f"rank {one.rank} could not reach the others: {since}"


def _late(job: WatchedJob) -> Iterator[str]:
    for one in job.ranks:
        for record in one.configurations:
            if record.since > record.from_step:
                missed = f"steps {record.from_step} to {record.since - 1}"
                yield f"rank {one.rank} adopted change {record.number} late: it recorded {missed} with the configuration before"


LOOK_EVERY_S: Final = 0.2


class Action(StrEnum):
    """What to do."""

    on = "on"
    off = "off"
    set = "set"
    status = "status"


app = Command()


@app.command()
def monitor_ctl(
    directory: Annotated[
        str | None,
        typer.Argument(metavar="DIR", help="The directory that contains the ranks' directories.", show_default=False),
    ] = None,
    action: Annotated[str | None, typer.Argument(metavar="on|off|set|status", help="What to do.", show_default=False)] = None,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help='For set: alert.dump=true, targets["h.0.mlp"]={}, with values in JSON.'),
    ] = None,
    directory_option: DirectoryOption = None,
    job: Job = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to change.", show_default="the one that the job's ranks name")
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Wait until all ranks use the new values, at most this long.")
    ] = 0.0,
    _version: Version = False,
) -> None:
    """Show and change what a running job records.

    The job has to run with the environment variable DYNAMIC_MONITOR=True. This command switches its monitoring on or off, sets
    values in its configuration file, or shows since which step each rank uses which values. It changes single values in place,
    and keeps comments and everything else. The job sees the change within a second or two, and all ranks adopt it at the same
    step. A value that the job could not use is not written.

    \b
      trainermon ctl monitor_output status
      trainermon ctl monitor_output on --wait 60
      trainermon ctl monitor_output set xy_distribution=true collect_times=100
      trainermon ctl monitor_output set 'targets["h.0.mlp"]={}' 'format=["csv","hdf5"]'
      trainermon ctl monitor_output off

    Exit status: 0 done, 1 ranks disagree or did not follow in time, 2 nothing was done.
    """
    words = [word for word in (directory, action, *(values or ())) if word is not None]
    base, chosen, assignments = _asked(words, directory_option)
    errors = Console(stderr=True)
    try:
        edits = _edits(chosen, assignments)
        clean = _changed(base, job, config, edits, wait) if edits else _shown(job_in(base, job))
    except (ControlError, ConfigError, EditError, OSError) as error:
        say(errors, f"Nothing was done: {error}", style="red")
        raise typer.Exit(NOTHING) from error
    raise typer.Exit(CLEAN if clean else FLAWED)


def _asked(words: Sequence[str], option: Path | None) -> tuple[Path, Action, Sequence[str]]:
    """The directory, the action and its values. The first word is the directory, unless ``-d`` gives one.

    Raises:
        typer.BadParameter: The directory is given twice or not at all, or there is no such action.
    """
    names = {one.value for one in Action}
    place = 1 if option is None else 0
    # An action one word too late shows that the directory is given twice; one word too early, that it is missing.
    found = next((index for index in (place, 1 - place) if index < len(words) and words[index] in names), place)
    directory = one_directory(Path(words[0]) if words[:found] else None, option)
    if found < len(words) and words[found] in names:
        return directory, Action(words[found]), words[found + 1 :]
    wrong = f"{words[place]!r} is not an action" if words[place:] else "no action is given"
    raise typer.BadParameter(f"{wrong}. Write on, off, set or status.", param_hint="on|off|set|status")


def _edits(action: Action, values: Sequence[str]) -> dict[FieldPath, Any]:
    if action is Action.set and not values:
        raise ControlError("set needs values, as in: set collect_times=100")
    if action is not Action.set and values:
        raise ControlError(f"{action.value} takes no values, and was given {values[0]}")
    if action in (Action.on, Action.off):
        return {("dynamic_on",): action is Action.on}
    return dict(map(_edit, values))


def _edit(assignment: str) -> tuple[FieldPath, Any]:
    key, equals, value = assignment.partition("=")
    if not equals:
        raise ControlError(f"{assignment!r} gives no value: write KEY=VALUE")
    return path_of(key), _value(value)


def _value(text: str) -> Any:
    """The JSON value, or the text itself if it is not JSON: a shell turns ``format="csv"`` into ``format=csv``."""
    try:
        return parse(text).value
    except JsonError:
        return text


def _changed(directory: Path, job: str | None, file: Path | None, edits: dict[FieldPath, Any], wait: float) -> bool:
    """Change the file. With ``wait``, return whether all ranks adopted the change without a problem; otherwise True."""
    watched = None if file is not None and not wait else _dynamic(job_in(directory, job))
    path = str(file) if file is not None else watched.config_path if watched is not None else ""
    before = config_in(path, content_of(path), dynamic=True)
    written = change_file(path, edits)
    assert written is not None
    after = written[1]
    console = Console()
    differs = summary(before, after)
    say(console, f"{path}: {'nothing to change' if differs == NO_DIFFERENCE else differs}")
    if not wait or watched is None:
        return True
    return _shown(_after(directory, watched.job_id, after, wait), after)


def _dynamic(job: WatchedJob) -> WatchedJob:
    if not job.is_dynamic:
        raise ControlError(
            f"job {job.job_id} does not watch its file: it was not started with DYNAMIC_MONITOR=True. "
            "To change the file for the next run, name it with --config."
        )
    return job


def _after(directory: Path, job: str, config: MonitorConfig, seconds: float) -> WatchedJob:
    """The job once all ranks have adopted ``config``, or after the timeout."""
    deadline = time.monotonic() + seconds
    digest = digest_of(config)
    while not (watched := job_in(directory, job)).took_over(digest) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return watched


def _shown(job: WatchedJob, awaited: MonitorConfig | None = None) -> bool:
    """Print the job's state. Returns whether there is no problem."""
    console, errors = Console(), Console(stderr=True)
    ranks = len({one.rank for one in job.ranks})
    say(console, f"job {job.job_id}, {ranks} of {counted(job.ranks[0].world_size, 'rank')}, {job.config_path}")
    console.print(_table(job), soft_wrap=True)
    wrong = disagreements(job)
    if not job.is_dynamic:
        say(console, "This job was not started with DYNAMIC_MONITOR=True: it does not watch its file.")
    if awaited is not None and not job.took_over(digest_of(awaited)):
        wrong.append("not all ranks have adopted the change yet; trainermon ctl status shows when they have")
    for one in wrong:
        say(errors, f"warning: {one}", style="yellow")
    return not wrong


def _table(job: WatchedJob) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("rank", "recording", "state", "monitoring", "since step", "change", "from", "what changed"):
        table.add_column(name, overflow="fold")
    for one in job.ranks:
        table.add_row(*map(plain, _row(one)))
    return table


def _row(manifest: ManifestRecord) -> tuple[str, ...]:
    state = "ended" if manifest.closed else "running"
    where = (str(manifest.rank), str(manifest.recording), state)
    if not manifest.configurations:
        return (*where, "", "", "", "", "")
    last = manifest.configurations[-1]
    return (*where, "on" if last.on else "off", str(last.since), str(last.number), last.origin, last.changed)
