"""The device that a benchmark runs on, and how long its work takes there."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from stepping import rotated

AHEAD = 256 << 20
"""Bytes copied before each measurement: what is measured is then queued before its turn comes, so that its time is the device's
alone; and none of it is left in a cache."""


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

    def seconds(self, call: Callable[[], object]) -> float:
        if self._ahead is None:
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        begun, ended = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        self._ahead[: AHEAD // 2].copy_(self._ahead[AHEAD // 2 :])
        begun.record()
        call()
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3

    def medians(self, ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        """Seconds by way: each once a round, in an order that changes, after two rounds to warm up."""
        took: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(-2, rounds):
            for name in rotated(list(ways), number):
                seconds = self.seconds(ways[name])
                if number >= 0:
                    took[name].append(seconds)
        return {name: median(each) for name, each in took.items()}


def sizes_between(least: int, most: int) -> Sequence[int]:
    """Bytes, four times as many each."""
    sizes = [least]
    while sizes[-1] * 4 <= most:
        sizes.append(sizes[-1] * 4)
    return sizes
