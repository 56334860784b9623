"""Recognises the framework of a model and its optimizer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from monitor.pytorch.frameworks.framework import Framework
from monitor.recording.arguments import only


def framework_of(chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> Framework:
    """The adapter of the framework that keeps the gradients, weights and moments of a model.

    Does not import frameworks: one in use is imported already.

    Raises:
        TypeError: The optimizer cannot be observed.
        ValueError: The model is set up in a way that cannot be observed.
    """
    optimizer = only(optimizer)
    if "deepspeed.runtime.engine" in sys.modules:
        from monitor.pytorch.frameworks.deepspeed_zero import deepspeed_of

        if (found := deepspeed_of(chunks, optimizer, main_grad=main_grad)) is not None:
            return found
    if _any_is(chunks, "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"):
        from monitor.pytorch.frameworks.fsdp1 import Fsdp1

        return Fsdp1(chunks, optimizer, main_grad=main_grad)
    if _any_is(chunks, "torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"):
        from monitor.pytorch.frameworks.fsdp2 import Fsdp2

        return Fsdp2(chunks, optimizer, main_grad=main_grad)
    if _any_is(chunks, "torch.distributed._composable.fsdp.fully_shard", "FSDPModule"):
        raise ValueError("The monitor does not know fully_shard of this version of torch: use torch 2.6 or later.")
    if _any_is(chunks, "megatron.core.distributed", "DistributedDataParallel") or _is_megatron_optimizer(optimizer):
        from monitor.pytorch.frameworks.megatron import Megatron

        return Megatron(chunks, optimizer, main_grad=main_grad)
    return Framework(chunks, optimizer, main_grad=main_grad)


def _is_megatron_optimizer(optimizer: Any) -> bool:
    of = getattr(sys.modules.get("megatron.core.optimizer"), "MegatronOptimizer", None)
    return of is not None and isinstance(optimizer, of)


def _any_is(chunks: Sequence[nn.Module], imported: str, name: str) -> bool:
    """Whether a module is of the class ``name`` in the Python module ``imported``, if that is imported."""
    of = getattr(sys.modules.get(imported), name, None)
    return of is not None and any(isinstance(module, of) for chunk in chunks for module in chunk.modules())
