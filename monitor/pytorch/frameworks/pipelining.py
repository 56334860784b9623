"""``torch.distributed.pipelining``: recognises rehearsals of a stage, and the ranks of the stages.

A stage whose input shapes are unknown infers them by a rehearsal before the first micro-batch: a forward and a backward of
empty tensors. It looks like training, and no public hook announces it.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from monitor.pytorch.process_group import group_ranks
from monitor.series import Ranks


def rehearsing() -> bool:
    """Whether the forward that begins is a stage's rehearsal. Free if there are no stages."""
    rehearsal = _rehearsal()
    frame: FrameType | None = sys._getframe(1) if rehearsal is not None else None
    while frame is not None and frame.f_code is not rehearsal:
        frame = frame.f_back
    return frame is not None


def stage_ranks() -> Ranks | None:
    """The ranks of the stages of the pipeline whose forward is running; None if none is."""
    frame: FrameType | None = sys._getframe(1) if (called := _forward_of_a_stage()) is not None else None
    while frame is not None and frame.f_code is not called:
        frame = frame.f_back
    group = None if frame is None else getattr(frame.f_locals.get("self"), "group", None)
    return group_ranks("the group of the pipeline's stages", group)


def _forward_of_a_stage() -> CodeType | None:
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    return getattr(getattr(stage, "forward_one_chunk", None), "__code__", None)


def _rehearsal() -> CodeType | None:
    """Code of the rehearsing function. Versions of torch that infer shapes with meta tensors, without gradients, have none."""
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "PipelineStage", None)
    return getattr(getattr(stage, "_forward_metadata_inference", None), "__code__", None)
