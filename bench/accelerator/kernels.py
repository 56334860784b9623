"""How fast the kernels read, as a share of what a copy on the device moves, over sizes and dtypes.

    python bench/accelerator/kernels.py

A copy reads each byte and writes it; a reduction only reads. The share is of the bytes that the copy moves in a second, both
ways, which is what memory gives: the stricter of the two bounds that one could take.

Beside the monitor's kernel stand the portable one, `torch._foreach_norm`, which is one statistic, and five operators of torch
one after the other, which are what users write. Lists have the sizes of a transformer's parameters. Times are the device's, by
events, medians over rounds in which every way has its turn; the last column is what the training thread takes to start the
monitor's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import torch
from devices import Clock, add_arguments, device_of, named, sizes_between, until_stopped
from tables import Progress, aligned, save
from torch import Tensor

from monitor.stats.partials import COLUMNS
from monitor.stats.torch.device_kernel import TorchDeviceKernel
from monitor.stats.torch.dispatch import DeviceKernels

EPS: Final = 1e-8
DTYPES: Final = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn)
MEGABYTE: Final = 1 << 20
SINGLE, LIST = "one tensor", "a list"

KERNELS: Final = DeviceKernels()


@dataclass(frozen=True, slots=True)
class Speed:
    """Of reading ``bytes`` of ``dtype``, as one tensor or as a list.

    Attributes:
        copy: Bytes a second that a copy of as much moves, both ways.
        seconds: The device's, by way.
        host: Seconds that the host takes to start them, by way.
    """

    what: str
    dtype: str
    bytes: int
    copy: float
    seconds: dict[str, float]
    host: dict[str, float]


def main() -> int:
    options = parse_arguments()
    device = device_of(options)
    progress, clock = Progress(), Clock(device)
    torch.manual_seed(0)
    speeds = []
    with until_stopped():
        for dtype in options.dtypes:
            for size in options.sizes:
                progress.show(f"{dtype}, {size / MEGABYTE:g} MB")
                speeds.append(of_one(size, dtype, device, clock, options.rounds))
            for size in options.lists:
                progress.show(f"{dtype}, a list of {size / MEGABYTE:g} MB")
                speeds.append(of_list(size, dtype, device, clock, options.rounds))
    progress.end()
    facts = named(device) | {"fused": KERNELS.list(EPS, device) is not None}
    print(", ".join(f"{name} {value}" for name, value in facts.items()) + f"; {options.rounds} rounds\n")
    print(table(speeds))
    save(options.json, facts | {"speeds": [asdict(speed) for speed in speeds]})
    return 0


def filled(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(elements, device=device).to(dtype)


def of_one(size: int, dtype: torch.dtype, device: torch.device, clock: Clock, rounds: int) -> Speed:
    x = filled(size // dtype.itemsize, dtype, device)
    into, page = torch.empty_like(x), rows(1, device)
    fused, portable = KERNELS.kernel(EPS, device), TorchDeviceKernel(EPS)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: into.copy_(x),
        "monitor": lambda: fused.reduce_into(x, page, 0),
        "portable": lambda: portable.reduce_into(x, page, 0),
    }
    return speed(SINGLE, x, size, ways | of_torch([x]), clock, rounds)


def of_list(size: int, dtype: torch.dtype, device: torch.device, clock: Clock, rounds: int) -> Speed:
    tensors = [filled(elements, dtype, device) for elements in parameters(size // dtype.itemsize)]
    into, page = [torch.empty_like(x) for x in tensors], rows(len(tensors), device)
    together, alone = KERNELS.list(EPS, device), KERNELS.kernel(EPS, device)
    numbers = list(range(len(tensors)))

    def reduce() -> None:
        left = numbers if together is None else together.reduce_into(tensors, [page] * len(tensors), numbers)
        for row in left:
            alone.reduce_into(tensors[row], page, row)

    ways: dict[str, Callable[[], object]] = {"copy": lambda: torch._foreach_copy_(into, tensors), "monitor": reduce}
    return speed(LIST, tensors[0], sum(x.nbytes for x in tensors), ways | of_torch(tensors), clock, rounds)


def of_torch(tensors: list[Tensor]) -> dict[str, Callable[[], object]]:
    """What torch has; not of float8, which it does not reduce."""
    if tensors[0].dtype.itemsize == 1:
        return {}
    return {"_foreach_norm": lambda: torch._foreach_norm(tensors), "five operators": lambda: [five(x) for x in tensors]}


def five(x: Tensor) -> Sequence[Tensor]:
    return x.min(), x.max(), x.float().mean(), x.float().norm(), x.isnan().sum()


def parameters(elements: int) -> list[int]:
    """Sizes of tensors, as a transformer's are among each other: matrices of three sizes and many vectors."""
    width = max(8, int((elements / 12.0) ** 0.5) // 8 * 8)
    sizes: list[int] = []
    while sum(sizes) < elements:
        sizes += [width, 3 * width * width // 4, width, width * width // 4, width, width * width, width * width]
        if width > 2048:
            width = 2048
    return sizes


def rows(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, len(COLUMNS), dtype=torch.float64, device=device)


def speed(what: str, x: Tensor, size: int, ways: dict[str, Callable[[], object]], clock: Clock, rounds: int) -> Speed:
    took = clock.medians(ways, rounds)
    device, host = ({way: each[which] for way, each in took.items()} for which in (0, 1))
    return Speed(what, str(x.dtype).removeprefix("torch."), size, 2 * size / device.pop("copy"), device, host)


def table(speeds: Sequence[Speed]) -> str:
    ways = list(dict.fromkeys(way for each in speeds for way in each.seconds))
    header = ["what", "dtype", "MB", "copy, GB/s both ways", "monitor, GB/s", "share"]
    header += [*(f"{way}, µs" for way in ways), "host, µs"]
    lines = []
    for each in speeds:
        read = each.bytes / each.seconds["monitor"]
        times = [f"{each.seconds[way] * 1e6:.1f}" if way in each.seconds else "" for way in ways]
        shown = [f"{each.bytes / MEGABYTE:.2f}", f"{each.copy / 1e9:.0f}", f"{read / 1e9:.0f}", f"{read / each.copy:.0%}"]
        lines.append([each.what, each.dtype, *shown, *times, f"{each.host['monitor'] * 1e6:.1f}"])
    return aligned(header, lines, names=2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="counted after two to warm up (50)")
    add_arguments(parser, "see that it runs: two sizes, 3 rounds")
    options = parser.parse_args()
    options.dtypes, options.sizes = DTYPES, sizes_between(4096, 1024 * MEGABYTE)
    options.lists = [64 * MEGABYTE, 512 * MEGABYTE, 2048 * MEGABYTE]
    if options.quick:
        options.dtypes, options.sizes, options.lists, options.rounds = DTYPES[:2], (4096, 65536), [65536], 3
    return options


if __name__ == "__main__":
    sys.exit(main())
