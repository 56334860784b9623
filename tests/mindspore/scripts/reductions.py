"""Two data-parallel ranks that reduce their gradients in one way after the other; ``reductions.py BASE``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn, ops
from mindspore.mint import distributed
from ranks import tell

from monitor.mindspore import TrainerMon

CONFIG: dict[str, Any] = {"wg_distribution": True, "replica_check": True, "ops": ["norm"], "ndigits": 17}
STEPS = 2
Reduce = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def in_place(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    for gradient in gradients:
        distributed.all_reduce(gradient)
    return [gradient / 2 for gradient in gradients]


def awaited(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    handles = [distributed.all_reduce(gradient, async_op=True) for gradient in gradients]
    for handle in handles:
        handle.wait()
    return [gradient / 2 for gradient in gradients]


def by_primitive(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    reduce = ops.AllReduce()
    return [reduce(gradient) / 2 for gradient in gradients]


def in_units(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    return [gradient / 3 for gradient in by_primitive(gradients)]


def then_clipped(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    return ops.clip_by_global_norm(tuple(by_primitive(gradients)), 1e9)


def clipped(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    return ops.clip_by_global_norm(tuple(gradients), 1e9)


def loss_alone(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    distributed.all_reduce(Tensor([1.0]))
    return gradients


def nothing(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    return gradients


def weights_averaged(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """As local SGD does: sums of the gradients' shapes, of other things."""
    for gradient in gradients:
        distributed.all_reduce(ops.ones_like(gradient) + 0.5 * ops.sin(gradient * 100))
    return gradients


def discarded(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    by_primitive(gradients)
    return gradients


def zeros_discarded(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """As of a batch whose elements are all masked, on the first rank."""
    return discarded([gradient * communication.get_rank() for gradient in gradients])


def squares(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    reduce = ops.AllReduce()
    for gradient in gradients:
        reduce(gradient * gradient)
    return gradients


WAYS: dict[str, Reduce | None] = {
    "in-place": in_place,
    "awaited": awaited,
    "by-primitive": by_primitive,
    "in-units": in_units,
    "then-clipped": then_clipped,
    "reducer": None,
    "micro-batches": by_primitive,
    "none": nothing,
    "clipped": clipped,
    "loss-alone": loss_alone,
    "weights-averaged": weights_averaged,
    "squares": squares,
    "discarded": discarded,
    "zeros-discarded": zeros_discarded,
}


def train(base: Path, how: str, rank: int) -> list[dict[str, float]]:
    """Of each step and parameter the sum over the micro-batches of the gradients of this rank, in float64."""
    # Of two classes: gradients of the last bias differ by a factor only.
    net = nn.SequentialCell(nn.Dense(4, 5), nn.Tanh(), nn.Dense(5, 2)).set_train()
    for seed, parameter in enumerate(net.trainable_params()):
        parameter.set_data(Tensor(np.random.default_rng(seed).normal(size=parameter.shape).astype(np.float32)))
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    reduce = WAYS[how] or nn.DistributedGradReducer(optimizer.parameters, mean=True, degree=2)
    (base / how).mkdir(exist_ok=True)
    config = base / how / f"config{rank}.json"
    config.write_text(json.dumps(CONFIG))
    os.environ["MONITOR_OUTPUT_DIR"] = str(base / how / "output")
    monitor = TrainerMon(config)
    micro_batches = 3 if how == "micro-batches" else 1
    monitor.set_monitor(net, micro_batches, optimizer, dp_group="mccl_world_group")
    losses_of = ms.value_and_grad(lambda x: ops.square(ops.softmax(net(x))).mean(), None, optimizer.parameters)
    found = []
    for step in range(STEPS):
        local, reduced = [], []
        for part in range(micro_batches):
            x = Tensor(np.random.default_rng([step, rank, part]).normal(size=(3, 4)).astype(np.float32))
            _, gradients = losses_of(x)
            local.append([gradient.asnumpy().astype(np.float64) for gradient in gradients])
            reduced.append(reduce(gradients))
        sums = [sum(each) for each in zip(*local, strict=True)]
        found.append({p.name: total.tolist() for p, total in zip(optimizer.parameters, sums, strict=True)})
        optimizer(tuple(sum(each[1:], each[0]) for each in zip(*reduced, strict=True)))
    monitor.close()
    return found


ms.set_device("CPU")
communication.init("mccl")
tell({how: train(Path(sys.argv[1]), how, communication.get_rank()) for how in WAYS})
