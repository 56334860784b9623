"""What training metrics have shown, read back as users see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Points = list[tuple[int, float]]
TrainRanks = Callable[..., tuple[list[dict[str, Any]], list[str]]]
"""The fixture ``train_ranks``."""

EVERYTHING = """
monitor_config:
    monitor_on: true
    dump_path: {base}/dump
    local_loss_format: [log, tensorboard]
    device_local_loss_format: [log, tensorboard]
    local_norm_format: [log, tensorboard]
    device_local_norm_format: [log, tensorboard]
    optimizer_state_format: [log, tensorboard]
    weight_state_format: [log, tensorboard]
    throughput_baseline: 10
tensorboard:
    tensorboard_dir: {base}/board
    log_loss_scale_to_tensorboard: true
    log_timers_to_tensorboard: true
    log_expert_load_to_tensorboard: true
"""
"""A training YAML that shows all there is, below ``base``."""


def accumulated(directory: Path) -> EventAccumulator:
    found = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(directory: Path) -> dict[str, Points]:
    """By tag: against what, and the value."""
    board = accumulated(directory)
    return {tag: [(one.step, one.value) for one in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def texts(directory: Path) -> dict[str, str]:
    board = accumulated(directory)
    return {tag: board.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in board.Tags()["tensors"]}
