"""The faults that a process of a drill does to itself. Training alone survives each of them, or ends as it does without one."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from spec import Job

FULL, NO_FILES, READ_ONLY, ERRORS, SLOW, HANGS = 1, 2, 4, 8, 16, 32
"""Of ``disk.c``."""

SLOW_US = 30_000
A_DAY_S = 86_400


class PlannedError(Exception):
    """An error of training that the loop catches."""


class StopError(Exception):
    """An error of training that ends the process."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Fault:
    """No fault. ``begins`` is called before one step, ``ends`` before a later one, ``after`` after each step."""

    of_training: ClassVar[bool] = False
    """Whether training alone goes another way because of it."""

    ends_with: ClassVar[tuple[int, ...]] = (0,)
    """The exit statuses that the process may have."""

    frameworks: ClassVar[tuple[str, ...]] = ("torch", "mindspore")
    worlds: ClassVar[tuple[int, ...]] = (1, 2, 4)
    of_all: ClassVar[bool] = False
    """Whether all ranks do the same. Otherwise one of them does."""

    compiles: ClassVar[bool] = True
    """Whether training can compile code under it."""

    deletes: ClassVar[bool] = False
    """Whether it takes away what was recorded before."""

    def __init__(self, job: Job, training: Any) -> None:
        self.job, self.training = job, training
        self.random = random.Random(job.seed + job.rank)

    def armed(self) -> None:
        """The monitor is attached."""

    def begins(self) -> None: ...

    def ends(self) -> None: ...

    def after(self, step: int) -> None: ...

    def restored(self) -> None:
        """The last step has ended. Faults that last go on while the monitor closes."""

    def directory(self) -> Path | None:
        """Where this rank records."""
        found = sorted(Path(self.job.output).glob(f"*-rank{self.job.rank}-*"))
        return found[-1] if found else None


# --- Of the disk and of the clock.


class OfDisk(Fault):
    """A fault of ``disk.c``."""

    mode: ClassVar[int] = 0
    slow_us: ClassVar[int] = 0

    def control(self, mode: int, slow_us: int = 0, ahead_s: int = 0) -> None:
        with open(self.job.control, "r+b") as file:
            file.write(struct.pack("3q", mode, slow_us, ahead_s))

    def begins(self) -> None:
        self.control(self.mode, self.slow_us)

    def ends(self) -> None:
        self.control(0)


class FullDisk(OfDisk):
    mode = FULL


class NoFiles(OfDisk):
    mode = NO_FILES


class ReadOnly(OfDisk):
    mode = READ_ONLY


class DiskErrors(OfDisk):
    mode = ERRORS


class SlowDisk(OfDisk):
    mode, slow_us = SLOW, SLOW_US


class HangingDisk(OfDisk):
    """For as long as the process lives."""

    mode = HANGS

    def ends(self) -> None: ...


class FullForGood(OfDisk):
    mode = FULL

    def ends(self) -> None: ...


class JumpingClock(OfDisk):
    """Forward, back, and back again."""

    def after(self, step: int) -> None:
        if self.job.at <= step < self.job.until:
            self.control(0, 0, self.random.choice((A_DAY_S, -A_DAY_S, 3_600, -3_600, 1, -1, 0)))


class Removed(Fault):
    """The directory of the rank."""

    deletes = True

    def begins(self) -> None:
        if (directory := self.directory()) is not None:
            shutil.rmtree(directory, ignore_errors=True)


class Replaced(Fault):
    """There is a file in place of the directory, for a while."""

    def begins(self) -> None:
        self.place = self.directory()
        if self.place is not None:
            self.place.rename(self.place.with_name("aside"))
            self.place.write_text("a file")

    def ends(self) -> None:
        if self.place is not None:
            self.place.unlink()
            self.place.with_name("aside").rename(self.place)


# --- Of what the system gives a process.


class NoDescriptors(Fault):
    def begins(self) -> None:
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, self.limits[1]), self.limits[1]))
        self.held: list[int] = []
        with suppress(OSError):
            while True:
                self.held.append(os.open(os.devnull, os.O_RDONLY))

    def ends(self) -> None:
        for descriptor in self.held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)


class NoMemory(Fault):
    """Little address space is left: no stack of another thread has room."""

    left = 6 << 20
    frameworks = ("torch",)
    worlds = (1,)

    def begins(self) -> None:
        self.limits = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + self.left, self.limits[1]))

    def ends(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self.limits)


class NoThreads(NoMemory):
    """From the beginning: the monitor never gets a thread."""

    compiles = False

    def armed(self) -> None:
        super().begins()

    def begins(self) -> None: ...


# --- Of processes.


class Forks(Fault):
    """Processes that are forked use the model, and end in different ways."""

    frameworks = ("torch",)

    def after(self, step: int) -> None:
        if not self.job.at <= step < self.job.until or self.random.random() < 0.5:
            return
        child = os.fork()
        if child == 0:
            self.training.forward_only()
            if self.random.random() < 0.5:
                os._exit(0)
            os.kill(os.getpid(), self.random.choice((signal.SIGKILL, signal.SIGTERM)))
            sys.exit(0)
        os.waitpid(child, 0)


class Spawns(Fault):
    """Other programs are started."""

    def begins(self) -> None:
        subprocess.run([sys.executable, "-c", "print()"], check=True, stdout=subprocess.DEVNULL)


class Exits(Fault):
    ends_with = (3,)
    of_training = True

    def begins(self) -> None:
        os._exit(3)


class Killed(Fault):
    """By itself, in the middle of the step."""

    ends_with = (-signal.SIGKILL,)
    of_training = True

    def begins(self) -> None:
        if self.job.compiled:  # in which nothing can be placed afterwards
            os.kill(os.getpid(), signal.SIGKILL)
        self.training.in_forward(lambda: os.kill(os.getpid(), signal.SIGKILL))


class Terminated(Killed):
    ends_with = (-signal.SIGTERM,)

    def begins(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class Interrupted(Killed):
    ends_with = (-signal.SIGINT, -signal.SIGTERM, 1, 130)  # MindSpore makes a SIGTERM of it

    def begins(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


class Signals(Fault):
    """The loop handles signals that arrive all the time."""

    def begins(self) -> None:
        self.seen = 0
        signal.signal(signal.SIGALRM, self._handled)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.003)

    def _handled(self, *_: Any) -> None:
        self.seen += 1

    def ends(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not self.seen:
            raise RuntimeError("no signal was handled")


class Stopped(Fault):
    """The whole process is stopped for a while."""

    def begins(self) -> None:
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)


# --- Of training.


class Raises(Fault):
    """In a phase of some steps. The loop catches the errors and continues."""

    of_training = True
    frameworks = ("torch",)  # MindSpore's own training does not survive an error in forward
    worlds = (1,)

    def _raise(self) -> None:
        raise PlannedError("a planned error")

    def within(self, call: Callable[[], None] | None) -> None:
        self.training.in_forward(call)

    def begins(self) -> None:
        self.within(self._raise)

    def ends(self) -> None:
        self.within(None)


class RaisesInBackward(Raises):
    def within(self, call: Callable[[], None] | None) -> None:
        self.training.in_backward(call)


class EndsByError(Fault):
    of_training = True
    ends_with = (4,)

    def begins(self) -> None:
        raise StopError(4)


FAULTS: dict[str, type[Fault]] = {
    "none": Fault,
    "disk full": FullDisk,
    "disk full for good": FullForGood,
    "no inodes": NoFiles,
    "read-only": ReadOnly,
    "errors of the disk": DiskErrors,
    "slow disk": SlowDisk,
    "hanging disk": HangingDisk,
    "clock jumps": JumpingClock,
    "directory removed": Removed,
    "directory replaced": Replaced,
    "no descriptors": NoDescriptors,
    "no memory": NoMemory,
    "no threads": NoThreads,
    "forks": Forks,
    "spawns": Spawns,
    "exits": Exits,
    "killed": Killed,
    "terminated": Terminated,
    "interrupted": Interrupted,
    "signals": Signals,
    "stopped": Stopped,
    "raises in forward": Raises,
    "raises in backward": RaisesInBackward,
    "ends by an error": EndsByError,
}
