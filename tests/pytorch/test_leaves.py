"""What the tensors of a call are named, and where they stand."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from monitor.pytorch.tensors import TENSOR_PATHS
from monitor.recording.tensor_paths import described

A, B, C = (torch.full((1,), float(n)) for n in range(3))


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any
    name: str = "no tensor"


Point = collections.namedtuple("Point", "x y")


def spelled(leaves: list[Any]) -> dict[str, tuple[Tensor, int]]:
    assert len({leaf.suffix for leaf in leaves}) == len(leaves)
    return {leaf.suffix: (leaf.tensor, leaf.position) for leaf in leaves}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (A, {"": (A, 0)}),
        ((A,), {"": (A, 0)}),
        ([A], {"": (A, 0)}),
        ((A, B), {"_0": (A, 0), "_1": (B, 1)}),
        ([A, None, B], {"_0": (A, 0), "_2": (B, 2)}),
        (((A,),), {"_0_0": (A, 0)}),
        ((A, (B, [C])), {"_0": (A, 0), "_1_0": (B, 1), "_1_1_0": (C, 1)}),
        ({"x": A}, {"_x": (A, 0)}),
        ({"x": A, "y": {"z": B}}, {"_x": (A, 0), "_y_z": (B, 1)}),
        (Pair(A, [B, C]), {"_left": (A, 0), "_right_0": (B, 1), "_right_1": (C, 1)}),
        (Point(A, B), {"_0": (A, 0), "_1": (B, 1)}),
        (None, {}),
        ((), {}),
        (3.0, {}),
        ("text", {}),
        (Pair, {}),
        (object(), {}),
    ],
)
def test_results_of_every_structure_are_walked(result: Any, expected: dict[str, Any]) -> None:
    assert spelled(TENSOR_PATHS.outputs(result)) == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((A,), {}, {"": (A, 0)}),
        ((A, B), {}, {"_0": (A, 0), "_1": (B, 1)}),
        ((A, 3, None, B), {}, {"_0": (A, 0), "_3": (B, 3)}),
        ((), {"x": A}, {"_x": (A, 0)}),
        ((A,), {"mask": None}, {"_0": (A, 0)}),
        ((A,), {"mask": B, "more": [C]}, {"_0": (A, 0), "_mask": (B, 1), "_more_0": (C, 2)}),
        (([A, B],), {}, {"_0": (A, 0), "_1": (B, 0)}),
        (([A, B], C), {}, {"_0_0": (A, 0), "_0_1": (B, 0), "_1": (C, 1)}),
        ((), {}, {}),
    ],
)
def test_arguments_are_numbered_and_keyword_arguments_named(args: Any, kwargs: Any, expected: dict[str, Any]) -> None:
    assert spelled(TENSOR_PATHS.inputs(args, kwargs)) == expected


def test_two_tensors_never_share_a_name() -> None:
    leaves = TENSOR_PATHS.outputs({"a_b": A, "a": {"b": B}, "a_b~": C})

    assert spelled(leaves) == {"_a_b": (A, 0), "_a_b~": (B, 1), "_a_b~~": (C, 2)}


def test_what_contains_itself_is_walked_once() -> None:
    ring: list[Any] = [A]
    ring += [ring, {"again": ring}]

    assert spelled(TENSOR_PATHS.outputs((ring, B))) == {"_0_0": (A, 0), "_1": (B, 1)}


def test_a_dataclass_field_without_a_value_is_no_tensor() -> None:
    pair = Pair(A, B)
    del pair.right

    assert spelled(TENSOR_PATHS.outputs(pair)) == {"_left": (A, 0)}


@pytest.mark.parametrize(
    ("result", "spec", "elements"),
    [(A, "tensor", 1), ((A, B), "tuple[2]", 2), ([A, None], "tuple[2]", 2), ({"x": A}, "tuple[1]", 1), (None, "tuple[0]", 0)],
)
def test_results_are_described_as_targets_are_written(result: Any, spec: str, elements: int) -> None:
    assert TENSOR_PATHS.described_result(result) == spec
    assert TENSOR_PATHS.length(result) == elements


def test_arguments_are_described_by_their_number() -> None:
    assert described((A, 3), {"mask": None}) == "tuple[3]"
