"""One rank of a job that shows metrics of models that are cut over ranks; ``metrics_of_shards.py BASE CASE…``.

Each case is trained beside the same model in one piece, whose numbers go to ``BASE/rank{i}.json`` with what the monitor has
warned of. The configuration is ``BASE/template.yaml``. Cases run in one process: to import DeepSpeed takes longer than they do.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}

import torch
import torch.distributed as dist
from by_hand import ByHand
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from monitor.failures import LOGGER
from monitor.pytorch.training import TrainingMetrics

STEPS, MICRO_STEPS, ROWS = 3, 2, 4
OVERFLOWS = 1
SCALED = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
CPU = torch.device("cpu")


class Ways(NamedTuple):
    """How a framework trains a model.

    Attributes:
        model: That training metrics are given.
        optimizer: Likewise.
        backward: Of a micro-batch, and whether it is the step's last.
        step: The optimizer's; tells the norm of the whole gradient.
    """

    model: nn.Module
    optimizer: Any
    backward: Callable[[Tensor, bool], Tensor]
    step: Callable[[], Any]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 3))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean() / MICRO_STEPS


def torchs(model: nn.Module, late: Callable[[bool], Any], norm: Callable[[], Any]) -> Ways:
    """The ways of what is trained with an optimizer of torch."""
    optimizer = adam(model)

    def backward(x: Tensor, last: bool) -> Tensor:
        with late(last):
            loss = loss_of(model, x)
            loss.backward()
        return loss

    def step() -> Any:
        found = norm()
        optimizer.step()
        optimizer.zero_grad()
        return found

    return Ways(model, optimizer, backward, step)


def in_one_piece() -> tuple[Ways, dict[str, list[Any]]]:
    """And what numpy makes of it."""
    plain = network()
    model = nn.parallel.DistributedDataParallel(plain)
    ways = torchs(model, lambda last: nullcontext() if last else model.no_sync(), lambda: None)
    return ways, ByHand(plain, ways.optimizer).told


def early() -> Ways:
    """DistributedDataParallel that aggregates after every micro-batch."""
    return torchs(nn.parallel.DistributedDataParallel(network()), lambda _: nullcontext(), lambda: None)


def fsdp1() -> Ways:
    model = FullyShardedDataParallel(network(), device_id=CPU, use_orig_params=True)
    return torchs(model, lambda last: nullcontext() if last else model.no_sync(), lambda: model.clip_grad_norm_(1e9))


def fsdp2() -> Ways:
    model = fully_shard(network(), mesh=init_device_mesh("cpu", (2,)))

    def late(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    return torchs(model, late, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor())


def zero(stage: int, *, own: bool = True, scaled: bool = False) -> Ways:
    """DeepSpeed.

    Args:
        own: Whether metrics are given the optimizer that the engine has made, and not the engine in its place.
        scaled: Whether it computes in float16, and one loss is not finite.
    """
    import deepspeed

    model = network().half() if scaled else network()
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_clipping": 1e9,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        **(SCALED if scaled else {}),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=settings, dist_init_required=False)

    def backward(x: Tensor, last: bool) -> Tensor:
        loss = loss_of(engine, x.half() if scaled else x)
        poisoned = scaled and last and engine.global_steps == OVERFLOWS
        engine.backward(loss * MICRO_STEPS * (float("inf") if poisoned else 1.0))
        if not last:
            engine.step()
        return loss

    def step() -> Any:
        engine.step()
        return engine.get_global_grad_norm()

    return Ways(engine, engine.optimizer if own else engine, backward, step)


CASES: dict[str, Callable[[], Ways]] = {
    "early": early,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "zero0": lambda: zero(0),
    "zero1": lambda: zero(1),
    "zero2": lambda: zero(2, own=False),
    "zero3": lambda: zero(3),
    "zero1-fp16": lambda: zero(1, scaled=True),
}


def train(base: Path, name: str, told_norm: bool) -> dict[str, Any]:
    """Training, in one piece and as the case has it."""
    base.mkdir()
    (base / "train.yaml").write_text((base.parent / "template.yaml").read_text().format(base=base))
    whole, told = in_one_piece()
    cut = CASES[name]()
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    norms, losses = [], []
    options = {"grad_acc_steps": MICRO_STEPS, "model_flops": "measure"}
    with said() as lines, TrainingMetrics(base / "train.yaml", cut.model, cut.optimizer, **options) as metrics:
        for number in range(STEPS):
            batches = [torch.randn(ROWS, 7, generator=generator) for _ in range(MICRO_STEPS)]
            skipped = name.endswith("fp16") and number == OVERFLOWS
            with metrics.step(batch_size=ROWS * MICRO_STEPS * dist.get_world_size()) as step:
                for micro_step, x in enumerate(batches):
                    step.local_loss(cut.backward(x, micro_step == MICRO_STEPS - 1))
                norm = cut.step()
                if told_norm:
                    step.grad_norm = norm
            norms.append(None if norm is None else float(norm))
            if not skipped:
                losses.append([whole.backward(x, last).item() for x, last in zip(batches, (False, True), strict=True)])
                whole.step()
    return told | {"reported": norms, "local_losses": losses, "said": lines}


@contextmanager
def said() -> Iterator[list[str]]:
    """What the monitor warns of meanwhile."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    yield lines
    LOGGER.removeHandler(handler)


def main(base: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    if any("zero" in name for name in names):
        import deepspeed_uncompiled  # noqa: F401
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True  # it is slow, and right
    told = {}
    for name in names:
        case, _, how = name.partition("+")
        told[name] = train(base / f"{name}-{dist.get_rank()}", case, how == "told")
    (base / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


main(Path(sys.argv[1]), sys.argv[2:])
