"""The drills: each draws a case, runs it and checks what is left."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, Final

import verdicts
from damage import damaged, look_at_everything
from faults import FAULTS, Fault, OfDisk
from running import Ended, Preload, a_job, check_end
from spec import Job
from verdicts import require

EVERYTHING: Final[dict[str, Any]] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "ops": ["min", "max", "mean", "norm", "nans"],
    "ndigits": 17,
    "alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True},
    "append_output": "auto",
}
FORMATS: Final = (["csv"], ["hdf5"], ["parquet"], ["csv", "hdf5", "parquet", "tensorboard"])
ROOT: Final = Path(__file__).resolve().parents[2]
CHECKPOINT: Final = 5
"""A checkpoint is left every so many steps."""

BOUND: Final = 500_000
"""Bytes of a rank's directory, in some of the cases."""

CHAIN: Final = 10
CHAIN_STEPS: Final = 600


@dataclass(slots=True)
class Outcome:
    """What a case did.

    Attributes:
        trained: Steps of all ranks.
        named: How many of them are named as missing.
        kills: Processes that were killed.
    """

    trained: int = 0
    named: int = 0
    kills: int = 0


@dataclass(slots=True)
class Ground:
    """What the cases of a run share: the losses of training alone, and the rows of healthy runs, by job."""

    directory: Path
    preload: Preload
    _lock: Lock = field(default_factory=Lock)
    _numbers: Iterator[int] = field(default_factory=count)
    _alone: dict[Job, list[list[str]]] = field(default_factory=dict)
    _healthy: dict[Job, verdicts.Rows] = field(default_factory=dict)

    def alone(self, jobs: Sequence[Job]) -> list[list[str]]:
        """The losses of each rank without a monitor, with the faults of training."""
        faults = [
            job.fault if FAULTS[job.fault].of_training and FAULTS[job.fault].ends_with == (0,) else "none" for job in jobs
        ]
        plain = [replace(_plain(job), at=job.at, until=job.until, fault=one) for job, one in zip(jobs, faults, strict=True)]
        key = replace(plain[0], fault="/".join(faults))
        if set(faults) == {"none"}:
            key = replace(key, at=0, until=0)
        with self._lock:
            if key not in self._alone:
                place = self._place("alone")
                ended = a_job([replace(job, told=str(place / f"{job.rank}")) for job in plain], self.preload, _only_wait)
                require(all(one.status == 0 for one in ended), f"training alone fails: {ended[0].said[-1500:]}")
                self._alone[key] = [one.told for one in ended]
            return self._alone[key]

    def healthy(self, jobs: Sequence[Job]) -> verdicts.Rows:
        """The rows of a run without faults."""
        config = {**EVERYTHING, "format": ["csv"], "step_count_per_record": 10}
        plain = [_plain(job) for job in jobs]
        key = plain[0]
        with self._lock:
            if key not in self._healthy:
                place = self._place("healthy")
                where = [replace(one, output=str(place / "out"), told=str(place / f"{one.rank}")) for one in plain]
                ended = a_job([replace(job, config=config) for job in where], self.preload, _only_wait)
                check_end(ended)
                self._healthy[key] = verdicts.rows_below(place / "out", range(key.world))
            return self._healthy[key]

    def _place(self, name: str) -> Path:
        place = self.directory / f"{name}{next(self._numbers)}"
        place.mkdir()
        return place


def _plain(job: Job) -> Job:
    """A job without a fault and without a monitor: jobs that train alike are the same one."""
    return replace(
        job, output="", told="", begin=0, control="", fault="none", at=0, until=0, seed=0, config=None, dynamic=False
    )


def _changes_training(fault: type[Fault]) -> bool:
    return fault.of_training and fault.ends_with == (0,)


def _only_wait(_running: Sequence[subprocess.Popen[bytes]]) -> None: ...


# --- A fault, then a restart if the job did not end well.


def of_a_fault(name: str, ground: Ground, place: Path, random_: random.Random, worlds: Sequence[int]) -> Outcome:
    fault = FAULTS[name]
    world = random_.choice([one for one in worlds if one in fault.worlds])
    framework = random_.choice(("torch", "torch", *filter(_runs, fault.frameworks))) if world == 1 else "torch"
    at = random_.randrange(CHECKPOINT + 2, 22)
    compilable = fault.compiles and framework == "torch" and world < 3  # docs/compiled.md: the order of DDP's sums
    given = Job(
        output=str(place / "out"), told="", framework=framework, world=world, at=at, until=at + random_.randrange(3, 15),
        compiled=random_.random() < 0.3 and compilable,
        seed=random_.randrange(2**30), config=_config(random_),
    )  # fmt: skip
    on = range(world) if fault.of_all else [random_.randrange(world)]
    jobs = [replace(given, rank=rank, fault=name if rank in on else "none") for rank in range(world)]
    return _through(ground, place, jobs, fault)


def _runs(framework: str) -> bool:
    """MindSpore needs numpy 1."""
    return framework == "torch" or (find_spec(framework) is not None and version("numpy") < "2")


def _config(random_: random.Random) -> dict[str, Any]:
    formats = random_.choice(FORMATS)
    bound = {"max_output_bytes": BOUND} if random_.random() < 0.3 and "tensorboard" not in formats else {}
    return {**EVERYTHING, **bound, "format": formats, "step_count_per_record": random_.choice((1, 2, 5))}


def _through(ground: Ground, place: Path, jobs: Sequence[Job], fault: type[Fault]) -> Outcome:
    expected, healthy = ground.alone(jobs), ground.healthy(jobs)
    where = [replace(job, told=str(place / f"first{job.rank}"), control=str(place / f"control{job.rank}")) for job in jobs]
    ended = a_job(where, ground.preload, _only_wait)
    check_end(ended)
    lives = [ended]
    if fault.ends_with != (0,):
        begin = _checkpoint(ended)
        again = [replace(job, fault="none", control="", begin=begin, told=str(place / f"again{job.rank}")) for job in where]
        lives.append(a_job(again, ground.preload, _only_wait))
        check_end(lives[-1])
    gone = max(job.until for job in jobs) if fault.deletes else -1
    return _checked(place, lives, expected, None if _changes_training(fault) else healthy, gone)


def _checkpoint(ended: Sequence[Ended]) -> int:
    """The step from which a job is started again."""
    last = min((max(one.steps, default=-1) for one in ended), default=-1)
    return (last + 1) // CHECKPOINT * CHECKPOINT


def _checked(
    place: Path,
    lives: Sequence[Sequence[Ended]],
    expected: list[list[str]],
    healthy: verdicts.Rows | None,
    gone_until: int = -1,
) -> Outcome:
    output = place / "out"
    trained: dict[int, set[int]] = {}
    for ended in lives:
        for one, alone in zip(ended, expected, strict=True):
            verdicts.check_losses(one.told, alone)
            trained.setdefault(one.job.rank, set()).update(one.steps)
    _put_back(output)
    rows = verdicts.rows_below(output, trained) if list(output.glob("*-rank*-*/manifest.json")) else {}
    if healthy is not None:
        verdicts.check_rows(rows, healthy)
    named = verdicts.check_steps(output, trained, rows, gone_until)
    verdicts.check_merge(output, place / "merged", named)
    kills = sum(one.status < 0 for ended in lives for one in ended)
    return Outcome(sum(map(len, trained.values())), named, kills)


def _put_back(output: Path) -> None:
    """What a fault that ended with its process has left in the way."""
    for aside in output.glob("aside"):
        shutil.rmtree(aside)


# --- Kills at random moments, one after the other.


def chain_of_kills(ground: Ground, place: Path, random_: random.Random, worlds: Sequence[int]) -> Outcome:
    """Ten times a job is killed and started again, then it trains to its end."""
    world = random_.choice([one for one in worlds if one <= 2])
    given = Job(output=str(place / "out"), told="", world=world, steps=CHAIN_STEPS, config=_config(random_))
    jobs = [replace(given, rank=rank) for rank in range(world)]
    expected, healthy = ground.alone(jobs), ground.healthy(jobs)
    lives: list[list[Ended]] = []
    begin = 0
    for life in range(CHAIN + 1):
        now = [replace(job, begin=begin, told=str(place / f"life{life}-{job.rank}")) for job in jobs]
        lives.append(a_job(now, ground.preload, _killer(now, random_) if life < CHAIN else _only_wait))
        begin = max(begin, _checkpoint(lives[-1]))
        if all(one.told[-1:] == ["end"] for one in lives[-1]):
            break
    require(all(one.status == 0 for one in lives[-1]), f"the last life ended badly: {lives[-1][0].said[-1500:]}")
    return _checked(place, lives, expected, healthy)


def _killer(jobs: Sequence[Job], random_: random.Random) -> Callable[[Sequence[subprocess.Popen[bytes]]], None]:
    """Kills every rank once a number of steps has been trained."""
    wanted, rank = random_.randrange(1, 50), random_.randrange(len(jobs))

    def watch(running: Sequence[subprocess.Popen[bytes]]) -> None:
        if len(verdicts.losses(Path(jobs[rank].told))) >= wanted:
            for process in running:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)

    return watch


# --- Ranks that agree while one of them ends.


def killed_in_agreement(ground: Ground, place: Path, random_: random.Random, worlds: Sequence[int]) -> Outcome:
    """A rank is killed while all agree on a change of the configuration. The others train on."""
    return _apart(ground, place, random_, worlds, first_ends=False)


def store_gone(ground: Ground, place: Path, random_: random.Random, worlds: Sequence[int]) -> Outcome:
    """The rank that serves the job's store is killed. The others train on."""
    return _apart(ground, place, random_, worlds, first_ends=True)


def _apart(ground: Ground, place: Path, random_: random.Random, worlds: Sequence[int], *, first_ends: bool) -> Outcome:
    world = random_.choice([one for one in worlds if one > 1])
    config = {**EVERYTHING, "format": random_.choice(FORMATS), "dynamic_on": True, "start_step": 0, "step_count_per_record": 2}
    del config["append_output"]
    given = Job(output=str(place / "out"), told="", world=world, apart=True, dynamic=True, steps=400, config=config)
    jobs = [replace(given, rank=rank, told=str(place / f"{rank}")) for rank in range(world)]
    path, ending = place / "config.json", 0 if first_ends else random_.randrange(1, world)
    path.write_text(json.dumps(config))
    change = random_.randrange(40, 150)
    end = change + random_.randrange(0, 40)
    done: list[str] = []

    def watch(_running: Sequence[subprocess.Popen[bytes]]) -> None:
        steps = len(verdicts.losses(Path(jobs[ending].told)))
        if steps >= change and "changed" not in done:
            done.append("changed")
            changed = {**config, "mv_distribution": False, "dynamic_on": True}
            path.with_name("draft.json").write_text(json.dumps(changed))
            path.with_name("draft.json").replace(path)

    expected = ground.alone(jobs)
    jobs[ending] = replace(jobs[ending], fault="killed", at=end)  # by itself: a signal could come after the last step
    ended = a_job(jobs, ground.preload, watch)
    for one in ended:  # the others do not notice
        status = -signal.SIGKILL if one.job.rank == ending else 0
        require(one.status == status, f"rank {one.job.rank} ended with {one.status}: {one.said[-2000:]}")
        require("Traceback" not in one.said, f"rank {one.job.rank} printed a traceback: {one.said[-2000:]}")
    for one, alone in zip(ended, expected, strict=True):
        verdicts.check_losses(one.told, alone)
    rows = verdicts.rows_below(place / "out", range(world))
    begun = {rank: min(one.first_step or 0 for one in found) for rank, found in verdicts.manifests(place / "out").items()}
    others = [one for one in ended if one.job.rank != ending]
    trained = {one.job.rank: {step for step in one.steps if step >= begun[one.job.rank]} for one in others}
    named = verdicts.check_steps(place / "out", trained, rows)
    verdicts.check_merge(place / "out", place / "merged", 0)
    return Outcome(sum(map(len, trained.values())), named, 1)


# --- Commands that read what others wrote.


def damaged_files(ground: Ground, place: Path, random_: random.Random, _worlds: Sequence[int]) -> Outcome:
    """Every command reads recordings with damaged files."""
    job = Job(output=str(place / "out"), told=str(place / "told"), steps=12, config=_config(random_))
    check_end(a_job([job], ground.preload, _only_wait))
    merged = place / "merged"
    verdicts.check_merge(place / "out", merged, 0)
    for number in range(4):
        copy = place / f"copy{number}"
        copy.mkdir()
        for part in ("out", "merged"):
            shutil.copytree(place / part, copy / part, symlinks=True)
        said = damaged(copy, random_)
        look_at_everything(copy, place / f"looked{number}", said, random_)
    return Outcome()


def resumed_over_damage(ground: Ground, place: Path, random_: random.Random, _worlds: Sequence[int]) -> Outcome:
    """A job is killed, files of it are damaged, and it is started again. It trains on, and accounts for its own steps."""
    given = Job(
        output=str(place / "out"),
        told=str(place / "first"),
        fault="killed",
        at=random_.randrange(5, 20),
        config=_config(random_),
    )
    expected = ground.alone([given])
    (first,) = a_job([given], ground.preload, _only_wait)
    check_end([first])
    said = damaged(place / "out", random_)
    begin = _checkpoint([first])
    (again,) = a_job([replace(given, fault="none", begin=begin, told=str(place / "again"))], ground.preload, _only_wait)
    if again.status == 1 and "OutputError" in again.said:  # it was refused with a message before it trained
        return Outcome(len(first.steps), 0, 1)
    try:
        check_end([again])
        verdicts.check_losses(again.told, expected[0])
        require(again.told[-1:] == ["end"], "the second life did not train to its end")
        newest = max((path for path in place.glob("out/*-rank0-*")), key=lambda path: path.stat().st_mtime)
        record = verdicts.read_manifest(newest / "manifest.json")
        missing = set(again.steps) - verdicts.accounted(record)
        require(not missing, f"nothing is said of steps {sorted(missing)[:10]}")
        look_at_everything(place, place / "looked", said, random_)
    except verdicts.DrillError as error:
        raise verdicts.DrillError(f"with {said}: {error}") from None
    return Outcome(len(first.steps) + len(again.steps), 0, 1)


# --- The modules in C.


def sanitized(_ground: Ground, place: Path, _random: random.Random, _worlds: Sequence[int]) -> Outcome:
    """Their tests, with the sanitizers of the compiler."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={place / 'tests'}"]
    test = ROOT / "tests" / "pytorch" / "test_sanitized.py"
    done = subprocess.run(
        [*command, test], cwd=ROOT, env=os.environ | {"PROVE": "1"}, capture_output=True, text=True, check=False
    )
    require(done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:])
    return Outcome()


# --- All of them.

Run = Callable[[Ground, Path, random.Random, Sequence[int]], Outcome]


@dataclass(frozen=True, slots=True)
class Drill:
    """A drill.

    Attributes:
        needs_preload: Whether it needs ``disk.c``.
        several_ranks: Whether it needs two ranks at least.
        once: Whether one case of it suffices, in runs of ten minutes and more.
    """

    name: str
    run: Run
    needs_preload: bool = False
    several_ranks: bool = False
    once: bool = False


def all_drills() -> list[Drill]:
    of_faults = [
        Drill(name, partial(of_a_fault, name), needs_preload=issubclass(fault, OfDisk)) for name, fault in FAULTS.items()
    ]
    return [
        *of_faults,
        Drill("ten kills in a chain", chain_of_kills),
        Drill("a rank is killed in an agreement", killed_in_agreement, several_ranks=True),
        Drill("the store is gone", store_gone, several_ranks=True),
        Drill("commands read damaged files", damaged_files),
        Drill("a restart finds damaged files", resumed_over_damage),
        Drill("the code in C under sanitizers", sanitized, once=True),
    ]
