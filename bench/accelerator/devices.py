"""The device that a benchmark runs on, and how long its work takes there."""

from __future__ import annotations

import argparse
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from stepping import rotated

AHEAD = 256 << 20
"""Bytes copied before each measurement, as often as it takes the host to queue what is measured: it is queued before its turn
comes, so that its time is the device's alone; and none of it is left in a cache."""

MARGIN = 1.5


def add_arguments(parser: argparse.ArgumentParser, quick: str) -> None:
    parser.add_argument("--device", help="cpu shows that the benchmark runs (the accelerator)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--quick", action="store_true", help=quick)


def device_of(options: argparse.Namespace) -> torch.device:
    """The device that was asked for, or the accelerator; without one the program ends."""
    if options.device is not None:
        return torch.device(options.device)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        sys.exit("There is no accelerator that torch can use here. `--device cpu --quick` shows that the benchmark runs.")
    return device


@contextmanager
def until_stopped() -> Iterator[None]:
    """A context that SIGINT and SIGTERM end, so that what was measured until then is printed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print("Stopped: what was measured until now follows.", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)


def named(device: torch.device) -> dict[str, Any]:
    """What figures depend on."""
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else platform.machine()
    return {"device": str(device), "name": name, "torch": torch.__version__, "triton": version_of_triton()}


def version_of_triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


class Clock:
    """Times calls on one device, by its own events; on the host, by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_host = device.type == "cpu"
        self._ahead = None if on_host else torch.empty(AHEAD, dtype=torch.uint8, device=device)
        self._copy = 0.0 if on_host else min(self.times(self._copy_ahead)[0] for _ in range(5))

    def _copy_ahead(self) -> None:
        assert self._ahead is not None
        self._ahead[: AHEAD // 2].copy_(self._ahead[AHEAD // 2 :])

    def times(self, call: Callable[[], object], queued: float = 0.0) -> tuple[float, float]:
        """Seconds of the device and of the host.

        Args:
            queued: Seconds that the host is expected to take.
        """
        if self._ahead is None:
            begun = time.perf_counter()
            call()
            took = time.perf_counter() - begun
            return took, took
        first, last = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        self._copy_ahead()
        for _ in range(ceil(MARGIN * queued / self._copy) if queued else 0):
            self._copy_ahead()
        first.record()
        begun = time.perf_counter()
        call()
        took = time.perf_counter() - begun
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3, took

    def laps(self, call: Callable[[], object], count: int) -> list[float]:
        """Seconds of each of ``count`` calls in a row, from the end of one to the end of the next. The host does not wait."""
        if self._ahead is None:
            return [self.times(call)[0] for _ in range(count)]
        ends = [torch.Event(self._device, enable_timing=True) for _ in range(count + 1)]
        ends[0].record()
        for end in ends[1:]:
            call()
            end.record()
        ends[-1].synchronize()
        return [one.elapsed_time(other) / 1e3 for one, other in pairwise(ends)]

    def medians(self, ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
        """Seconds of the device and of the host, by way: each once a round, in an order that changes, after two to warm up."""
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        queued = dict.fromkeys(ways, 0.0)
        for number in range(-2, rounds):
            for name in rotated(list(ways), number):
                took[name].append(self.times(ways[name], queued[name]))
                if number < 0:
                    queued[name] = took[name].pop()[1]
        return {name: (median(one[0] for one in each), median(one[1] for one in each)) for name, each in took.items()}


def sizes_between(least: int, most: int) -> Sequence[int]:
    """Bytes, four times as many each."""
    sizes = [least]
    while sizes[-1] * 4 <= most:
        sizes.append(sizes[-1] * 4)
    return sizes
