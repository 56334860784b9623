"""What the rows of features say, alone and combined."""

from __future__ import annotations

import math

import numpy as np
import pytest

from monitor.stats.features import COLUMNS_OF, MATRICES, as_scalar
from monitor.stats.ops import derive
from monitor.stats.partials import COLUMNS, COUNT, MAX, SUM, SUMSQ, WRITES, Partials, combine_groups

PLACES = {
    "attention_hook": (COUNT, SUM, SUMSQ),
    "linear_hook": (COUNT, MATRICES, SUMSQ, MAX),
    "moe_router_weight_hook": (COUNT, MATRICES, SUM),
    "moe_router_logit_hook": (COUNT, SUM),
    "update_ratio": (COUNT, SUM, SUMSQ),
    "mg_direction": (COUNT, SUM),
}
"""The columns of partials in which a kind keeps its numbers."""


def rows(kind: str, *numbers: tuple[float, ...]) -> Partials:
    """A row of the kind for each of these, in the order of ``PLACES``."""
    columns = np.zeros((len(COLUMNS), len(numbers)))
    columns[WRITES] = 1.0
    for place, column in enumerate(PLACES[kind]):
        columns[column] = [one[place] for one in numbers]
    return Partials(columns)


def read(kind: str, partials: Partials) -> list[dict[str, float | None]]:
    """The columns of each row; a missing one is None."""
    derived = {name: derive(name, partials) for name in COLUMNS_OF[kind]}
    return [
        {name: float(values[row]) if valid[row] else None for name, (values, valid) in derived.items()}
        for row in range(len(partials))
    ]


def together(partials: Partials) -> Partials:
    return combine_groups(partials, np.zeros(1, dtype=np.int64))


def test_means_over_queries_are_weighted_when_they_combine() -> None:
    parts = rows("attention_hook", (2.0, 3.0, 1.0), (6.0, 1.0, 5.0))
    assert read("attention_hook", parts) == [{"entropy": 1.5, "softmax_max": 0.5}, {"entropy": 1 / 6, "softmax_max": 5 / 6}]
    assert read("attention_hook", together(parts)) == [{"entropy": 0.5, "softmax_max": 0.75}]


def test_the_frobenius_norm_of_shards_combines_and_their_spectral_norm_is_missing() -> None:
    parts = rows("linear_hook", (6.0, 1.0, 9.0, 2.0), (6.0, 1.0, 16.0, 4.0))
    assert read("linear_hook", parts)[0] == {"sr": 1.5, "kernel_norm": 2.0, "frobenius_norm": 3.0}
    assert read("linear_hook", together(parts)) == [{"sr": None, "kernel_norm": None, "frobenius_norm": 5.0}]


@pytest.mark.parametrize(("squares", "spectral"), [(math.inf, 4e300), (0.0, 4e-300), (4e-310, 1e-155)])
def test_a_frobenius_norm_whose_squares_left_the_range_is_missing(squares: float, spectral: float) -> None:
    found = read("linear_hook", rows("linear_hook", (4.0, 1.0, squares, spectral)))
    assert found == [{"sr": None, "kernel_norm": spectral, "frobenius_norm": None}]


def test_a_weight_with_an_infinite_element_has_an_infinite_frobenius_norm() -> None:
    (found,) = read("linear_hook", rows("linear_hook", (4.0, 1.0, math.inf, math.nan)))
    assert found["frobenius_norm"] == math.inf


def test_a_matrix_of_zeros_has_no_stable_rank() -> None:
    assert read("linear_hook", rows("linear_hook", (4.0, 1.0, 0.0, 0.0))) == [
        {"sr": None, "kernel_norm": 0.0, "frobenius_norm": 0.0}
    ]


def test_pairs_of_experts_that_no_rank_holds_both_of_are_missing() -> None:
    parts = rows("moe_router_weight_hook", (6.0, 1.0, 3.0), (6.0, 1.0, -3.0))
    assert read("moe_router_weight_hook", parts) == [{"router_weight_similarity": 0.5}, {"router_weight_similarity": -0.5}]
    assert read("moe_router_weight_hook", together(parts)) == [{"router_weight_similarity": None}]


def test_the_entropy_of_routers_is_the_mean_over_all_tokens() -> None:
    parts = rows("moe_router_logit_hook", (1.0, 2.0), (3.0, 0.0))
    assert read("moe_router_logit_hook", together(parts)) == [{"per_token_expert_entropy": 0.5}]


def test_the_update_ratio_of_shards_is_that_of_their_norms() -> None:
    parts = rows("update_ratio", (4.0, 9.0, 100.0), (4.0, 16.0, 300.0))
    assert read("update_ratio", together(parts)) == [{"update_ratio": 0.25, "update_norm": 5.0, "weight_norm": 20.0}]


def test_a_weight_of_zeros_has_no_update_ratio() -> None:
    assert read("update_ratio", rows("update_ratio", (4.0, 4.0, 0.0))) == [
        {"update_ratio": None, "update_norm": 2.0, "weight_norm": 0.0}
    ]


def test_nan_is_a_value_that_was_measured() -> None:
    (read_nan,) = read("attention_hook", rows("attention_hook", (4.0, math.nan, 2.0)))
    assert math.isnan(read_nan["entropy"] or 0.0)
    assert read_nan["softmax_max"] == 0.5


@pytest.mark.parametrize("op", ["min", "max", "mean", "norm", "absmax"])
def test_a_direction_is_read_as_a_scalar(op: str) -> None:
    values, valid = derive(op, as_scalar(rows("mg_direction", (8.0, 2.0))))
    assert list(zip(values.tolist(), valid.tolist(), strict=True)) == [(0.25, True)]


def test_the_direction_of_shards_is_weighted_by_their_sizes() -> None:
    shares = as_scalar(together(rows("mg_direction", (9.0, 9.0), (1.0, 0.0))))
    assert derive("mean", shares)[0].tolist() == [0.9]


def test_a_direction_that_is_nan_is_read_as_a_scalar_that_is_nan() -> None:
    scalar = as_scalar(rows("mg_direction", (8.0, math.nan)))
    assert derive("nans", scalar)[0].tolist() == [1.0]
    assert np.isnan(derive("norm", scalar)[0]).all()


def test_a_direction_combines_no_calls() -> None:
    assert derive("calls", as_scalar(rows("mg_direction", (8.0, 2.0))))[1].tolist() == [False]


def test_sums_stand_where_the_algebra_adds() -> None:
    """What a mean is made of must be in columns that ``combine_groups`` adds up."""
    added = {COUNT, SUM, SUMSQ}
    assert all(
        set(PLACES[kind]) <= added for kind in ("attention_hook", "moe_router_logit_hook", "update_ratio", "mg_direction")
    )
