"""Calls inside Megatron that no hook of its own tells of: the beginning of a gradient reduction, and its optimizers' steps.

The optimizers of torch that Megatron wraps have hooks, but see gradients that were clipped, and nothing of a skipped step.
"""

from __future__ import annotations

from typing import Final

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer

from monitor.pytorch.patches import TorchCallPatch

START_GRAD_SYNC: Final = TorchCallPatch(_ParamAndGradBucketGroup, "start_grad_sync")
STEPS: Final = tuple(
    TorchCallPatch(owner, name)
    for owner in (FP32Optimizer, MixedPrecisionOptimizer, ChainedOptimizer)
    for name in ("step", "prepare_grads")
)


def check_version() -> None:
    """Raises ``ValueError`` where what has to be patched is not there."""
    for patch in (START_GRAD_SYNC, *STEPS):
        if not patch.fits:
            raise ValueError(unknown_version(f"{patch.owner.__name__} has no {patch.name}"))


def unknown_version(what: str) -> str:
    """Says that the Megatron in use is another than the one that is known."""
    import megatron.core

    version = getattr(megatron.core, "__version__", "of no known version")
    return f"megatron-core {version} cannot be observed ({what}): use a version that is known to work, such as 0.16."
