"""A value is judged by the values before it, and what shares a cell shows the worst of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from reported_job import cells, record, reported

from monitor.report import model
from monitor.report.history import (
    HISTORY_BEGINS,
    INFINITE,
    LEAST,
    MOST,
    NAN,
    NOT_RECORDED,
    PARTLY,
    WARM_UP,
    Axis,
    Exempt,
    KindHistory,
    SuddenBound,
)
from monitor.report.model import layer_of, model_of


def judged(values: Sequence[Sequence[float]], bins: int | None = None, batch: int = 7) -> KindHistory:
    """A series whose values are given by rank; None where it was not recorded."""
    steps = np.arange(len(values[0]))
    history = KindHistory(Axis(steps, bins or len(steps)), len(values), 10**6)
    for first in range(0, len(steps), batch):
        rows = [(step, rank) for step in steps[first : first + batch] for rank in range(len(values))]
        rows = [(step, rank) for step, rank in rows if values[rank][step] is not None]
        step, rank = np.array(rows).reshape(-1, 2).T
        found = np.array([values[r][s] for s, r in rows], dtype=np.float64)
        history.add(step, np.full(len(rows), -1), np.zeros(len(rows), np.int64), rank, found)
    return history


def noise(steps: int, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).lognormal(0, 0.1, steps).tolist()


def test_the_first_values_have_no_history() -> None:
    (row,) = judged([[1.0, 1000.0, *noise(30)]]).grid
    assert row[:WARM_UP].tolist() == [HISTORY_BEGINS] * WARM_UP
    assert row[WARM_UP:].min() >= LEAST


def of_one_element(values: Sequence[float], kind: str) -> KindHistory:
    steps = np.arange(len(values))
    history = KindHistory(Axis(steps, len(steps)), 1, bound=SuddenBound.of(kind), exempt=Exempt({0}))
    history.add(steps, steps * 0 - 1, steps * 0, steps * 0, np.abs(np.array(values)))
    return history


@pytest.mark.parametrize("kind", ["exp_avg_sq", "exp_avg_sq_updated", "exp_avg", "param_origin", "param_updated"])
@pytest.mark.parametrize("begin", [10, *range(64, 80, 5)])
def test_a_moment_or_a_weight_may_grow_for_long_and_not_jump(kind: str, begin: int) -> None:
    def events(factors: Sequence[float]) -> list[int]:
        values = 1e-9 * np.cumprod([*[1.001] * begin, *factors])
        steps = np.arange(len(values))
        history = KindHistory(Axis(steps, len(steps)), 1, bound=SuddenBound.of(kind))
        history.add(steps, steps * 0 - 1, steps * 0, steps * 0, values)
        return [event.step for event in history.events]

    assert events([1.2] * 25) == []
    assert events([100.0, *[1.0] * 25]) == events([0.01, *[1.0] * 25]) == [begin]


def test_a_single_element_that_passes_zero_is_no_sudden_change_and_one_that_jumps_or_stops_is() -> None:
    sloping = np.concatenate([np.full(40, 0.1), np.linspace(0.1, -0.1001, 41), np.full(40, -0.1)])
    assert 0 < np.abs(sloping).min() < 1e-4
    for kind in ("param_origin", "exp_avg", "grad_reduced"):
        assert of_one_element(sloping, kind).events == []
        assert [one.step for one in of_one_element([*noise(40), 100.0, *noise(9)], kind).events] == [40]
    assert [one.step for one in of_one_element([*noise(40), 0.0, 0.0, 0.0], "grad_reduced").events] == [40]


@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1e6])
def test_one_outlier_stands_out_and_does_not_hide_the_next_one(factor: float) -> None:
    values = noise(60)
    values[40] *= factor
    values[43] *= factor
    history = judged([values])
    assert np.flatnonzero(history.grid[0] == history.grid[0].max()).tolist() == [40, 43]
    assert [one.step for one in history.events] == [40]


def test_what_follows_only_zeros_is_compared_with_zero() -> None:
    (event,) = judged([[*[0.0] * 20, np.nan]]).events
    assert event.typical == 0


@pytest.mark.parametrize("way", [1.0, -1.0])
def test_a_steady_trend_does_not_stand_out(way: float) -> None:
    history = judged([[np.exp(way * step / 10) for step in range(200)]])
    assert history.grid.max() < PARTLY
    assert history.events == []


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_the_size_of_batches_changes_nothing_much(batch: int) -> None:
    values = noise(100)
    values[70] = np.nan
    assert (judged([values], batch=batch).grid[0] == NAN).nonzero()[0].tolist() == [70]


def test_a_column_keeps_the_worst_of_its_steps_and_ranks() -> None:
    values = [noise(400, rank) for rank in range(20)]
    values[13][217] = np.inf
    history = judged(values, bins=40, batch=50)
    assert history.grid[0, 21] == INFINITE
    assert (history.grid[0] == INFINITE).sum() == 1
    assert history.cells is not None
    assert [history.pair_rank[pair] for pair in np.flatnonzero(history.cells[:, 21] == INFINITE)] == [13]


def test_a_rank_that_stops_is_told_from_a_tensor_that_stops() -> None:
    both, one = noise(30), [*noise(20), *[None] * 10]
    assert (judged([both, one]).grid[0, 20:] == PARTLY).all()  # type: ignore[list-item]
    assert judged([both, both]).grid[0].min() != NOT_RECORDED


def test_too_many_cells_are_not_kept() -> None:
    history = KindHistory(Axis(np.arange(10), 10), 2, most_kept=10)
    none = np.zeros(2, np.int64)
    history.add(none, none - 1, none, np.array([0, 1]), np.ones(2))
    assert history.cells is None


def test_deviations_beyond_the_palette_have_its_last_colour() -> None:
    values = noise(40)
    values[30] = 1e30
    assert judged([values]).grid.max() == LEAST + MOST + 1


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.weight", "model.layers.12"),
        ("0:layers.3.input", "0:layers.3"),
        ("h.0.attn.output_1#1", "h.0"),
        ("tokens.weight", "tokens"),
        ("head", "head"),
    ],
)
def test_a_layer_is_the_name_up_to_its_number(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_a_large_run_has_the_same_place_and_its_layers_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every bound lowered: layers in place of tensors, ranks of one step, and some curves, which are read again."""

    def broken(rank: int, step: int, kind: str, name: str, values: np.ndarray) -> np.ndarray:
        return values * np.nan if (rank, step, kind, name) == (1, 20, "actv", "layers.2.output") else values

    base = record(tmp_path, broken)
    with reported(base) as found:
        small = model_of(*found)
    for bound, value in (("MOST_ROWS", 3), ("MOST_FRAMES", 0), ("MOST_NUMBERS", 60), ("MOST_MEMBERS", 10**6)):
        monkeypatch.setattr(model, bound, value)
    monkeypatch.setattr("monitor.report.facts.MOST_KEPT", 0)
    with reported(base) as found:
        large = model_of(*found)
    of_small, of_large = (next(one for one in each.data["kinds"] if one["name"] == "actv") for each in (small, large))
    assert (of_small["layers"], of_large["cells"]) == (None, None)
    layers = of_large["layers"]
    assert [one["name"] for one in layers["listed"]] == [f"layers.{one}" for one in range(4)]
    width = len(large.data["first"])
    member = np.frombuffer(bytes(large.arrays), np.uint8, width, layers["listed"][2]["cells"])
    assert member.tolist() == cells(small, "actv")[2].tolist()
    (frame,) = of_large["frames"]
    kept = np.frombuffer(bytes(large.arrays), np.uint8, 8, frame["cells"]).reshape(2, 4)
    assert (kept == NAN).tolist() == [[False] * 4, [False, False, True, False]]
    (curve,) = of_large["curves"]
    assert curve["name"] == "layers.2.output"


def test_a_page_has_curves_of_so_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of many experts in few steps has more tensors than numbers of each. Those of the verdict have their curves."""
    base = record(
        tmp_path,
        lambda _rank, step, _kind, name, values: values * np.nan if (step, name) == (20, "layers.3.output") else values,
    )
    monkeypatch.setattr(model, "MOST_CURVES", 3)
    with reported(base) as found:
        kinds = model_of(*found).data["kinds"]
    (curves,) = (one["curves"] for one in kinds if one["name"] == "actv")
    assert [one["name"] for one in curves if one["name"] == "layers.3.output"]
    assert sum(len(one["curves"]) for one in kinds) <= 3 + len(kinds)


@pytest.mark.parametrize("batch", [1, 3, 50])
@pytest.mark.parametrize("zeros", [1, 2])
def test_a_zero_is_sudden_if_another_follows(zeros: int, batch: int) -> None:
    """An expert that no token chose in one step has a gradient of zeros; a gradient that vanishes stays zero."""
    for first in range(20, 40):
        history = KindHistory(Axis(np.arange(60), 60), 1)
        values = np.where(np.isin(np.arange(60), np.arange(first, first + zeros)), 0.0, 1.0)
        for begin in range(0, 60, batch):
            steps = np.arange(begin, min(begin + batch, 60))
            one = np.zeros(len(steps), np.int64)
            history.add(steps, one - 1, one, one, values[steps])
        assert [(event.step, event.value) for event in history.events] == ([(first, 0.0)] if zeros == 2 else [])


def changes(size: float, then: float, kind: str = "grad_reduced") -> list[int]:
    """Steps with an event of a series of ``size`` that is ``then`` in steps 40 and 41, beside a series of about 1."""
    history = KindHistory(Axis(np.arange(60), 60), 1, bound=SuddenBound.of(kind))
    small = np.array(noise(60, 1)) * size
    small[40:42] = then
    values = np.stack([noise(60), small], axis=1).ravel()
    steps, series = np.divmod(np.arange(120), 2)
    history.add(steps, series * 0 - 1, series, series * 0, values)
    return [event.step for event in history.events]


@pytest.mark.parametrize("kind", ["grad_unreduced", "grad_reduced", "actv_grad"])
def test_a_gradient_that_stays_small_beside_others_has_no_sudden_change(kind: str) -> None:
    """The gradient of a bias of keys is zero in exact arithmetic, and its noise of rounding may grow a hundredfold."""
    assert changes(1e-6, 1e-4, kind) == changes(1e-4, 1e-6, kind) == []
    assert changes(1e-6, 1e-4, "actv") == [40]


@pytest.mark.parametrize(("size", "then"), [(1e-6, 0.1), (0.1, 1e-6), (1e-3, 1e3), (1e-6, 0.0), (1e-6, np.nan)])
def test_a_gradient_that_is_or_becomes_large_or_zero_changes_suddenly(size: float, then: float) -> None:
    assert changes(size, then) == [40]


@pytest.mark.parametrize("kind", ["grad_unreduced", "grad_reduced", "actv_grad"])
@pytest.mark.parametrize(("most", "one", "found"), [(1 / 20, 1 / 41, []), (1, 1 / 41, [9]), (1 / 20, 0.0, [9]), (20, 41, [9])])
def test_a_fall_of_all_gradients_makes_none_of_them_sudden(kind: str, most: float, one: float, found: list[int]) -> None:
    """A small batch, or an easy one, has small gradients. Series 9 falls more than the others, or alone."""
    values = np.stack([noise(60, seed) for seed in range(10)], axis=1)
    values[40:42, :9] *= most
    values[40:42, 9] *= one
    history = KindHistory(Axis(np.arange(60), 60), 1, bound=SuddenBound.of(kind))
    steps, series = np.divmod(np.arange(values.size), 10)
    history.add(steps, series * 0 - 1, series, series * 0, values.ravel())
    assert [event.series for event in history.events] == found
