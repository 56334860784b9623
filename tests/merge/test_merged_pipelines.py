"""A pipeline on real ranks: what is merged bears the names of the whole model, in its order, and has its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_job import merged, tensors

SCRIPT = "one_pipeline.py"


@pytest.fixture(scope="module")
def truth(launch: Callable[..., Path]) -> list[dict[str, dict[str, float]]]:
    """Norms of the model in one piece: by step, kind and name."""
    return json.loads((launch(SCRIPT, "whole", 1) / "told.json").read_text())


@pytest.fixture(scope="module", params=["counting-from-0", "interleaved", "names-of-the-model"])
def base(request: pytest.FixtureRequest, launch: Callable[..., Path]) -> Path:
    """Where two ranks recorded to; merged."""
    base = launch(SCRIPT, request.param, 2, format="hdf5", xy_distribution=True, all_xy=True) / "out"
    assert merged(base).clean
    assert merged(base, "in-steps", format="hdf5").clean
    return base


@pytest.mark.parametrize("kind", ["param_origin", "grad_reduced"])
def test_each_tensor_is_that_of_the_model_in_one_piece(base: Path, truth: list[dict[str, dict[str, float]]], kind: str) -> None:
    rows = tensors(base, kind)
    for step, expected in enumerate(truth):
        assert expected[kind] == pytest.approx({row["name"]: row["norm"] for row in rows if row["step"] == step}, rel=1e-5)


def test_tensors_of_a_step_are_in_the_order_of_the_model_in_hdf5(base: Path, truth: list[dict[str, dict[str, float]]]) -> None:
    rows = [row for row in tensors(base, "param_origin", "in-steps") if row["step"] == 1]
    assert list(truth[1]["param_origin"]) == [row["name"] for row in rows]
    assert sorted(row["stage"] for row in rows) == [row["stage"] for row in rows]


def test_activations_of_every_layer_bear_its_name(base: Path) -> None:
    rows = [row for row in tensors(base, "actv") if (row["step"], row["micro_step"]) == (1, 2)]
    found = [row["name"] for row in rows if row["name"].endswith("linear.output")]
    assert found == [f"layers.{layer}.linear.output" for layer in range(6)]
