"""Norms of a step, read from rows: what is whole here is shown, and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest

from monitor.failures import Failures
from monitor.series import LOCAL, NO_MICRO_STEP, Placement, Series, SeriesTable, Shard
from monitor.stats.host.array_kernel import NumpyKernel
from monitor.stats.partials import COLUMNS, KindRows, Partials
from monitor.stats.table import StepRows
from monitor.training.norms import NOT_WHOLE, GradNormSource, NormReader
from monitor.training.step import StepNorms

ARRAYS = {"a": np.array([3.0, 0.0]), "b": np.array([4.0])}
CUT = Placement(shard=Shard((0, 1), (4,), (0,)))
EVERYWHERE = Placement(unclaimed=(0, 1))


class Taken:
    """The norms that were read, by step."""

    def __init__(self) -> None:
        self.by_step: dict[int, StepNorms | None] = {}

    def norms(self, step: int, norms: StepNorms | None) -> None:
        self.by_step[step] = norms

    def no_more_norms(self) -> None:
        """No one waits here."""


def read(
    kind: str,
    placement: Placement = LOCAL,
    arrays: dict[str, np.ndarray] = ARRAYS,
    *,
    micro_step: int = NO_MICRO_STEP,
    scale: float | None = None,
    world: int = 1,
    failures: Failures | None = None,
    **source: bool,
) -> StepNorms:
    series, taken = SeriesTable(), Taken()
    kinds = {kind: rows_of(series, kind, placement, arrays, micro_step)}
    if scale is not None:
        kinds["other"] = rows_of(series, "other", LOCAL, {"loss_scale": np.array([scale])}, NO_MICRO_STEP)
    reader = NormReader(series, world, taken, failures or Failures(), GradNormSource(**source))
    reader.look(StepRows(7, ("norm",), kinds, []))
    norms = taken.by_step[7]
    assert norms is not None
    return norms


def rows_of(series: SeriesTable, kind: str, placement: Placement, arrays: dict[str, np.ndarray], micro_step: int) -> KindRows:
    indices = []
    for name in arrays:
        indices.append(series.index_of(one := Series(kind, 0, name)))
        series.place(one, placement)
    rows = np.zeros((len(arrays), len(COLUMNS)))
    for row, array in enumerate(arrays.values()):
        NumpyKernel(1e-8).reduce_into(array, rows, row)
    zeros = np.zeros(len(arrays), dtype=np.int64)
    return KindRows(np.array(indices), zeros + micro_step, zeros, zeros, Partials.from_rows(rows))


def test_norms_stand_by_name_and_together() -> None:
    norms = read("grad_unreduced")
    assert (norms.local, norms.device_local) == ({"a": 3.0, "b": 4.0}, 5.0)


def test_gradients_are_divided_by_the_loss_scale() -> None:
    norms = read("grad_unreduced", scale=2.0)
    assert (norms.local, norms.device_local, norms.loss_scale) == ({"a": 1.5, "b": 2.0}, 2.5, 2.0)


def test_norms_of_great_and_small_numbers_neither_overflow_nor_vanish() -> None:
    assert read("param_updated", arrays={"a": np.array([3e200]), "b": np.array([4e200])}).weight == pytest.approx(5e200)
    assert read("param_updated", arrays={"a": np.array([3e-200]), "b": np.array([4e-200])}).weight == pytest.approx(5e-200)


def test_what_is_not_finite_stays_so() -> None:
    norms = read("grad_unreduced", arrays={"a": np.array([math.nan]), "b": np.array([4.0])})
    assert math.isnan(norms.local["a"])
    assert norms.device_local is not None
    assert math.isnan(norms.device_local)


def test_gradients_of_micro_batches_are_not_those_of_the_step() -> None:
    norms = read("grad_unreduced", micro_step=0)
    assert (norms.local, norms.device_local) == ({}, None)


def test_a_name_has_no_wrapper_in_front() -> None:
    assert read("exp_avg", arrays={"module.a": np.ones(1)}).first_moments == {"a": 1.0}


@pytest.mark.parametrize(
    ("placement", "world", "source", "expected"),
    [
        (LOCAL, 1, {}, 5.0),
        (EVERYWHERE, 2, {}, 5.0),
        (EVERYWHERE, 4, {}, None),
        (LOCAL, 2, {}, None),
        (LOCAL, 2, {"gradients_are_global": True}, 5.0),
        (LOCAL, 1, {"grad_norm_is_told": True}, None),
        (CUT, 2, {}, None),
        (Placement(partial=True), 2, {}, None),
    ],
    ids=["alone", "replicas", "some-replicas", "unknown", "vouched-for", "told", "cut", "term"],
)
def test_the_norm_of_the_whole_gradient_is_read_where_this_rank_has_it(
    placement: Placement, world: int, source: dict[str, bool], expected: float | None
) -> None:
    assert read("grad_reduced", placement, world=world, **source).gradient == expected


@pytest.mark.parametrize(("placement", "is_here"), [(EVERYWHERE, True), (CUT, False)], ids=["replicas", "cut"])
def test_whether_the_whole_gradient_is_here_shows(placement: Placement, is_here: bool) -> None:
    assert read("grad_reduced", placement, world=2).gradient_is_here is is_here


@pytest.mark.parametrize(("kind", "is_here"), [("grad_unreduced", False), ("param_updated", True)])
def test_a_gradient_that_only_this_rank_made_is_not_the_whole_one(kind: str, *, is_here: bool) -> None:
    assert read(kind).gradient_is_here is is_here


def test_that_weights_are_not_whole_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    for _ in range(2):
        assert read("param_updated", CUT, failures=failures).weight is None
    assert caplog.text.count(NOT_WHOLE) == 1


def test_a_step_that_was_dropped_has_none() -> None:
    taken = Taken()
    NormReader(SeriesTable(), 1, taken, Failures(), GradNormSource()).dropped(3, "queue full")
    assert taken.by_step == {3: None}
