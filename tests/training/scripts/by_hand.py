"""What numpy makes of the tensors of a training, which hooks of its own have seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

EXPERTS = 4


def norm(*arrays: Any) -> float:
    return float(np.linalg.norm(np.concatenate([np.asarray(one, dtype=np.float64).ravel() for one in arrays])))


def arrays(tensors: Any) -> list[Any]:
    return [one.detach().double().numpy() for one in tensors]


class ByHand:
    """Sees gradients before ranks aggregate them, and weights and moments after each step of the optimizer.

    Args:
        scale: What losses are multiplied by.

    Attributes:
        told: One entry a step of each of these; norms of parameters by name.
    """

    def __init__(self, model: nn.Module, optimizer: Any, scale: float = 1.0) -> None:
        self._parameters = dict(model.named_parameters())
        self._scale = scale
        self._tokens = np.zeros(EXPERTS, dtype=int)
        self._forget()
        self.told: dict[str, list[Any]] = {
            name: [] for name in ("local_norms", "grad_norms", "weights", "first_moments", "second_moments", "tokens")
        }
        for name, parameter in self._parameters.items():
            parameter.register_hook(partial(self._add, name))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def watch(self, router: nn.Module, chosen: Callable[[Any], Tensor]) -> None:
        """Count what a router chooses."""
        router.register_forward_hook(lambda _, __, result: self._count(chosen(result)))

    def _count(self, chosen: Tensor) -> None:
        self._tokens += np.bincount(chosen.flatten().numpy(), minlength=EXPERTS)

    def _forget(self) -> None:
        self._sums = {name: np.zeros(parameter.shape) for name, parameter in self._parameters.items()}

    def _add(self, name: str, gradient: Tensor) -> None:
        self._sums[name] += gradient.double().numpy() / self._scale

    def _before_step(self, *_: Any) -> None:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self._sums)
        means = [sum(one[name] for one in every) / len(every) for name in self._sums]
        self.told["local_norms"].append({name: norm(total) for name, total in self._sums.items()})
        self.told["grad_norms"].append(norm(*means))
        self.told["tokens"].append(self._tokens.tolist())
        self._tokens = np.zeros(EXPERTS, dtype=int)
        self._forget()

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self.told["weights"].append(norm(*arrays(self._parameters.values())))
        for which, state in (("first_moments", "exp_avg"), ("second_moments", "exp_avg_sq")):
            of = {name: optimizer.state[parameter][state] for name, parameter in self._parameters.items()}
            self.told[which].append({name: norm(*arrays([moment])) for name, moment in of.items()})
