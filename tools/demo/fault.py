"""A fault to be found: once, as if a kernel had gone wrong, one element of what a module gives is NaN.

It is made with torch's own hooks, before a monitor exists, and leaves nothing behind that could tell where.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from torch import Tensor, nn

OUTPUT: Final = ".output"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes bad.

    Attributes:
        micro_step: The micro-batch within the step.
        kind: ``actv``, or ``actv_grad`` where it is the gradient of the tensor.
        tensor: By its name in the files.
    """

    rank: int
    step: int
    micro_step: int
    kind: str
    tensor: str

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}, micro-step {self.micro_step}, {self.kind} {self.tensor}"


def drawn(seed: int, model: nn.Module, ranks: int, steps: range, micro_steps: int) -> Place:
    """What one of the modules of ``model`` that hold no others gives, forward or backward; ``seed`` decides."""
    draw = random.Random(seed)
    innermost = [name for name, module in model.named_modules() if not any(module.children())]
    return Place(
        rank=draw.randrange(ranks),
        step=draw.choice(steps),
        micro_step=draw.randrange(micro_steps),
        kind=draw.choice(("actv", "actv_grad")),
        tensor=draw.choice(innermost) + OUTPUT,
    )


def plant(place: Place, model: nn.Module, micro_steps: int) -> None:
    """Let a module of this rank's ``model`` go wrong in one call.

    Args:
        place: The output of a module.
        micro_steps: How often a step calls it.
    """
    module = model.get_submodule(place.tensor.removesuffix(OUTPUT))
    module.register_forward_hook(_break_one_call(place.step * micro_steps + place.micro_step, place.kind == "actv_grad"))


def _break_one_call(number: int, in_backward: bool) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
    calls = count()

    def after_forward(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
        if next(calls) != number:
            return None
        if in_backward:
            output.register_hook(_with_a_nan)
            return None
        return _with_a_nan(output)

    return after_forward


def _with_a_nan(tensor: Tensor) -> Tensor:
    broken = tensor.clone()
    broken[tuple(size // 2 for size in tensor.shape)] = math.nan
    return broken
