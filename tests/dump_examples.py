"""The examples that the reference gives of ``dump.json``, a Conv2d at L0 and a relu at L1, without their numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUMBERS = ("Max", "Min", "Mean", "Norm")
INPUT, OUTPUT = [8, 16, 14, 14], [8, 32, 10, 10]
"""Of the convolution."""
RELU = [32, 16, 28, 28]


class Example:
    """As one framework writes it.

    Args:
        prefix: Of modules.
        dtype: Of float32.
    """

    def __init__(self, framework: str, prefix: str, kind: str, dtype: str) -> None:
        self._framework, self._prefix, self._kind, self._dtype = framework, prefix, kind, dtype

    def convolution(self, directory: str) -> dict[str, Any]:
        """Of ``conv2``, 16 channels to 32, a kernel of 5."""
        name, parameters = f"{self._prefix}.conv2.Conv2d", {"weight": [32, 16, 5, 5], "bias": [32]}
        forward = self._forward(f"{name}.forward.0", INPUT, OUTPUT)
        forward["parameters"] = {
            key: self._tensor(f"{name}.forward.0.parameters.{key}", shape) for key, shape in parameters.items()
        }
        gradients = {key: [self._tensor(f"{name}.parameters_grad.0.{key}", shape)] for key, shape in parameters.items()}
        data = {
            f"{name}.forward.0": forward,
            f"{name}.parameters_grad.0": gradients,
            f"{name}.backward.0": self._backward(f"{name}.backward.0", OUTPUT, INPUT),
        }
        return self._whole("L0", directory, data)

    def relu(self, directory: str) -> dict[str, Any]:
        name = "Functional.relu.0"
        data = {
            f"{name}.forward": self._forward(f"{name}.forward", RELU, RELU),
            f"{name}.backward": self._backward(f"{name}.backward", RELU, RELU),
        }
        return self._whole("L1", directory, data)

    def _whole(self, level: str, directory: str, data: dict[str, Any]) -> dict[str, Any]:
        told = {"task": "tensor", "level": level, "framework": self._framework, "dump_data_dir": directory}
        return {**told, "data": data}

    def _forward(self, name: str, given: list[int], gave: list[int]) -> dict[str, Any]:
        inputs = [self._tensor(f"{name}.input.0", given)]
        return {"input_args": inputs, "input_kwargs": {}, "output": [self._tensor(f"{name}.output.0", gave)]}

    def _backward(self, name: str, given: list[int], gave: list[int]) -> dict[str, Any]:
        return {"input": [self._tensor(f"{name}.input.0", given)], "output": [self._tensor(f"{name}.output.0", gave)]}

    def _tensor(self, name: str, shape: list[int]) -> dict[str, Any]:
        described = {"type": self._kind, "dtype": self._dtype, "shape": shape}
        trained = {"requires_grad": "true or false"} if self._framework == "pytorch" else {}
        return {**described, **dict.fromkeys(NUMBERS, "a number"), **trained, "data_name": f"{name}.npy"}


def without_numbers(base: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The ``dump.json`` of the only step and rank, its entries in the order of the example, in which backwards may differ."""
    (path,) = base.glob("step0/*/dump.json")
    told = json.loads(path.read_text(), object_hook=_blank)
    order = {name: place for place, name in enumerate(expected["data"])}
    told["data"] = dict(sorted(told["data"].items(), key=lambda entry: order.get(entry[0], len(order))))
    return told


def directory_of(base: Path) -> str:
    (path,) = base.glob("step0/*/dump_tensor_data")
    return str(path)


def _blank(told: dict[str, Any]) -> dict[str, Any]:
    blank = {key: "a number" if key in NUMBERS and isinstance(one, float) else one for key, one in told.items()}
    return {**blank, "requires_grad": "true or false"} if isinstance(blank.get("requires_grad"), bool) else blank


def same_to_the_letter(told: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Keys in the same order, too."""
    return json.dumps(told) == json.dumps(expected)
