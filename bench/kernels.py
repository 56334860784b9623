"""How long six statistics of a tensor take, as multiples of one ``sum`` over the same tensor, and how right they are.

    python bench/kernels.py

Five ways stand side by side: this project's kernel; the same with check sums; the same without native code, as on machines
where it was not built; torch operators on the whole tensor; these with a cast to float64 for mean and norm, as tools do that
care for accuracy. One thread. In each round every way runs once, right after a ``sum``, in an order that changes; ratios of CPU
time are reported, as medians over the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from stepping import rotated
from tables import Progress, aligned, save
from torch import Tensor

from monitor.stats.ops import derive
from monitor.stats.partials import COLUMNS, Partials
from monitor.stats.torch.host_kernel import TorchHostKernel

EPS = 1e-8
WIDTH = 4096
ROWS = 2048
SMALL = 1_000
CALLS = 200
MILLION = 1_000_000
MAGNITUDES = ("1e-30", "1e-20", "1e-10", "1", "1e10", "1e20", "1e30")
KERNEL = TorchHostKernel(eps=EPS)
CHECKING = TorchHostKernel(eps=EPS, check_sums=True)
PORTABLE = TorchHostKernel(eps=EPS, with_native=False)
PAGE = np.zeros((1, len(COLUMNS)))

Way = Callable[[Tensor], object]


def monitored(x: Tensor) -> object:
    """All partials, into a row."""
    return KERNEL.reduce_into(x, PAGE, 0)


def checking(x: Tensor) -> object:
    """The same, and sums of the words."""
    return CHECKING.reduce_into(x, PAGE, 0)


def portable(x: Tensor) -> object:
    return PORTABLE.reduce_into(x, PAGE, 0)


def whole_tensor(x: Tensor) -> Sequence[Tensor]:
    """min, max, mean, norm, zeros and nans, a torch operator after the other."""
    return x.min(), x.max(), x.mean(), x.norm(), (x.abs() < EPS).sum() / x.numel(), x.isnan().sum()


def with_casts(x: Tensor) -> Sequence[Tensor]:
    """The same, mean and norm accurate."""
    mean, norm = x.to(torch.float64).mean(), x.to(torch.float64).norm()
    return x.min(), x.max(), mean, norm, (x.abs() < EPS).sum() / x.numel(), x.isnan().sum()


WAYS: dict[str, Way] = {
    "monitor": monitored,
    "check sums": checking,
    "portable": portable,
    "torch": whole_tensor,
    "torch with casts": with_casts,
}


@dataclass(frozen=True, slots=True)
class Speed:
    """Multiples of one ``sum``, medians, by the way of doing it; and how many microseconds that ``sum`` took."""

    tensor: str
    unit: float
    multiples: dict[str, float]


@dataclass(frozen=True, slots=True)
class Errors:
    """Distance from float64: of the norm, relative; of the mean, in units of the mean magnitude."""

    tensor: str
    norm: dict[str, float]
    mean: dict[str, float]


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    progress = Progress()
    speeds = [speed_of(name, x, options.rounds, progress) for name, x in large_tensors(options.rows)]
    speeds.append(speed_of(f"{SMALL} elements", torch.randn(SMALL), options.rounds, progress, calls=CALLS))
    errors = [errors_of(name, x) for name, x in delicate_tensors(MILLION)]
    progress.end()
    if KERNEL.plain is None:
        print("The native kernel is not there: both ways of the monitor are the portable one.\n")
    print(f"torch {torch.__version__}, one thread. Six ops over {options.rows * WIDTH / 1e6:.1f} M elements, over one sum:\n")
    print(speed_table(speeds))
    print(f"\nErrors against float64, of {MILLION} elements of float32:\n")
    print(error_table(errors))
    found = {"speeds": [asdict(speed) for speed in speeds], "errors": [asdict(error) for error in errors]}
    save(options.json, {"torch": torch.__version__, **found})


def large_tensors(rows: int) -> Iterator[tuple[str, Tensor]]:
    """What training is made of, one at a time."""
    normal = torch.randn(rows, WIDTH)
    yield "normal float32", normal
    yield "ReLU output", normal.relu()
    yield "sparse gradient, 5 % of rows", normal * (torch.rand(rows, 1) < 0.05)
    yield "bfloat16", normal.bfloat16()
    yield "float16", normal.half()
    yield "float64", normal.double()
    yield "transposed", normal.t()


def delicate_tensors(elements: int) -> Iterator[tuple[str, Tensor]]:
    """Where float32 loses digits, overflows or underflows."""
    normal = torch.randn(elements)
    for magnitude in MAGNITUDES:
        yield f"normal × {magnitude}", normal * float(magnitude)
    yield "equal elements, 0.1", torch.full((elements,), 0.1)
    yield "mixed scales, 1e-30 to 1e30", normal * torch.pow(10.0, torch.empty(elements).uniform_(-30, 30))


def speed_of(name: str, x: Tensor, rounds: int, progress: Progress, calls: int = 1) -> Speed:
    """Time every way on ``x``, ``calls`` calls at a time."""
    units: list[float] = []
    multiples: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(-1, rounds):
        progress.show(name, f"round {number + 1} of {rounds}")
        for way in rotated(list(WAYS), number):
            unit, took = seconds(torch.sum, x, calls), seconds(WAYS[way], x, calls)
            if number >= 0:  # the round before has warmed up caches and buffers
                units.append(unit)
                multiples[way].append(took / unit)
    return Speed(name, 1e6 * median(units) / calls, {way: median(values) for way, values in multiples.items()})


def seconds(way: Way, x: Tensor, calls: int) -> float:
    """CPU time of that many calls."""
    started = time.process_time()
    for _ in range(calls):
        way(x)
    return time.process_time() - started


def errors_of(name: str, x: Tensor) -> Errors:
    exact = x.double().numpy()
    norm, mean, scale = np.linalg.norm(exact), exact.mean(), np.abs(exact).mean()
    partials = Partials.from_rows(np.array([KERNEL.reduce(x)]))
    norms = {"monitor": derive("norm", partials)[0][0], "torch": x.norm().item()}
    means = {"monitor": derive("mean", partials)[0][0], "torch": x.mean().item()}
    return Errors(
        name,
        {way: float(abs(value - norm) / norm) for way, value in norms.items()},
        {way: float(abs(value - mean) / scale) for way, value in means.items()},
    )


def speed_table(speeds: Sequence[Speed]) -> str:
    header = ("tensor", "sum, µs", *(f"{way} ×" for way in WAYS), "monitor, µs")
    rows = []
    for speed in speeds:
        multiples = [f"{multiple:.1f}" for multiple in speed.multiples.values()]
        rows.append([speed.tensor, f"{speed.unit:.1f}", *multiples, f"{speed.unit * speed.multiples['monitor']:.1f}"])
    return aligned(header, rows)


def error_table(errors: Sequence[Errors]) -> str:
    header = ("tensor", "monitor: norm", "mean", "torch: norm", "mean")
    return aligned(header, [[each.tensor, *(f"{value:.1e}" for value in in_order(each))] for each in errors])


def in_order(errors: Errors) -> list[float]:
    return [kind[way] for way in ("monitor", "torch") for kind in (errors.norm, errors.mean)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="counted after one to warm up (15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--quick", action="store_true", help="see that it runs: tensors of 0.2 M elements, 2 rounds")
    options = parser.parse_args()
    options.rows = ROWS
    if options.quick:
        options.rows, options.rounds = 48, 2
    return options


if __name__ == "__main__":
    main()
