"""A small job of two ranks whose rows, files or ranks can have a fault, and the report about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from recorded_job import RecordedRank
from sink_rows import Measured

from monitor.report.checks import CheckResult, checks_of
from monitor.report.facts import Facts, facts_of
from monitor.report.findings import Verdict
from monitor.report.model import Model, model_of
from monitor.report.verdict import verdict_of
from monitor.series import Placement

STEPS = 30
WHEN = 20
LAYERS = 4
NAMES = {
    "actv": [f"layers.{layer}.output" for layer in range(LAYERS)],
    "grad_unreduced": [f"layers.{layer}.weight" for layer in reversed(range(LAYERS))],
    "grad_reduced": [f"layers.{layer}.weight" for layer in reversed(range(LAYERS))],
    "param_origin": [f"layers.{layer}.weight" for layer in range(LAYERS)],
}
OWNED = ("grad_reduced", "param_origin")
"""Kinds that rank 0 writes. Rank 1 writes replicas."""

Fault = Callable[[int, int, str, str, np.ndarray], np.ndarray]
"""Changes the elements of a tensor: rank, step, kind, name, elements."""


def none(_rank: int, _step: int, _kind: str, _name: str, values: np.ndarray) -> np.ndarray:
    return values


def record(
    base: Path,
    fault: Fault = none,
    seed: int = 0,
    lost: Mapping[int, range] | None = None,
    open_after: Mapping[int, int] | None = None,
    steps: int = STEPS,
    names: Mapping[str, list[str]] = NAMES,
    checked: bool = False,
    ops: tuple[str, ...] = ("norm", "nans"),
    form: str = "parquet",
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Two ranks.

    Args:
        checked: Whether rows have checksums.
        lost: By rank, steps of which nothing was written.
        open_after: By rank, the last step before it was killed.
    """
    random = np.random.default_rng(seed)
    for rank in range(2):
        one = RecordedRank(base, rank, 2, form, {"dp": (0, 1)}, ops=ops, steps_per_record=10, replica_check=checked)
        for kind in OWNED:
            for name in names.get(kind, ()):
                one.place(kind, name, Placement(replicas=(0, 1)))
        for about, note in (notes or {}).items():
            one.manifest.note(about, note)
        last = (open_after or {}).get(rank, steps)
        for step in range(min(steps, last + 1)):
            noise = {kind: [_values(random, kind, step) for _ in each] for kind, each in names.items()}
            if step not in (lost or {}).get(rank, ()):
                rows = _rows(rank, step, noise, names, fault)
                one.write(step, {kind: [m._replace(checked=checked) for m in each] for kind, each in rows.items()})
        if rank in (open_after or {}):
            one.flush()
            one.manifest.save()
        else:
            one.close()
    return base


def _values(random: np.random.Generator, kind: str, step: int) -> np.ndarray:
    """Gradients fall and are noisy, activations are noisy, and weights grow slowly."""
    if kind == "param_origin":
        return np.full(8, 1 + step / 1000)
    return random.standard_normal(8) * (np.exp(-step / 20) if kind.startswith("grad") else 1) * random.lognormal(0, 0.2)


def _rows(
    rank: int, step: int, noise: Mapping[str, list[np.ndarray]], names: Mapping[str, list[str]], fault: Fault
) -> dict[str, list[Measured]]:
    rows: dict[str, list[Measured]] = {}
    for kind, each in names.items():
        micro_step = 0 if kind == "actv" else -1
        for name, values in zip(each, noise[kind], strict=True):
            if kind in OWNED:
                values = np.full(8, 1 + step / 1000)
            found = fault(rank, step, kind, name, values).tolist()
            if kind in OWNED and rank == 1:
                rows.setdefault("replica", []).append(Measured(f"{kind}/{name}", found))
            else:
                rows.setdefault(kind, []).append(Measured(name, found, micro_step=micro_step))
    return rows


@contextmanager
def reported(base: Path) -> Iterator[tuple[Facts, list[CheckResult], Verdict]]:
    with facts_of(str(base)) as facts:
        checks = checks_of(facts)
        yield facts, checks, verdict_of(facts, checks)


def modelled(base: Path) -> tuple[Model, list[CheckResult], Verdict]:
    with reported(base) as (facts, checks, verdict):
        return model_of(facts, checks, verdict), checks, verdict


def cells(model: Model, kind: str) -> np.ndarray:
    """Of the first heat map of a kind, shape ``(series, columns)``."""
    of = next(one for one in model.data["kinds"] if one["name"] == kind)
    shape = len(of["series"]), len(model.data["first"])
    return np.frombuffer(bytes(model.arrays), np.uint8, shape[0] * shape[1], of["cells"]).reshape(shape)
