"""The operators that stand in compiled code, by themselves."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from monitor.pytorch.compiled.operators import FOLLOW, NO_VALUE, SEE, ObservedHook, Passage, begin, end, value_of

HOST = torch.device("cpu")


class Noting:
    """Notes what it is called with, and numbers calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.counts = True

    def begins(self, _tag: Tensor) -> int | None:
        self.told.append("begins")
        return len(self.told) if self.counts else None

    def ends(self, _tag: Tensor) -> int:
        self.told.append("ends")
        return len(self.told)

    def keep(self, _handles: Any) -> None: ...

    def sees(self, x: Tensor, call: int, _tag: Tensor, slot: str, found: int, _value: int) -> None:
        self.told.append((slot, call, found, x.tolist()))

    def sees_gradient(self, gradient: Tensor, call: int, _tag: Tensor, slot: str, _value: int) -> None:
        self.told.append((slot, call, gradient.tolist()))


def test_listeners_get_what_happens_to_a_call_with_its_stand_in() -> None:
    noting = Noting()
    observed = ObservedHook(noting, HOST)
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    begin([x], observed.handle, ["input"], [SEE | FOLLOW], 1)
    y = x * 3
    end([y], observed.handle, ["output"], [FOLLOW], 1)
    y.sum().backward()

    assert noting.told == ["begins", ("input", 1, 1, [1.0, 2.0]), "ends", ("output", 1, [1.0, 1.0]), ("input", 1, [3.0, 3.0])]


def test_listeners_get_nothing_of_a_call_without_a_stand_in() -> None:
    noting = Noting()
    noting.counts = False
    observed = ObservedHook(noting, HOST)

    begin([torch.ones(1)], observed.handle, ["input"], [SEE], 1)

    assert noting.told == ["begins"]


def test_a_hook_that_is_gone_gets_nothing_and_nothing_fails() -> None:
    observed = ObservedHook(Noting(), HOST)
    handle = observed.handle
    del observed
    gc.collect()

    begin([torch.ones(1)], handle, ["input"], [SEE], 1)
    end([torch.ones(1, requires_grad=True)], handle, ["output"], [SEE | FOLLOW], 1)


def test_the_gradient_of_an_input_is_that_of_the_call_alone() -> None:
    noting = Noting()
    observed = ObservedHook(noting, HOST)
    x = torch.ones(1, requires_grad=True) * 1.0

    begin([x], observed.handle, ["input"], [FOLLOW], 1)
    y = x * 2 + x * 1
    end([y], observed.handle, ["output"], [0], 1)
    (y + x * 5).sum().backward()

    assert noting.told == ["begins", "ends", ("input", 1, [3.0])]


def test_calls_within_each_other_are_distinguished() -> None:
    noting = Noting()
    observed = ObservedHook(noting, HOST)
    x = torch.ones(1, requires_grad=True) * 1.0

    begin([x], observed.handle, ["input"], [FOLLOW], 1)
    y = x * 2
    begin([y], observed.handle, ["input"], [FOLLOW], 1)
    z = y * 3
    end([z], observed.handle, ["output"], [0], 1)
    end([z], observed.handle, ["output"], [0], 1)
    z.sum().backward()

    assert noting.told == ["begins", "begins", "ends", "ends", ("input", 2, [3.0]), ("input", 1, [6.0])]


class Failing(Noting):
    def begins(self, _tag: Tensor) -> int:
        raise ValueError("in the midst of it")


def test_a_call_that_could_not_be_observed_is_not_taken_for_one_whose_tag_was_at_its_address() -> None:
    observed, tag = ObservedHook(Failing(), HOST), torch.empty(())
    observed.note(tag, "an earlier call")
    with pytest.raises(ValueError, match="in the midst of it"):
        observed.passes(tag, True, [], Passage(ends=False, recording=True, found=0, tensors=()))
    assert observed.call(tag) is None


def test_a_failure_while_a_call_is_traced_is_said_and_passes(caplog: pytest.LogCaptureFixture) -> None:
    observed = ObservedHook(Failing(), HOST)

    begin([torch.ones(1)], observed.handle, ["input"], [SEE], 1)

    assert "in the midst of it" in caplog.text


def test_calls_of_the_step_before_the_last_are_forgotten() -> None:
    observed, tag = ObservedHook(Noting(), HOST), torch.empty(())
    observed.note(tag, "call")
    observed.forget_step()
    assert observed.call(tag) == "call"
    observed.forget_step()
    assert observed.call(tag) is None


def numbers(function: Any, *inputs: Tensor) -> list[int]:
    """The values that ``function`` appends to its first argument while it is traced."""
    found: list[int] = []
    make_fx(lambda *tensors: function(found, *tensors), tracing_mode="fake")(*inputs)
    return found


def test_a_value_has_one_number_until_it_is_changed() -> None:
    def trace(found: list[int], x: Tensor) -> Tensor:
        y = x + 1
        found += [value_of(y), value_of(y)]
        y.add_(1)
        found += [value_of(y), value_of(x)]
        return y

    first, same, changed, other = numbers(trace, torch.ones(2))
    assert first == same
    assert len({first, changed, other}) == 3


def test_outside_of_a_trace_no_value_is_known() -> None:
    assert value_of(torch.ones(1)) == NO_VALUE
