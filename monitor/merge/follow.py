"""A merge that follows a running job: it adds what all ranks have completed, and can be killed and started again at any time.

The merged set is readable at every moment. Beside it, in ``.OUT.following``, is what is known of each window that is in it. A
round merges everything before the horizon, up to which the files of all ranks are complete. Windows that are in the set and
made from the same files are left alone, so a round costs as much as what is new. When all ranks have ended, the last round has
no horizon: it is the merge that ``monitor.merge.merge`` would do, so the result has the same bytes.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from monitor.coordinator.manifest_format import MANIFEST_FILE, ManifestRecord
from monitor.coordinator.output import RankDirectory
from monitor.formats import FORMATS
from monitor.merge.discovery import NO_END, Found, RankRun, choose, discover, runs_of
from monitor.merge.execution import MergeError, alone, is_empty, is_url
from monitor.merge.finished import DONE, FinishedWindow, FinishedWindows, Folder
from monitor.merge.merge import REPORT_FILE, Progress, Wanted, Window, crew_of, missing_ranks, planned_merge
from monitor.merge.outputs import FILE_NAME
from monitor.merge.parts import command_of, difference_of, options_of
from monitor.merge.report import Report
from monitor.sinks.files import StepSpan
from monitor.terminal import counted

BATCH_SECONDS: Final = 5.0
"""Windows that are done are put into the set at least so often."""

_ELSEWHERE: Final = "another directory with -o"

_FOLDERS: Final = ("per_rank", "global")


class UnfinishedError(MergeError):
    """The set has what was recorded so far, and the job has not ended. The message says how to continue."""


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """How to follow a job.

    Attributes:
        interval: Seconds between two looks at the ranks' directories.
        patience: Seconds without news from any rank, after which the job is taken for dead.
        finish: Merge what is there, and end.
    """

    interval: float = 30.0
    patience: float = 4 * 3600.0
    finish: bool = False


# --- How far the ranks have come.
#
# The writer thread of a rank gives a step to all sinks, then notes it in the manifest. A sink publishes the files of a record
# with the last step of the record, or before it takes a step of another record. So when a manifest lists a step, the files of
# all records before it are there, and those of its own record if the step is the last one.


@dataclass(frozen=True, slots=True)
class Horizon:
    """How far all ranks have come.

    Attributes:
        step: Up to here the files of all ranks are complete; -1 before the first step, ``NO_END`` when all ranks have ended.
        behind: The rank that the others wait for, and how far it has come; empty when all have ended.
    """

    step: int
    behind: str = ""

    @classmethod
    def of(cls, runs: Sequence[RankRun], missing: Sequence[int] = ()) -> Horizon:
        """The horizon of a job.

        Args:
            runs: By rank, and of a rank in order of time.
            missing: Ranks without a directory that can be read.
        """
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            return cls(-1, f"rank {missing[0]}{more}, which has no manifest yet")
        reached = {rank: complete_up_to(list(own)) for rank, own in groupby(runs, key=lambda run: run.rank)}
        rank = min(reached, key=lambda rank: (reached[rank], rank))
        if reached[rank] >= NO_END:
            return cls(NO_END)
        files = f"complete files up to step {reached[rank]}" if reached[rank] >= 0 else "no complete files yet"
        return cls(reached[rank], f"rank {rank}, which has {files}")


def complete_up_to(runs: Sequence[RankRun]) -> int:
    """The last step up to which the files of a rank are complete.

    Args:
        runs: Of one rank, in order of time.
    """
    if runs[-1].manifest.closed:
        return NO_END
    latest, newest = next(((run, step) for run in reversed(runs) if (step := _newest(run.manifest)) >= 0), (runs[-1], -1))
    first = latest.manifest.first_step
    if newest < 0 or first is None or latest.manifest.closed:
        return newest
    records = (StepSpan.of_record(newest, length) for length in _record_lengths(latest.manifest))
    complete = min((newest if newest == record.last else record.first - 1 for record in records), default=newest)
    return max(complete, first - 1)  # steps before the first one are those of an earlier run, which has ended


def _newest(manifest: ManifestRecord) -> int:
    """The last step that all sinks were given. Dropped steps do not count: earlier ones may still wait for the writer."""
    lost = (steps for causes in manifest.lost.values() for steps in causes.values())
    return max(one.newest for one in (manifest.steps.written, *lost))


def _record_lengths(manifest: ManifestRecord) -> Iterator[int]:
    configured = manifest.config.get("step_count_per_record")
    for name in manifest.formats:
        if name in FORMATS and FORMATS[name].merged:
            yield configured if isinstance(configured, int) and configured > 0 else FORMATS[name].steps_per_record


# --- The set, and beside it what is known of its windows.


class FollowedSet:
    """A merged set that grows. Each file appears whole.

    A file of the last window of a kind is replaced while the window grows. Its successor first takes its place under the old
    name, then gets its own name: a row is never there twice, and never missing in between. If a window is cut anew, which
    happens when an earlier step is recorded again, the old files are removed first.

    Args:
        output: A directory that is not there yet, or one that the state beside it belongs to.
        options: Of the merge, see ``monitor.merge.parts.options_of``.

    Raises:
        MergeError: Something else is there, or a set that is followed with other options.
    """

    def __init__(self, output: Path, options: Mapping[str, str]) -> None:
        self._output, self._state = output, output.with_name(f".{output.name}.following")
        self._options = dict(options)
        if os.path.lexists(self._state) and (self._state.is_symlink() or not self._state.is_dir()):
            raise MergeError(f"{self._state} is not a directory. Remove it, or name {_ELSEWHERE}.")
        known = self._known()
        if known is None:
            if os.path.lexists(output) and not is_empty(output):
                raise MergeError(f"{output} exists. Remove it, or name {_ELSEWHERE}.")
            shutil.rmtree(self._state, ignore_errors=True)
        elif (difference := difference_of(known[1], options)) is not None:
            raise MergeError(
                f"{output} is followed with {difference[0]}, not with {difference[1]}. "
                f"Use the same options, or name {_ELSEWHERE}."
            )
        (self._state / DONE).mkdir(parents=True, exist_ok=True)
        self._job = known[0] if known else ""
        self._put(self._request(), self._state / "request.json")
        listed = FinishedWindows(Folder(str(self._state))).listed()
        self._windows = {(one.kind, one.steps): one for one in listed}

    def _known(self) -> tuple[str, dict[str, str]] | None:
        """The job and the options that the state is of; None if there is no state."""
        try:
            job, options = json.loads((self._state / "request.json").read_bytes())
            return str(job), dict(options)
        except (OSError, ValueError, TypeError):
            return None

    def _request(self) -> str:
        return json.dumps([self._job, self._options])

    def of_job(self, job: str, known_as: Collection[str]) -> None:
        """Note the id of the job.

        Args:
            known_as: Ids that the job, and jobs that it continues, have in manifests.

        Raises:
            MergeError: The set is of another job.
        """
        if self._job not in ("", job, *known_as) and self._windows:
            raise MergeError(f"{self._output} is of job {self._job}, not of {job}. Name {_ELSEWHERE}.")
        if self._job != job:
            self._job = job
            self._put(self._request(), self._state / "request.json")

    def draft(self) -> Path:
        """An empty directory for the files of a round."""
        draft = self._state / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        return draft

    def lacking(self, windows: Mapping[Window, str], *, last: bool) -> list[Window]:
        """The windows that are not in the set, or were made from other files.

        Args:
            windows: With their fingerprints.
            last: Whether this is the last round: windows with files that could not be read are then tried again.
        """
        there = {f"{folder}/{name}" for folder in _FOLDERS for _, _, name in self._files(folder)}

        def is_there(window: Window, fingerprint: str) -> bool:
            known = self._windows.get((window.kind, window.steps))
            if known is None or known.fingerprint != fingerprint or not there.issuperset(known.files):
                return False
            return not (last and any(one.set_aside for one in known.outcomes))

        return [window for window, fingerprint in windows.items() if not is_there(window, fingerprint)]

    def add(self, finished: Sequence[FinishedWindow], made: Path, report: Report) -> None:
        """Put windows into the set, in place of those with the same steps.

        The report comes first: it says what is missing of rows, so it must not be older than they are. A record comes last. If
        this is interrupted at any point, the next round does again what has no record.

        Args:
            made: The directory that has their files.
            report: Without any window.
        """
        for one in finished:
            for key in [key for key in self._windows if key[0] == one.kind and key[1].meets(one.steps)]:
                self._forget(key)
            self._windows[one.kind, one.steps] = one
        if finished:
            self.tell(report)
        for one in finished:
            for folder in _FOLDERS:
                self._publish(folder, one, made)
            self._put(one.to_json(), self._state / one.name)

    def keep_only(self, windows: Iterable[Window]) -> None:
        """Remove everything that is of other windows."""
        kept = {(one.kind, one.steps) for one in windows}
        for key in [key for key in self._windows if key not in kept]:
            self._forget(key)
        files = {name for one in self._windows.values() for name in one.files}
        for folder in _FOLDERS:
            for _, _, name in self._files(folder):
                if f"{folder}/{name}" not in files:
                    (self._output / folder / name).unlink()

    def tell(self, report: Report) -> None:
        """Write the report of all windows that are in the set. Makes the set when the first rows are there.

        Args:
            report: Without any window; they are added to it.
        """
        for one in self._windows.values():
            for outcome in one.outcomes:
                report.add(one.kind, outcome)
        if self._output.is_dir() and not is_empty(self._output):
            self._put(report.spelled(), self._output / REPORT_FILE)
        elif report.steps:
            new = self._state / "new"
            shutil.rmtree(new, ignore_errors=True)
            for folder in _FOLDERS:
                (new / folder).mkdir(parents=True)
            (new / REPORT_FILE).write_text(report.spelled())
            os.rename(new, self._output)

    def close(self) -> None:
        """The set is finished: remove what was beside it."""
        left = self._output.with_name(f".{self._output.name}.{secrets.token_hex(4)}.draft")  # which the next merge removes
        os.rename(self._state, left)
        shutil.rmtree(left)

    def _forget(self, key: tuple[str, StepSpan]) -> None:
        known = self._windows.pop(key)
        (self._state / known.name).unlink(missing_ok=True)

    def _publish(self, folder: str, finished: FinishedWindow, made: Path) -> None:
        place = self._output / folder
        there = [(steps, name) for kind, steps, name in self._files(folder) if kind == finished.kind]
        old = [(steps.first, name) for steps, name in there if steps.meets(finished.steps)]
        new = {_steps_of(name)[1].first: Path(name).name for name in finished.files if name.startswith(f"{folder}/")}
        firsts = [first for first, _ in old]
        before = {first: name for first, name in old if first in new and firsts.count(first) == 1}
        for name in {name for _, name in old} - set(before.values()):
            (place / name).unlink()
        for first, name in new.items():
            os.replace(made / folder / name, place / before.get(first, name))
            if before.get(first, name) != name:
                os.rename(place / before[first], place / name)

    def _files(self, folder: str) -> Iterator[tuple[str, StepSpan, str]]:
        """The kind, the steps and the name of each file."""
        try:
            names = sorted(os.listdir(self._output / folder))
        except FileNotFoundError:
            return
        for name in names:
            kind, steps = _steps_of(name)
            if kind:
                yield kind, steps, name

    def _put(self, text: str, path: Path) -> None:
        """Write a file, which appears whole."""
        draft = self._state / "written"
        draft.write_text(text)
        os.replace(draft, path)


def _steps_of(name: str) -> tuple[str, StepSpan]:
    """The kind and the steps that a name says; no kind if it is not that of a data file."""
    match = FILE_NAME.fullmatch(name.rpartition("/")[2])
    return (match["kind"], StepSpan(int(match["first"]), int(match["last"]))) if match else ("", StepSpan(0, -1))


# --- Rounds, until the job has ended.

Say = Callable[[str], None]
"""Takes a line for the user."""


def follow(wanted: Wanted, options: FollowOptions, say: Say, progress: Progress) -> Report:
    """Merge a job while it runs. Returns when all ranks have ended and everything is merged, with the report.

    Raises:
        UnfinishedError: There was no news for too long.
        MergeError: There is nothing to merge, or nothing to merge it into.
        OSError: A file cannot be written. The same call continues.
    """
    if is_url(wanted.output):
        raise MergeError(f"--follow writes to a directory, not to a URL. Name {_ELSEWHERE}.")
    if not wanted.base.is_dir():
        raise MergeError(f"{wanted.base} is not a directory. Name the directory the ranks write to.")
    output = Path(wanted.output).absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with alone(output, "merge", _ELSEWHERE):
        rounds = Rounds(wanted, FollowedSet(output, options_of(wanted)), say, progress)
        seen: object = None
        news = said = monotonic()
        while True:
            now = manifests(wanted.base)
            if now != seen or options.finish:
                seen, news = now, monotonic()
                report = rounds.next(finish=options.finish)
                if report is not None:
                    return report
            silent = monotonic() - news
            if silent >= options.patience:
                raise UnfinishedError(f"There was no news for {_duration(silent)}: {rounds.waiting}.\n{how_to_go_on(wanted)}")
            if silent >= 60 and monotonic() - said >= 600:
                said = monotonic()
                say(f"no news for {_duration(silent)}: {rounds.waiting}")
            sleep(options.interval)


def how_to_go_on(wanted: Wanted) -> str:
    """The commands to run after an interruption."""
    same, end = command_of(wanted, "--follow"), command_of(wanted, "--follow", "--finish")
    return f"To continue, run\n  {same}\nIf the job has ended or was killed, merge what there is with\n  {end}"


def manifests(base: Path) -> dict[str, tuple[int, int]]:
    """What changes when a rank has something new: by directory, when its manifest was written, and its size."""
    found = {}
    for name in os.listdir(base):
        if RankDirectory.parse(name) is not None:
            try:
                status = os.stat(base / name / MANIFEST_FILE)
            except OSError:
                continue
            found[name] = (status.st_mtime_ns, status.st_size)
    return found


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


class Rounds:
    """Brings a set up to date, again and again.

    Attributes:
        waiting: What the next round waits for.
    """

    def __init__(self, wanted: Wanted, target: FollowedSet, say: Say, progress: Progress) -> None:
        self.waiting = ""
        self._wanted, self._target, self._say, self._progress = wanted, target, say, progress
        self._directories: set[str] = set()
        self._unknown: set[str] = set()
        self._done: object = None

    def next(self, *, finish: bool) -> Report | None:
        """Do a round if there is something to do. Returns the report of the last one.

        Args:
            finish: Whether this is the last one, whatever the ranks do.

        Raises:
            MergeError: There is nothing to merge, or several jobs.
        """
        found = discover(self._wanted.base, self._wanted.span)
        if not found.jobs and not finish:
            self._wait("waiting for the first rank, no directory has a manifest yet")
            return None
        job = choose(found, self._wanted.job)
        runs = runs_of(found, job)
        directories = {run.directory.name for run in runs}
        if (lost := sorted(self._directories - directories)) and not finish:
            self._wait(f"waiting for {lost[0]}, whose manifest cannot be read now")
            return None
        self._directories = directories
        self._target.of_job(job, {run.manifest.job_id for run in runs})
        horizon = Horizon(NO_END) if finish else Horizon.of(runs, missing_ranks(runs, found.others_of_the_launch(job)))
        state = (horizon.step, [(run.directory.name, run.end) for run in runs])
        waiting = f"waiting for {horizon.behind}"
        if horizon.step < 0 or state == self._done:
            self._wait(waiting)
            return None
        report = self._round(found, job, None if horizon.step == NO_END else horizon.step)
        self._done, self.waiting = state, waiting
        if horizon.step == NO_END:
            self._target.close()
            return report
        rows = sum(report.rows.values())
        self._say(f"merged up to step {max(report.steps, default=-1)}, {counted(rows, 'row')}; {self.waiting}")
        return None

    def _wait(self, reason: str) -> None:
        if reason != self.waiting:
            self._say(reason)
        self.waiting = reason

    def _name_unknown(self, kinds: set[str]) -> None:
        """A kind may be switched on later, or be misspelt."""
        if kinds - self._unknown:
            self._say(f"the job has not recorded {', '.join(sorted(kinds))} so far, which --kinds names")
        self._unknown |= kinds

    def _round(self, found: Found, job: str, horizon: int | None) -> Report:
        draft = self._target.draft()
        with crew_of(self._wanted) as crew:
            work = planned_merge(self._wanted, found, job, draft, crew, horizon)
            if horizon is not None:  # the files that ranks are writing are not there to be recovered
                work.report.set_aside[:] = [one for one in work.report.set_aside if not Path(one.path).name.startswith(".")]
                self._name_unknown(set(self._wanted.kinds or ()) - {*work.plan.shards, *work.plan.catalogues})
            prints = {window: work.plan.fingerprint(window) for window in work.windows}
            batch: list[FinishedWindow] = []
            since = monotonic()
            for window, outcomes in work.done(self._target.lacking(prints, last=horizon is None), self._progress):
                files = tuple(work.plan.files(window))
                batch.append(FinishedWindow(window.kind, window.steps, prints[window], files, tuple(outcomes)))
                if monotonic() - since > BATCH_SECONDS:
                    self._target.add(batch, draft, _empty(work.report))
                    batch, since = [], monotonic()
            self._target.add(batch, draft, _empty(work.report))
            self._target.keep_only(work.windows)
            report = _empty(work.report)
            self._target.tell(report)
            if horizon is not None:
                return report
            if not report.steps:
                self._target.close()
            return replace(work, report=report).finished_report()


def _empty(report: Report) -> Report:
    """The same, with a list of its own for what windows add."""
    return Report(report.job, report.world_size, report.runs, report.missing_ranks, list(report.set_aside), report.chosen)
