"""Small trainings, healthy ones and ones whose loss a planted fault makes jump: a GPT on real text and an MLP."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forks import run_all, said_in
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from monitor.pytorch import TrainerMon

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools" / "demo"))
from gpt import GPT, GPTConfig
from text import standard_library

STEPS, PARTS = 72, 2
LENGTH, FEATURES, CLASSES, WORDS = 32, 24, 10, 256

RECORDED: Mapping[str, Any] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "monitor_mbs_grad": True,
    "param_distribution": True,
    "mv_distribution": True,
    "update_ratio": True,
    "replica_check": True,
    "format": "parquet",
    "ops": ["norm", "absmax", "nans"],
}
"""What tells all causes apart."""

Rates = Callable[[int], float]
"""The factor of the learning rate in a step."""


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        cause: What makes its loss jump, as the report calls it; empty if nothing does.
        at: The step of the fault.
        where: The rank, and the end of a name, that the report should name, as far as there is one.
        rate: The learning rate, which ``rates`` multiplies in each step.
        samples: Of a micro-batch, in a step.
        plant: Changes the training.
        fields: The configuration.
        stops: After this step the job ends, and another one continues from its checkpoint. 0: it does not.
    """

    name: str
    model: str
    ranks: int
    seed: int
    cause: str = ""
    rate: float = 6e-3
    rates: Rates = lambda _step: 1.0
    samples: Callable[[int], int] = lambda _step: 8
    clips: float = 0.0
    plant: Callable[[Job], object] = lambda _job: None
    fields: Mapping[str, Any] = field(default_factory=lambda: RECORDED)
    stops: int = 0
    at: int = 0
    where: tuple[int | None, str] = (None, "")

    @property
    def directory(self) -> str:
        return self.name.replace(" ", "-")


class Job:
    """One rank of a training, and the places where a fault can be planted.

    Attributes:
        batch: The inputs and targets of a step and a micro-batch.
        before: Called before each step.
        factor: Multiplies the learning rate of a step.
    """

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank, self.step = case, rank, 0
        torch.manual_seed(case.seed)
        self.model: Any = _gpt() if case.model == "gpt" else _mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=case.rate, betas=(0.9, 0.99))
        self.batch: Callable[[int, int], tuple[Tensor, Tensor]] = self.usual
        self.before: list[Callable[[], object]] = []
        self.factor: Callable[[int], float] = lambda _step: 1.0
        case.plant(self)

    def drawn(self, step: int, part: int) -> torch.Generator:
        return torch.Generator().manual_seed(hash((self.case.seed, step, part, self.rank)) % 2**31)

    def usual(self, step: int, part: int) -> tuple[Tensor, Tensor]:
        random = self.drawn(step, part)
        samples = self.case.samples(step)
        if self.case.model == "gpt":
            text = _text()
            starts = torch.randint(len(text) - LENGTH, (samples, 1), generator=random)
            window = text[starts + torch.arange(LENGTH + 1)]
            return window[:, :-1], window[:, 1:]
        x = torch.randn(samples * 4, FEATURES, generator=random)
        return x, (x @ _teacher()).argmax(1)

    def named(self, step: int, part: int) -> str:
        return f"shard-{self.rank}:{step}.{part}"

    def micro_batch(self, model: Any, step: int, part: int) -> Tensor:
        x, y = self.batch(step, part)
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        (loss / PARTS).backward()
        return loss.detach()


@cache
def _text() -> Tensor:
    return standard_library(400_000)


@cache
def _teacher() -> Tensor:
    return torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(1))


def _gpt() -> nn.Module:
    return GPT(GPTConfig(context=LENGTH, layers=2, heads=2, width=32))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, CLASSES)
    )


def record(case: Case, directory: Path) -> str:
    """Run all ranks. What they recorded is below ``directory / "ranks"``.

    Returns:
        What went wrong, or nothing.
    """
    directory.mkdir(parents=True)
    parts = ((0, case.stops), (case.stops, STEPS)) if case.stops else ((0, STEPS),)
    failed = ""
    for steps in parts:
        (directory / "meet").unlink(missing_ok=True)
        ranks = range(case.ranks)
        failed += run_all([get_context("fork").Process(target=train, args=(case, rank, directory, *steps)) for rank in ranks])
    return failed


def train(case: Case, rank: int, directory: Path, first: int, last: int) -> None:
    """Train as one rank, recorded. A job that ends before its last step leaves a checkpoint to the next one."""
    said_in(directory / f"rank{rank}.log")
    os.environ["MONITOR_OUTPUT_DIR"] = str(directory / "ranks")
    torch.set_num_threads(1)
    if case.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory / 'meet'}", rank=rank, world_size=case.ranks)
    job, checkpoint = Job(case, rank), directory / f"checkpoint{rank}.pt"
    if first:
        model, optimizer = torch.load(checkpoint)
        job.model.load_state_dict(model)
        job.optimizer.load_state_dict(optimizer)
    _steps(job, DistributedDataParallel(job.model) if case.ranks > 1 else job.model, first, last)
    torch.save((job.model.state_dict(), job.optimizer.state_dict()), checkpoint)
    if case.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _steps(job: Job, model: Any, first: int, last: int) -> None:
    case = job.case
    fields = {**case.fields, **({"append_output": "auto"} if case.stops else {})}
    with TrainerMon(fields, params_have_main_grad=False) as monitor:
        group = {"dp_group": dist.group.WORLD} if case.ranks > 1 else {}
        monitor.set_monitor(model, grad_acc_steps=PARTS, optimizer=job.optimizer, start_iteration=first, **group)
        for step in range(first, last):
            job.step = step
            for group_of in job.optimizer.param_groups:
                group_of["lr"] = case.rate * case.rates(step) * job.factor(step)
            for event in job.before:
                event()
            for part in range(PARTS):
                with _reducing(model, part):
                    loss = job.micro_batch(model, step, part)
                monitor.log(loss=loss, batch=job.named(step, part))
            if case.clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clips)
            job.optimizer.step()
            job.optimizer.zero_grad()


def _reducing(model: Any, part: int) -> AbstractContextManager[Any]:
    return model.no_sync() if isinstance(model, DistributedDataParallel) and part < PARTS - 1 else nullcontext()


# --- Faults.


def noise(job: Job, step: int, part: int) -> tuple[Tensor, Tensor]:
    """A batch that has nothing to learn: random bytes, or features of another scale with random targets."""
    x, y = job.usual(step, part)
    random = job.drawn(step, part)
    if job.case.model == "gpt":
        return torch.randint(WORDS, x.shape, generator=random), torch.randint(WORDS, y.shape, generator=random)
    return 10 * x, torch.randint(CLASSES, y.shape, generator=random)


def bad_batch(parts: tuple[int, ...], ranks: tuple[int, ...], job: Job) -> None:
    def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
        is_bad = step == job.case.at and part in parts and job.rank in ranks
        return noise(job, step, part) if is_bad else job.usual(step, part)

    job.batch = batch


def bad_data(rank: int, job: Job) -> None:
    """All batches of a rank from a step on."""

    def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
        is_bad = step >= job.case.at and job.rank == rank
        return noise(job, step, part) if is_bad else job.usual(step, part)

    job.batch = batch


def rate_jumps(factor: float, steps: int, job: Job) -> None:
    job.factor = lambda step: factor if job.case.at <= step < job.case.at + steps else 1.0


def _at(job: Job, event: Callable[[], object], rank: int | None = None) -> None:
    def happens() -> None:
        if job.step == job.case.at and rank in (None, job.rank):
            with torch.no_grad():
                event()

    job.before.append(happens)


def weight_changes(name: str, factor: float, job: Job) -> None:
    _at(job, lambda: job.model.get_parameter(name).mul_(factor))


def weight_is_shuffled(name: str, job: Job) -> None:
    """The elements of a weight change places: its norm stays."""

    def event() -> None:
        weight = job.model.get_parameter(name)
        order = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(job.case.seed))
        weight.copy_(weight.flatten()[order].view_as(weight) * 3)

    _at(job, event)


def moments_change(names: tuple[str, ...], factor: float, job: Job) -> None:
    def event() -> None:
        for state in job.optimizer.state.values():
            for name in names:
                state[name].mul_(factor)

    _at(job, event)


def bit_flips(name: str, rank: int, job: Job) -> None:
    """The highest bit of the exponent, of some elements of a weight on one rank. They stay small enough to train on."""

    def event() -> None:
        weight = job.model.get_parameter(name).view(-1)
        some = torch.arange(0, len(weight), len(weight) // 40)
        flipped = (weight[some].view(torch.int32) ^ (1 << 30)).view(torch.float32)
        weight[some] = flipped.clamp(-30, 30)

    _at(job, event, rank)


def activation_flips(name: str, rank: int, job: Job) -> None:
    """Elements of what a module returns are wrong on one rank, in one step."""

    def hook(_module: nn.Module, _args: object, result: Tensor) -> Tensor | None:
        if job.step != job.case.at or job.rank != rank:
            return None
        wrong = result.clone()
        wrong.view(-1)[::37] *= 2.0**12
        return wrong

    job.model.get_submodule(name).register_forward_hook(hook)


# --- The catalogue. Of each cause, models, numbers of ranks and places vary.

Planted = tuple[str, int, Callable[[Job], object], dict[str, Any]]
"""Model, ranks, fault, and further fields of the case."""


def _batches() -> Iterator[Planted]:
    for model in ("gpt", "mlp"):
        yield model, 1, partial(bad_batch, (0,), (0,)), {"where": (0, "shard-0:{at}.0")}
        yield model, 1, partial(bad_batch, (0, 1), (0,)), {"where": (0, "shard-0:{at}.0")}
        yield model, 2, partial(bad_batch, (1,), (1,)), {"where": (1, "shard-1:{at}.1")}
        yield model, 2, partial(bad_batch, (0, 1), (0, 1)), {}


def _rates() -> Iterator[Planted]:
    for model, ranks, factor, steps in (("gpt", 1, 60.0, 40), ("gpt", 1, 100.0, 2), ("mlp", 1, 30.0, 40), ("mlp", 1, 100.0, 1)):
        yield model, ranks, partial(rate_jumps, factor, steps), {}
    for model, factor, steps in (("gpt", 50.0, 40), ("mlp", 50.0, 40), ("mlp", 100.0, 2)):
        yield model, 2, partial(rate_jumps, factor, steps), {}


def _weights() -> Iterator[Planted]:
    for model, ranks, name, factor in (
        ("gpt", 1, "norm.weight", 8.0),
        ("gpt", 1, "head.weight", 6.0),
        ("mlp", 1, "2.weight", 6.0),
        ("mlp", 1, "4.weight", -4.0),
        ("gpt", 2, "head.weight", 8.0),
        ("mlp", 2, "6.weight", 8.0),
    ):
        yield model, ranks, partial(weight_changes, name, factor), {"where": (None, name)}
    yield "mlp", 1, partial(weight_is_shuffled, "2.weight"), {"where": (None, "2.weight")}


def _moments() -> Iterator[Planted]:
    for model, ranks, names, factor in (
        ("gpt", 1, ("exp_avg_sq",), 0.0),
        ("gpt", 1, ("exp_avg",), 200.0),
        ("mlp", 1, ("exp_avg_sq",), 0.0),
        ("mlp", 1, ("exp_avg",), 100.0),
        ("gpt", 2, ("exp_avg_sq",), 0.0),
        ("mlp", 2, ("exp_avg_sq",), 1e-5),
    ):
        yield model, ranks, partial(moments_change, names, factor), {"rate": 1e-2 if model == "gpt" else 5e-3}


def _data_of_ranks() -> Iterator[Planted]:
    for model, rank in (("gpt", 0), ("gpt", 1), ("mlp", 0), ("mlp", 1), ("gpt", 1), ("mlp", 1)):
        yield model, 2, partial(bad_data, rank), {"where": (rank, f"shard-{rank}:{{at}}.0")}


def _devices() -> Iterator[Planted]:
    for rank, (model, plant, name) in enumerate(
        (
            ("gpt", bit_flips, "head.weight"),
            ("mlp", bit_flips, "2.weight"),
            ("gpt", bit_flips, "head.weight"),
            ("mlp", activation_flips, "2"),
            ("gpt", activation_flips, "norm"),
            ("mlp", bit_flips, "6.weight"),
        )
    ):
        shown = name if plant is bit_flips else f"{name}.output"
        yield model, 2, partial(plant, name, rank % 2), {"where": (rank % 2, shown)}


CAUSES: Mapping[str, Callable[[], Iterator[Planted]]] = {
    "batch": _batches,
    "learning rate": _rates,
    "weights": _weights,
    "moments": _moments,
    "rank data": _data_of_ranks,
    "device": _devices,
}


def planted(seed: int = 0) -> Iterator[Case]:
    """Forty trainings whose loss jumps."""
    for cause, each in CAUSES.items():
        for number, (model, ranks, plant, more) in enumerate(each()):
            name, at = f"{cause} {number} {model} {ranks}", 40 + (7 * number + seed) % 24
            yield Case(name, model, ranks, seed + number, cause, plant=plant, at=at, **more)


LITTLE: Mapping[str, Mapping[str, Any]] = {
    "loss": {"format": "parquet"},
    "gradients": {"format": "parquet", "ops": ["norm"], "wg_distribution": True, "monitor_mbs_grad": True},
    "weights": {"format": "csv", "ops": ["norm"], "wg_distribution": True, "param_distribution": True, "update_ratio": True},
}
"""Configurations that do not tell all causes apart."""


def little(seed: int = 0) -> Iterator[Case]:
    """Trainings whose loss jumps, and of which little is recorded: two of each cause."""
    every = list(planted(seed))
    for cause in CAUSES:
        for case in [one for one in every if one.cause == cause][2:4]:
            for what, fields in LITTLE.items():
                yield replace(case, name=f"{case.name} {what}", fields=fields)


def _warmed_up(step: int) -> float:
    return min(1.0, (step + 1) / 15)


def _cosine(step: int, period: int = STEPS) -> float:
    return 0.02 + 0.98 * (1 + math.cos(math.pi * (step % period) / period)) / 2


def _stable_then_decaying(step: int) -> float:
    return _warmed_up(step) * (1.0 if step < 54 else max(0.0, 1 - (step - 54) / 18))


def healthy(seed: int = 0) -> Iterator[Case]:
    """Twenty trainings with warm-up, restarts, schedules, and changes of the batch size."""
    kinds: dict[str, dict[str, Any]] = {
        "constant": {},
        "warm-up": {"rates": _warmed_up},
        "warm-up, cosine": {"rates": lambda step: _warmed_up(step) * _cosine(step), "rate": 1e-2, "clips": 1.0},
        "cosine with restarts": {"rates": partial(_cosine, period=24)},
        "stable, then decay": {"rates": _stable_then_decaying, "clips": 0.5},
        "larger batches": {"samples": lambda step: 4 if step < 36 else 16},
        "smaller batches": {"samples": lambda step: 16 if step < 36 else 4},
        "continued": {"stops": 36, "rates": _warmed_up},
    }
    for number, (name, more) in enumerate(kinds.items()):
        for model in ("gpt", "mlp"):
            yield Case(f"healthy {name} {model}", model, 1, seed + 100 + number, **{"rate": 4e-3, **more})
    for number, (name, model) in enumerate([("warm-up, cosine", "gpt"), ("cosine with restarts", "mlp")]):
        yield Case(f"healthy {name} {model} 2 ranks", model, 2, seed + 200 + number, **kinds[name])
    yield Case("healthy continued gpt 2 ranks", "gpt", 2, seed + 202, **kinds["continued"])
    yield Case("healthy smaller batches mlp 2 ranks", "mlp", 2, seed + 203, **kinds["smaller batches"])
