"""The rows of a monitor, as they are read back and as they have to be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.series import SIGNED_KINDS
from monitor.sinks.hdf5 import read_hdf5

OPS = ("min", "max", "mean", "norm", "zeros", "nans", "infs", "absmax", "std")
FEATURES = ("update_norm", "weight_norm", "update_ratio", "mg_direction")

EVERYTHING: dict[str, Any] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "mg_direction": True,
    "update_ratio": True,
    "ur_distribution": True,
    "ops": OPS,
    "format": ("hdf5",),
    "run_numbers": False,
}
"""A configuration that records every kind of tensor of a training loop."""

Wide = NDArray[np.float64]


class Place(NamedTuple):
    """A row."""

    step: int
    kind: str
    name: str
    micro_step: int = -1

    def __str__(self) -> str:
        micro_step = f", micro-step {self.micro_step}" if self.micro_step >= 0 else ""
        return f"{self.kind} of {self.name!r} in step {self.step}{micro_step}"


class Expected(NamedTuple):
    """What a row holds.

    Attributes:
        tensors: What is measured, in float64; of ``update_ratio`` the weights before and after, of ``mg_direction`` the
            gradient and the momentum.
        unless: The reason for which it may be absent; empty if there is none.
    """

    tensors: tuple[Wide, ...]
    unless: str = ""


Rows = dict[Place, Expected]


def recorded(directory: Path) -> dict[Place, dict[str, Any]]:
    """``{place: {op: value}}`` of all shards of a rank, with the histogram, if there is one."""
    rows: dict[Place, dict[str, Any]] = {}
    for path in directory.glob("metrics_*.h5"):
        for row in read_hdf5(path, ops=[*OPS, *FEATURES]).to_pylist():
            assert _place(row) not in rows, f"{_place(row)} stands twice"
            rows[_place(row)] = row
        for row in read_hdf5(path, kinds=SIGNED_KINDS).to_pylist():
            rows[_place(row)]["histogram"] = row["histogram"]
    return rows


def _place(row: Mapping[str, Any]) -> Place:
    return Place(row["step"], row["kind"], row["name"], -1 if row["micro_step"] is None else row["micro_step"])
