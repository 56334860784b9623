"""``AnomalyNan``: what is not finite, and what is too large."""

from __future__ import annotations

import pytest
from rule_parts import INF, NAN, Event, Watched, said
from sink_rows import Measured


def of(threshold: float | None = None) -> Watched:
    return Watched(("AnomalyNan", threshold))


def test_a_nan_is_one_event_for_its_tensor_with_the_count_as_its_value() -> None:
    assert of().step(a=[1, NAN, NAN]) == [Event("actv", "a", -1, "AnomalyNan", "nans", 2.0, None)]


@pytest.mark.parametrize("value", [INF, -INF])
def test_an_inf_fires(value: float) -> None:
    """Peers, fault 4: Inf passed the NaN rule."""
    assert of().step(a=[1, value]) == [Event("actv", "a", -1, "AnomalyNan", "infs", 1.0, None)]


MASK = [0, -INF, -INF]
INPUTS = ["attention.input_mask", ".input_1", "a.input_0#2", "output.input"]


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("watched", [("AnomalyNan", None), ("AnomalyNan", 10.0), ("AnomalyTurbulence", 0.5)])
def test_a_mask_that_is_an_input_is_no_event_and_hides_none(watched: tuple[str, float | None], name: str) -> None:
    found = Watched(watched).step({"actv": [Measured(name, MASK), Measured("b.output", [NAN])]})
    assert [one.name for one in found] == ["b.output"]
    assert Watched(watched).step({"actv": [Measured(name, [0, -0.5, -INF])]}) == []


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        *(("actv", INPUTS[0], values) for values in ([0, INF], [0, -INF, INF], [0, -INF, NAN], [-1, -INF], [1, -INF], [-INF])),
        *(("actv", name, MASK) for name in ("a.output", "input_embedding.output", "input.output_1", "weight")),
        *((kind, INPUTS[0], MASK) for kind in ("actv_grad", "grad_reduced")),
    ],
)
def test_what_is_like_a_mask_but_is_none_is_an_event(kind: str, name: str, values: list[float]) -> None:
    assert [one.name for one in of().step({kind: [Measured(name, values)]})] == [name]


def test_a_tensor_with_both_is_one_event_for_its_nans() -> None:
    assert said(of().step(a=[INF, NAN])) == [("a", "AnomalyNan", "nans")]


def test_finite_values_of_any_size_are_none_without_a_threshold() -> None:
    assert of().step(a=[1e150, -1e150], b=[], c=[0.0]) == []


@pytest.mark.parametrize("value", [3.5, -3.5])
def test_a_magnitude_above_the_threshold_fires(value: float) -> None:
    assert of(3.0).step(a=[1, value]) == [Event("actv", "a", -1, "AnomalyNan", "absmax", 3.5, None)]


def test_one_that_equals_the_threshold_does_not() -> None:
    assert of(3.0).step(a=[3.0, -3.0], b=[], c=[2.0]) == []


def test_a_tensor_that_is_not_finite_is_one_event_even_if_the_rest_of_it_is_too_large() -> None:
    assert said(of(3.0).step(a=[NAN, 100], b=[-INF, -100])) == [("a", "AnomalyNan", "nans"), ("b", "AnomalyNan", "infs")]


def test_every_kind_is_judged_and_every_micro_step_on_its_own() -> None:
    spoiled = [Measured("a", [NAN], micro_step) for micro_step in (0, 1)]
    found = of().step({"actv": [Measured("b"), *spoiled], "replica": [Measured("grad_reduced/w", [INF])], "other": []})
    assert [(one.kind, one.name, one.micro_step, one.op) for one in sorted(found)] == [
        ("actv", "a", 0, "nans"),
        ("actv", "a", 1, "nans"),
        ("replica", "grad_reduced/w", -1, "infs"),
    ]
