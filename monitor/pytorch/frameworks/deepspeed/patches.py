"""Seeing what an engine of DeepSpeed is about to do, and that it has done it.

Neither the engine nor its optimizers have hooks. They are no torch optimizers: they may step the one inside several times or
not at all, and have unscaled and clipped by then. So two methods of the engine's class are patched.
"""

from __future__ import annotations

from typing import Final

from monitor.pytorch.frameworks.deepspeed.engine import engine_class
from monitor.pytorch.patches import TorchCallPatch

STEP_PATCH: Final = TorchCallPatch(engine_class(), "_take_model_step")
"""Called once where a step ends, after aggregation and before unscaling and clipping, whatever the stage."""

REDUCE_PATCH: Final = TorchCallPatch(engine_class(), "allreduce_gradients")
"""Called after every backward, before anything is aggregated."""
