"""Which optimizer of DeepSpeed's an engine has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from monitor.pytorch.frameworks.deepspeed.bf16_zero1 import Bf16Zero1
from monitor.pytorch.frameworks.deepspeed.engine import engine_of
from monitor.pytorch.frameworks.deepspeed.framework import DeepSpeed
from monitor.pytorch.frameworks.deepspeed.master_copies import FlatMasterCopies, MasterCopies
from monitor.pytorch.frameworks.deepspeed.zero3 import Zero3
from monitor.pytorch.frameworks.deepspeed.zero12 import Zero12

KNOWN: Final[dict[str, type[DeepSpeed]]] = {
    "FP16_UnfusedOptimizer": MasterCopies,
    "FP16_Optimizer": FlatMasterCopies,
    "BF16_Optimizer": Bf16Zero1,
    "DeepSpeedZeroOptimizer": Zero12,
    "DeepSpeedZeroOptimizer_Stage3": Zero3,
}
"""By the name of the class, which is known without its being imported."""


def deepspeed_of(chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> DeepSpeed | None:
    """Where the engine that trains ``chunks`` keeps things; None where none does.

    Raises:
        TypeError: ``optimizer`` is none.
        ValueError: The engine cannot be found or observed, or the optimizer is not its own.
    """
    engine = engine_of(chunks, optimizer)
    if engine is None:
        return None
    given = None if optimizer is engine else optimizer
    return _framework_for(engine.optimizer)(engine, chunks, given, main_grad=main_grad)


def _framework_for(optimizer: Any) -> type[DeepSpeed]:
    if isinstance(optimizer, Optimizer):
        return DeepSpeed
    if optimizer is None:
        raise ValueError("The engine of DeepSpeed has no optimizer: give deepspeed.initialize one, or name it in the config.")
    name = type(optimizer).__name__
    if name not in KNOWN:
        raise ValueError(
            f"The engine of DeepSpeed has a {name}, and where it keeps gradients, weights and moments is not known: use ZeRO 0 "
            "to 3 with an optimizer, and without ZenFlow."
        )
    return KNOWN[name]
