"""``torch.distributed.pipelining``: forwards that are none.

A stage that was not told what it will be given finds out by a rehearsal before the first micro-batch: a forward, and a backward
to its inputs, of tensors that hold nothing. It looks like training, and no public hook tells of it.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from monitor.pytorch.process_group import group_ranks
from monitor.series import Ranks


def rehearsing() -> bool:
    """Whether the forward that begins is a stage's rehearsal. Costs nothing where there are no stages."""
    rehearsal = _rehearsal()
    frame: FrameType | None = sys._getframe(1) if rehearsal is not None else None
    while frame is not None and frame.f_code is not rehearsal:
        frame = frame.f_back
    return frame is not None


def stage_ranks() -> Ranks | None:
    """The ranks that hold the stages of the pipeline in whose forward this is; None where it is in none."""
    frame: FrameType | None = sys._getframe(1) if (called := _forward_of_a_stage()) is not None else None
    while frame is not None and frame.f_code is not called:
        frame = frame.f_back
    group = None if frame is None else getattr(frame.f_locals.get("self"), "group", None)
    return group_ranks("the group of the pipeline's stages", group)


def _forward_of_a_stage() -> CodeType | None:
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    return getattr(getattr(stage, "forward_one_chunk", None), "__code__", None)


def _rehearsal() -> CodeType | None:
    """Of the function that rehearses. Versions of torch that rehearse on meta tensors, without gradients, have none."""
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "PipelineStage", None)
    return getattr(getattr(stage, "_forward_metadata_inference", None), "__code__", None)
