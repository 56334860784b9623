"""A merge in parts: each task of an array does one part, on any machine, and a last command makes one data set of them.

Every part plans the whole merge. How it is cut into windows depends on the recording alone, so all parts have the same plan.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from monitor.merge import finished
from monitor.merge.combine import Outcome
from monitor.merge.discovery import choose, discover
from monitor.merge.execution import MergeError, NothingRecordedError, alone, is_empty, run, without_password
from monitor.merge.finished import FinishedWindow, FinishedWindows, Folder
from monitor.merge.merge import REPORT_FILE, PlannedMerge, Progress, Wanted, Window, crew_of, planned_merge
from monitor.merge.outputs import SUFFIXES
from monitor.sinks.files import ALL_STEPS

# --- Which windows a part has.


class Part(NamedTuple):
    """One of the parts of a merge, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, given: str) -> Part:
        """Raises: MergeError: It is not ``I/N`` with I from 1 to N."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", given)
        part = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= part.number <= part.of:
            raise MergeError(
                f"--part is {given!r}. Write I/N: parts count from 1, so of 8 they are 1/8 to 8/8. "
                'In an array that counts from 0, add one: --part "$((JOB_COMPLETION_INDEX + 1))/8".'
            )
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def parts_of(windows: Sequence[Window], count: int) -> list[int]:
    """The part that does each window. A part has neighbours in the plan, and about as many rows as every other part."""
    weights = [round(window.rows) + 1 for window in windows]
    total, before, numbers = sum(weights), 0, []
    for weight in weights:
        numbers.append((2 * before + weight) * count // (2 * total) + 1)  # where its middle lies
        before += weight
    return numbers


# --- Where parts are, until all of them are there.

_FOLDERS: Final = ("per_rank", "global")

_REQUEST: Final = "request"
"""The record of the options that the parts have."""


@dataclass(frozen=True)
class PartsFolder:
    """The folder that all parts of a merge write to.

    Attributes:
        folder: The output, if that is behind a URL: its report, written last, makes it a data set. Otherwise a hidden directory
            beside the output.
        final: The directory that it becomes at the end; None behind a URL.
    """

    folder: Folder
    final: Path | None

    @classmethod
    def of(cls, output: Path | str) -> PartsFolder:
        """Raises: MergeError: The package for the URL is missing, or the directory cannot be used."""
        folder = Folder(str(output), finished.PATIENCE)
        if folder.local is None:
            return cls(folder, None)
        final = folder.local.absolute()
        hidden = final.with_name(f".{final.name}.parts")
        if os.path.lexists(hidden) and (hidden.is_symlink() or not hidden.is_dir()):
            raise MergeError(f"{hidden} is not a directory. Remove it, or name another output with -o.")
        return cls(Folder(str(hidden)), final)

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def local(self) -> Path | None:
        return self.folder.local

    def check(self) -> None:
        """Raises: MergeError: something stands there that is not a part of a merge."""
        if self.final is not None:
            if os.path.lexists(self.final) and not is_empty(self.final):
                raise MergeError(f"{self.final} exists. Remove it, or name another output with -o.")
            return
        names = set(self.folder.names())
        if REPORT_FILE in names:
            raise MergeError(f"{self} is a finished data set. Remove it, or name another output with -o.")
        if names and (names - {*_FOLDERS, finished.DONE} or finished.DONE not in names):
            there = ", ".join(sorted(names)[:3])
            raise MergeError(f"{self} contains {there}, which is not of a merge in parts. Name another output with -o.")

    def request(self) -> dict[str, str]:
        """The options of the parts that are there, and ``--part``, how many they are; empty if there is none."""
        with suppress(ValueError):
            known = json.loads(self.folder.read(f"{finished.DONE}/{_REQUEST}") or b"null")
            if isinstance(known, dict):
                return {str(option): str(value) for option, value in known.items()}
        return {}

    def agree(self, options: Mapping[str, str], count: int) -> None:
        """Write down the options of the parts, which must be the same for all.

        Raises:
            MergeError: Parts with other options are there.
        """
        known = self.request()
        if known and (difference := difference_of(known, options)):
            one, other = difference
            raise MergeError(
                f"{self} has parts with {one}, and this one has {other}. Give every part the same options, or remove {self}."
            )
        if known != (asked := {**options, "--part": str(count)}):
            self.folder.write(json.dumps(asked), f"{finished.DONE}/{_REQUEST}")

    def files(self) -> set[str]:
        """The files of windows that are there."""
        return {f"{below}/{name}" for below in _FOLDERS for name in self.folder.names(below)}

    def report(self) -> dict[str, Any] | None:
        """The report of the data set, if it is complete. What an interrupted ``finish`` has left is removed."""
        if self.final is not None and self.folder.names():
            return None
        whole = self.folder if self.final is None else Folder(str(self.final))
        with suppress(ValueError):
            known = json.loads(whole.read(REPORT_FILE) or b"null")
            if isinstance(known, dict) and "clean" in known and "job_id" in known:
                whole.remove(finished.DONE)
                return known
        return None

    def complete(self, files: Collection[str], report: str) -> None:
        """Make a data set of these files, and remove others that parts have left. It is a data set at once, or not at all.

        Raises:
            OSError: It cannot be written.
        """
        for name in self.files() - set(files):
            if name.endswith((".part", *SUFFIXES.values())):
                self.folder.remove(name)
        self.folder.write(report, REPORT_FILE)
        whole = self.folder
        if self.final is not None and self.local is not None:
            for name in set(self.folder.names()) - {*_FOLDERS, finished.DONE, REPORT_FILE}:
                self.folder.remove(name)
            for below in _FOLDERS:
                (self.local / below).mkdir(exist_ok=True)
            os.rename(self.local, self.final)
            whole = Folder(str(self.final))
        whole.remove(finished.DONE)

    def discard(self) -> None:
        """Remove what has no row."""
        for name in (*_FOLDERS, finished.DONE):
            self.folder.remove(name)
        if self.local is not None:
            self.folder.remove("")


# --- Options that all parts have in common, and the commands that are still to be run.


def options_of(wanted: Wanted) -> dict[str, str]:
    """The options of the command that decide the content of the data set."""
    first, last = wanted.steps
    given = {
        "--job": wanted.job,
        "--time-start": wanted.span and wanted.span[0],
        "--time-end": wanted.span and wanted.span[1],
        "--kinds": None if wanted.kinds is None else ",".join(sorted(set(wanted.kinds))),
        "--steps": None if wanted.steps == ALL_STEPS else f"{first}:{last if last != ALL_STEPS.last else ''}",
        "--format": wanted.format,
    }
    return {option: value for option, value in given.items() if value is not None}


def command_of(wanted: Wanted, *more: str) -> str:
    """The command that does this merge, or a part of it."""
    output = without_password(str(wanted.output))
    return shlex.join(["trainermon", "merge", str(wanted.base), "-o", output, *chain(*options_of(wanted).items()), *more])


def difference_of(known: Mapping[str, str], given: Mapping[str, str]) -> tuple[str, str] | None:
    """An option that differs, as each of both has it."""
    for option in sorted({*known, *given} - {"--part"}):
        if known.get(option) != given.get(option):
            one, other = (f"{option} {options[option]}" if option in options else f"no {option}" for options in (known, given))
            return one, other
    return None


# --- Doing a part, and making one data set of all.


class DoneWindows(NamedTuple):
    """How many windows a part has, and how many of them were done before."""

    all: int
    before: int


def merge_part(wanted: Wanted, part: Part, progress: Progress) -> DoneWindows:
    """Do a part. What is done of it already is not done again.

    Raises:
        MergeError: It is not complete. What is done stays.
    """
    with _to_be_run_again(wanted, "--part", str(part)), _shared(wanted, part.of) as shared:
        return shared.do(part, progress)


def finish(wanted: Wanted) -> dict[str, Any]:
    """Make a data set of all parts. Returns the report, see ``Report.told``. If it is done already, nothing changes.

    Raises:
        MergeError: Something is missing, and the message names it. What is done stays.
    """
    place = PartsFolder.of(wanted.output)
    with _alone_in(place), _to_be_run_again(wanted, "--finish"):
        job = choose(discover(wanted.base, wanted.span), wanted.job)
        if (known := place.report()) is not None and known["job_id"] == job:
            return known
        if not place.request():
            raise MergeError(f"{place} has no part yet. Run every part, for example one alone:\n  {_part(wanted, Part(1, 1))}")
        with _shared(wanted) as shared:
            return shared.finish()


def merge_to_url(wanted: Wanted, progress: Progress) -> dict[str, Any]:
    """Write the merged data set behind a URL. Returns the report, see ``Report.told``.

    Raises:
        MergeError: It is not complete. What is done stays, and is not done again.
    """
    with _to_be_run_again(wanted), _shared(wanted, 1) as shared:
        shared.do(Part(1, 1), progress)
        return shared.finish()


@contextmanager
def _alone_in(place: PartsFolder) -> Iterator[None]:
    if place.final is None:
        yield
    else:
        with alone(place.final, "merge", "another output with -o"):
            yield


@contextmanager
def _to_be_run_again(wanted: Wanted, *more: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MergeError(f"{error}\nWhat is done stays. Run it again:\n  {command_of(wanted, *more)}") from error


def _part(wanted: Wanted, part: Part) -> str:
    return command_of(wanted, "--part", str(part))


@contextmanager
def _shared(wanted: Wanted, count: int | None = None) -> Iterator[SharedMerge]:
    """Plan a merge whose parts are in one folder.

    Args:
        count: How many parts there are; None if none is to be done.
    """
    place = PartsFolder.of(wanted.output)
    if place.final is None and wanted.dask is not None:
        raise MergeError("--dask cannot write to a URL: its workers write to a directory that all machines see. Use --part.")
    place.check()
    found = discover(wanted.base, wanted.span)
    job = choose(found, wanted.job)
    options = {**options_of(wanted), "--job": job}
    if count is not None:
        place.agree(options, count)
    elif difference := difference_of(place.request(), options):
        raise MergeError("The parts have {}, and --finish has {}. Give --finish the options of the parts.".format(*difference))
    with (
        TemporaryDirectory(prefix=".work-", dir=place.local, ignore_cleanup_errors=True) as draft,
        crew_of(wanted) as crew,
    ):
        yield SharedMerge(planned_merge(wanted, found, job, Path(draft), crew), place, Path(draft))


@dataclass(frozen=True)
class SharedMerge:
    """A merge that several processes do.

    Attributes:
        draft: The directory for the files of this process.
    """

    planned: PlannedMerge
    place: PartsFolder
    draft: Path

    def do(self, part: Part, progress: Progress) -> DoneWindows:
        """Do the windows of a part that are not done.

        Raises:
            OSError: A file cannot be written.
        """
        every = self.planned.windows
        own = [window for window, number in zip(every, parts_of(every, part.of), strict=True) if number == part.number]
        prints = {window: self.planned.plan.fingerprint(window) for window in own}  # before any shard is read: it may grow
        records, files = self._records(own), self.place.files()
        left = [one for one in own if not _holds(records.get(one), prints[one], files)]

        def keep(done: tuple[Window, list[Outcome]]) -> None:
            window, outcomes = done
            made = tuple(self.planned.plan.files(window))
            record = FinishedWindow(window.kind, window.steps, prints[window], made, tuple(outcomes))
            FinishedWindows(self.place.folder).add(record, self.draft)

        with ThreadPoolExecutor(finished.CONNECTIONS) as pool:
            for _ in run(pool, finished.CONNECTIONS, keep, self.planned.done(left, progress)):
                pass
        return DoneWindows(len(own), len(own) - len(left))

    def finish(self) -> dict[str, Any]:
        """Make a data set of all windows. Returns the report.

        Raises:
            MergeError: Some are not done, or were made from files that have changed since.
            OSError: A file cannot be written.
        """
        every = self.planned.windows
        records, files = self._records(every), self.place.files()
        lacking = [one for one in every if not _holds(records.get(one), self.planned.plan.fingerprint(one), files)]
        if lacking:
            raise MergeError(self._to_do(lacking, [one for one in lacking if one in records]))
        for window in every:
            self.planned.add(window, records[window].outcomes)
        try:
            report = self.planned.finished_report()
        except NothingRecordedError:
            self.place.discard()
            raise
        self.place.complete([name for record in records.values() for name in record.files], report.spelled())
        return report.told()

    def _records(self, windows: Sequence[Window]) -> dict[Window, FinishedWindow]:
        """The windows of these that are done, perhaps from other data, with their records."""
        named = {finished.record_of(one.kind, one.steps): one for one in windows}
        listed = FinishedWindows(self.place.folder).listed(named)
        return {named[name]: one for one in listed if (name := finished.record_of(one.kind, one.steps)) in named}

    def _to_do(self, lacking: Sequence[Window], changed: Sequence[Window]) -> str:
        """A text about windows that are not done."""
        wanted, every = self.planned.wanted, self.planned.windows
        known = self.place.request().get("--part", "")
        count = int(known) if re.fullmatch("[1-9][0-9]{0,5}", known) else 1
        numbers = dict(zip(every, parts_of(every, count), strict=True))
        parts = sorted({numbers[one] for one in lacking})
        named = [f"{one.kind} from step {one.steps.first} to {one.steps.last}" for one in lacking[:_MOST_NAMED]]
        more = [f"{len(lacking) - len(named)} more"] if len(lacking) > len(named) else []
        said = [f"{len(lacking)} of {len(every)} ranges of steps are not done: {', '.join([*named, *more])}."]
        if changed:
            said.append(f"{len(changed)} of these were made from files that have changed since, so the job was still running.")
        said.append(f"They are of parts {', '.join(map(str, parts))} of {count}. What is done stays. Run, then --finish again:")
        said += [f"  {_part(wanted, Part(number, count))}" for number in parts[:_MOST_NAMED]]
        said += [f"  and {len(parts) - _MOST_NAMED} more"] if len(parts) > _MOST_NAMED else []
        return "\n".join(said)


_MOST_NAMED: Final = 5


def _holds(record: FinishedWindow | None, fingerprint: str, files: set[str]) -> bool:
    """Whether a window is done: its files are there, and were made from the data that is there now."""
    return record is not None and record.fingerprint == fingerprint and files >= set(record.files)
