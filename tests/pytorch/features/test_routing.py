"""The entropy of a router is that of its definition."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from definitions import entropy_per_token
from observing import drawn
from torch import nn

from monitor.pytorch.features import matrices
from monitor.pytorch.features.matrices import dtype_of_routing, entropy_from, entropy_of


@pytest.mark.parametrize("block", [1, 40, 1 << 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_entropy_is_that_of_the_softmax_over_experts(
    monkeypatch: pytest.MonkeyPatch, block: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(matrices, "BLOCK", block)
    logits = (3 * drawn(4, 5, 8)).to(dtype)
    found = entropy_of(logits)
    assert found.tokens == 20
    assert found.entropy.item() / 20 == pytest.approx(entropy_per_token(logits), rel=2e-6)


@pytest.mark.parametrize("block", [1, 100, 1 << 18])
def test_logits_follow_from_input_and_weight(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(matrices, "BLOCK", block)
    tokens, weight, bias = drawn(3, 7, 16), drawn(6, 16, seed=1), drawn(6, seed=2)
    found = entropy_from(tokens, weight, bias, torch.float32)
    assert found.tokens == 21
    expected = entropy_per_token(tokens.double() @ weight.double().T + bias.double())
    assert found.entropy.item() / 21 == pytest.approx(expected, rel=1e-5)


def test_logits_are_as_coarse_as_the_router_makes_them() -> None:
    tokens, weight = drawn(50, 16), drawn(6, 16, seed=1)
    coarse = nn.functional.linear(tokens.bfloat16(), weight.bfloat16())
    found = entropy_from(tokens, weight, None, torch.bfloat16)
    assert found.entropy.item() / 50 == pytest.approx(entropy_per_token(coarse), rel=1e-6)


def test_an_even_router_has_all_the_entropy_and_a_sure_one_none() -> None:
    assert entropy_of(torch.zeros(3, 8)).entropy.item() / 3 == pytest.approx(math.log(8))
    assert entropy_of(1e4 * torch.eye(8)).entropy.item() == 0.0


def test_an_expert_that_a_token_cannot_go_to_adds_nothing() -> None:
    assert entropy_of(torch.tensor([[0.0, 0.0, -math.inf]])).entropy.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_not_hidden(value: float) -> None:
    assert math.isnan(entropy_of(torch.tensor([[0.0, value, 1.0], [0.0, 0.0, 0.0]])).entropy.item())


def test_a_router_computes_in_what_it_says_or_in_what_it_is_given() -> None:
    module, tokens, weight = nn.Module(), drawn(2, 4).bfloat16(), drawn(3, 4)
    assert dtype_of_routing(module, tokens, weight) is torch.float32
    assert dtype_of_routing(module, tokens, weight.bfloat16()) is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert dtype_of_routing(module, tokens, weight) is torch.bfloat16
        module.config = SimpleNamespace(moe_router_dtype="fp64")
        assert dtype_of_routing(module, tokens, weight) is torch.float64
