"""Arguments stand in a dump as the caller gave them, whatever torch hands on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dumping import Dump, dumping
from torch import Tensor, nn

X = torch.rand(2, 3, 4, 4)
T = torch.rand(2, 3)
I = torch.tensor([1, 2])  # noqa: E741
W = torch.rand(4, 3, requires_grad=True)


class Passing:
    """Calls with what it is given."""

    def on(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.dropout(*args, **kwargs)

    def with_one_of_its_own(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.dropout(*args, p=0.7, **kwargs)

    def positions(self, *args: Any) -> Tensor:
        return F.dropout(*args)


def value(told: Any) -> Any:
    """An argument of an entry: a tensor as its number of dimensions."""
    if isinstance(told, list):
        return [value(one) for one in told]
    if not isinstance(told, dict):
        return told
    return f"tensor {len(told['shape'])}" if "shape" in told else told.get("value")


def recorded(tmp_path: Path, name: str, call: Callable[[], object]) -> tuple[list[Any], dict[str, Any]]:
    with dumping(tmp_path, level="L1"):
        call()
    entry = Dump(tmp_path).data[f"{name}.0.forward"]
    return value(entry["input_args"]), {key: value(one) for key, one in entry["input_kwargs"].items()}


@pytest.mark.parametrize(
    ("name", "call", "args", "kwargs"),
    [
        ("Functional.embedding", lambda: F.embedding(I, W), ["tensor 1", "tensor 2"], {}),
        ("Functional.embedding", lambda: F.embedding(I, W, 0, None, 2.0), ["tensor 1", "tensor 2", 0, None, 2.0], {}),
        ("Functional.embedding", lambda: F.embedding(I, weight=W), ["tensor 1"], {"weight": "tensor 2"}),
        ("Functional.embedding", lambda: F.embedding(input=I, weight=W), [], {"input": "tensor 1", "weight": "tensor 2"}),
        ("Functional.dropout", lambda: F.dropout(X, 0.5), ["tensor 4", 0.5], {}),
        ("Functional.dropout", lambda: F.dropout(X, training=False), ["tensor 4"], {"training": False}),
        ("Functional.dropout", lambda: Passing().on(X, 0.4), ["tensor 4", 0.4], {}),
        ("Functional.dropout", lambda: Passing().on(X, p=0.4), ["tensor 4"], {"p": 0.4}),
        ("Functional.dropout", lambda: Passing().positions(X, 0.4, True), ["tensor 4", 0.4, True], {}),
        ("Functional.layer_norm", lambda: F.layer_norm(T, (3,)), ["tensor 2", [3]], {}),
        ("Functional.softmax", lambda: F.softmax(T, -1), ["tensor 2", -1], {}),
        ("Functional.softmax", lambda: F.softmax(T, dim=-1), ["tensor 2"], {"dim": -1}),
        (
            "Functional.cross_entropy",
            lambda: F.cross_entropy(T, I, reduction="sum"),
            ["tensor 2", "tensor 1"],
            {"reduction": "sum"},
        ),
        ("Functional.relu", lambda: F.relu(X), ["tensor 4"], {}),
        ("Functional.max_pool2d", lambda: F.max_pool2d(X, 2, stride=1), ["tensor 4", 2], {"stride": 1}),
        ("Functional.linear", lambda: F.linear(T, W), ["tensor 2", "tensor 2"], {}),
        ("Torch.split", lambda: torch.split(T, 1, 1), ["tensor 2", 1, 1], {}),
        ("Tensor.split", lambda: T.split(1), ["tensor 2", 1], {}),
        ("Tensor.split", lambda: T.split(1, dim=1), ["tensor 2", 1], {"dim": 1}),
        ("Tensor.norm", lambda: T.norm(2), ["tensor 2", 2], {}),
        ("Torch.einsum", lambda: torch.einsum("ij->i", T), ["ij->i", "tensor 2"], {}),
        ("Tensor.__rsub__", lambda: 1 - T, ["tensor 2", 1], {}),
    ],
)
def test_by_position_or_by_keyword_and_no_others(
    tmp_path: Path, name: str, call: Callable[[], object], args: list[Any], kwargs: dict[str, Any]
) -> None:
    assert recorded(tmp_path, name, call) == (args, kwargs)


def test_of_a_module_as_its_forward_gives_them(tmp_path: Path) -> None:
    module = nn.Embedding(4, 3, padding_idx=0)
    given = ["tensor 1", "tensor 2", 0, None, 2.0, False, False]
    assert recorded(tmp_path, "Functional.embedding", lambda: module(I)) == (given, {})


@pytest.mark.parametrize(
    "call",
    [
        lambda: functools.partial(F.dropout, p=0.7)(X),
        lambda: functools.partial(F.dropout, X)(0.7),
        lambda: F.dropout(*(X, 0.7)),
        lambda: F.dropout(X, **dict([("p", 0.7)])),  # noqa: C406
        lambda: Passing().with_one_of_its_own(X),
        lambda: [*map(F.dropout, [X], [0.7])],
    ],
)
def test_where_nothing_says_how_they_were_given_they_are_all_there(tmp_path: Path, call: Callable[[], object]) -> None:
    args, kwargs = recorded(tmp_path, "Functional.dropout", call)
    assert {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}["p"] == 0.7
