"""Moments of optimizers that users write: found by what they were cloned from, and never under a name that is not certain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, dtype, nn, ops
from training import Net

from monitor.mindspore.frameworks.framework import MindSporeFramework, framework_of

KINDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
Keep = Callable[[nn.Cell], None]


@dataclass(frozen=True)
class Named:
    tensor: Parameter


class Own(nn.Optimizer):
    """Steps nothing: what counts is what it keeps."""

    def __init__(self, parameters: list[Any], keep: Keep, **hyperparameters: float) -> None:
        super().__init__(0.1, parameters)
        for name, value in hyperparameters.items():
            setattr(self, name, value)
        keep(self)

    def construct(self, gradients: Any) -> Any:
        return gradients


def cloned(attribute: str, prefix: str) -> Keep:
    return lambda optimizer: setattr(optimizer, attribute, optimizer.parameters.clone(prefix=prefix, init="zeros"))


def all_of(*keeps: Keep) -> Keep:
    def keep(optimizer: nn.Cell) -> None:
        for one in keeps:
            one(optimizer)

    return keep


def watched(keep: Keep, **hyperparameters: float) -> tuple[MindSporeFramework, list[Named]]:
    """As after a step."""
    net = Net()
    framework = framework_of([net], Own(net.trainable_params(), keep, **hyperparameters), main_grad=False)
    framework.stepped[id(framework.optimizers[0])].call_ended()
    return framework, [Named(p) for p in net.trainable_params()]


def names_of(framework: MindSporeFramework, parameter: Named) -> dict[str, str]:
    found = {kind: framework.moment(kind, parameter) for kind in KINDS}
    return {kind: one.name for kind, one in found.items() if one is not None}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (cloned("first", "moment1"), {"exp_avg": "moment1"}),
        (cloned("momentum_buffer", "state"), {"exp_avg": "state"}),
        (all_of(cloned("m", "m"), cloned("v", "v")), {"exp_avg": "m", "exp_avg_sq": "v"}),
        (
            all_of(cloned("a", "adam_m"), cloned("b", "adam_v"), cloned("c", "vhat")),
            dict(zip(KINDS, ("adam_m", "adam_v", "vhat"), strict=True)),
        ),
        (cloned("_exp_avg_sq", "second"), {"exp_avg_sq": "second"}),
    ],
)
def test_moments_are_found_by_prefix_or_attribute_whatever_the_other_is(keep: Keep, expected: dict[str, str]) -> None:
    framework, parameters = watched(keep)
    for one in parameters:
        assert names_of(framework, one) == {kind: f"{prefix}.{one.tensor.name}" for kind, prefix in expected.items()}


def test_the_momentum_of_an_optimizer_that_has_one_may_have_the_names_that_squares_have_elsewhere() -> None:
    for attribute in ("moments", "accum"):
        with_momentum, (one, *_) = watched(cloned(attribute, attribute), momentum=0.9)
        without, (other, *_) = watched(cloned(attribute, attribute))
        assert names_of(with_momentum, one) == {"exp_avg": f"{attribute}.{one.tensor.name}"}
        assert names_of(without, other) == {}


@pytest.mark.parametrize(
    "keep",
    [
        cloned("state", "history"),
        cloned("m", "m"),
        cloned("exp_avg", "moment2"),
        all_of(cloned("one", "moment1"), cloned("other", "momentum")),
    ],
)
def test_what_may_be_another_moment_is_none_and_the_manifest_says_so(keep: Keep) -> None:
    framework, parameters = watched(keep)
    assert [names_of(framework, one) for one in parameters] == [{}] * 4
    assert framework.notes()["exp_avg"].startswith("missing: it is unclear which moment the optimizer keeps in '")


def some_backwards(optimizer: nn.Cell) -> None:
    """Of two parameters, in another order."""
    last = optimizer.parameters[::-1]
    optimizer.exp_avg = ParameterTuple(Parameter(ops.zeros_like(p), name=f"exp_avg.{p.name}") for p in last[:3])


def in_a_list(optimizer: nn.Cell) -> None:
    optimizer.buffers = [Parameter(ops.zeros_like(p), name=f"momentum.{p.name}") for p in optimizer.parameters]


def stacked(optimizer: nn.Cell) -> None:
    shapes = [(3, *p.shape) if place == 0 else p.shape for place, p in enumerate(optimizer.parameters)]
    optimizer.exp_avg = ParameterTuple(
        Parameter(Tensor(np.zeros(shape, np.float32)), name=f"exp_avg.{p.name}")
        for shape, p in zip(shapes, optimizer.parameters, strict=True)
    )


def in_integers(optimizer: nn.Cell) -> None:
    optimizer.exp_avg = ParameterTuple(
        Parameter(ops.zeros(p.shape, dtype.int8), name=f"exp_avg.{p.name}") for p in optimizer.parameters
    )


def test_state_of_some_parameters_in_another_order_is_that_of_each() -> None:
    framework, parameters = watched(some_backwards)
    found = [names_of(framework, one) for one in parameters]
    assert found == [{}, *({"exp_avg": f"exp_avg.{one.tensor.name}"} for one in parameters[1:])]


def test_a_list_of_parameters_serves_as_a_tuple_does() -> None:
    framework, (one, *_) = watched(in_a_list)
    assert names_of(framework, one) == {"exp_avg": f"momentum.{one.tensor.name}"}


@pytest.mark.parametrize(("keep", "missing"), [(stacked, [0]), (in_integers, [0, 1, 2, 3])])
def test_state_that_is_not_the_parameter_s_has_no_row_and_the_manifest_says_so(keep: Keep, missing: list[int]) -> None:
    framework, parameters = watched(keep)
    assert [place for place, one in enumerate(parameters) if not names_of(framework, one)] == missing
    assert framework.notes()["exp_avg"].startswith("missing where the optimizer's state does not have the parameter's shape")


def test_state_of_the_user_s_own_is_no_moment_before_the_first_step_unless_it_was_loaded() -> None:
    net = Net()
    optimizer = Own(net.trainable_params(), cloned("first", "moment1"))
    one = Named(net.a.weight)
    assert framework_of([net], optimizer, main_grad=False).moment("exp_avg", one) is None
    optimizer.first[0].set_data(ops.ones_like(optimizer.first[0]))
    assert framework_of([net], optimizer, main_grad=False).moment("exp_avg", one) is optimizer.first[0]


def test_a_class_that_is_made_from_one_of_mindspore_s_keeps_what_that_one_does() -> None:
    class Further(nn.Adam):
        def __init__(self, parameters: list[Any]) -> None:
            super().__init__(parameters, 0.1)
            self.average = self.parameters.clone(prefix="exp_avg", init="zeros")

    net = Net()
    framework = framework_of([net], Further(net.trainable_params()), main_grad=False)
    framework.stepped[id(framework.optimizers[0])].call_ended()
    assert names_of(framework, Named(net.a.weight)) == {"exp_avg": "moment1.a.weight", "exp_avg_sq": "moment2.a.weight"}
