"""Features of cells that train, end to end, against their definitions in float64."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from attaching import Output, attached, step_with, warnings_in, with_fixed_weights
from mindspore import Parameter, Tensor, nn, ops
from numpy_definitions import (
    attention_scores,
    attention_weights,
    entropies,
    entropy_and_greatest,
    entropy_per_token,
    exact,
    similarity,
    softmax,
)
from training import array

from monitor.recording.features.reading import NO_LOGITS, NO_SCORES, NOT_2D

STEPS = 2
SEQUENCE, HEADS, SIZE, EXPERTS = 3, 2, 5, 4
LINEAR = ("query", "key", "value", "gate", "top")


class Core(nn.Cell):
    """Called with Q, K and V, each (sequence, batch, heads, size). Keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.called_with: list[tuple[np.ndarray, np.ndarray]] = []

    def construct(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.called_with.append((exact(query), exact(key)))
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        return ops.matmul(ops.softmax(ops.matmul(q, k.swapaxes(2, 3)) * SIZE**-0.5), v)


class TopRouter(nn.Cell):
    """Gives what it has made of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((EXPERTS, HEADS * SIZE), np.float32)))
        self.called_with: list[np.ndarray] = []

    def construct(self, x: Tensor) -> Tensor:
        self.called_with.append(exact(x))
        return ops.amax(ops.softmax(ops.matmul(x, self.weight.T)), -1)


class Block(nn.Cell):
    """Takes (batch, 4), as the inputs of the other tests are."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Dense(4, SEQUENCE * HEADS * SIZE) for _ in range(3))
        self.core = Core()
        self.gate = nn.Dense(HEADS * SIZE, EXPERTS)
        self.top = TopRouter()
        self.logits: list[np.ndarray] = []

    def construct(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).reshape(-1, SEQUENCE, HEADS, SIZE).permute(1, 0, 2, 3) for layer in (self.query, self.key, self.value)
        )
        attended = self.core(query, key=key, value=value)
        tokens = attended.permute(2, 0, 1, 3).reshape(-1, HEADS * SIZE)
        logits = self.gate(tokens)
        self.logits.append(exact(logits))
        return (ops.amax(ops.softmax(logits), -1) * self.top(tokens)).sum()


def trained(output: Output, weights: list[dict[str, np.ndarray]] | None = None, **l2_targets: Any) -> Block:
    net = with_fixed_weights(Block())
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, recording_l2_features=True, l2_targets=l2_targets, ndigits=17):
        for number in range(STEPS):
            if weights is not None:
                weights.append({one.name: array(one).astype(np.float64) for one in net.get_parameters()})
            step_with(net, optimizer, number)
    return net


def columns(output: Output, kind: str) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row.name, row.step): row.values for row in output.rows(kind)}


def test_attention_that_is_called_with_q_and_k(output: Output) -> None:
    net = trained(output, attention_hook=["core"])
    found = columns(output, "attention_hook")
    assert list(found) == [("core.attention", step) for step in range(STEPS)]
    for step, (query, key) in enumerate(net.core.called_with):
        weights = attention_weights(query.transpose(1, 2, 0, 3), key.transpose(1, 2, 0, 3))
        entropy, greatest = entropy_and_greatest(weights)
        assert found["core.attention", step] == pytest.approx({"entropy": entropy, "softmax_max": greatest}, rel=1e-5)


def test_each_head_of_an_attention_and_all_of_them(output: Output) -> None:
    net = trained(output, attention_hook=["core"], attention_head_hook=["core"])
    found = columns(output, "attention_head_hook")
    assert list(found) == [(name, step) for step in range(STEPS) for name in ("core.heads", "core.heads.0", "core.heads.1")]
    for step, (query, key) in enumerate(net.core.called_with):
        scores = attention_scores(query.transpose(1, 2, 0, 3), key.transpose(1, 2, 0, 3))[:1]
        for name, heads in (("core.heads", slice(None)), ("core.heads.0", slice(0, 1)), ("core.heads.1", slice(1, 2))):
            part = scores[:, heads]
            expected = {"max_logit": part.max(), "heads_above": 0.0, "entropy": entropies(softmax(part)).mean()}
            expected["sink"] = softmax(part)[:, :, 1:, 0].mean()
            assert found[name, step] == pytest.approx(expected, rel=1e-5, abs=1e-8)
    assert len(output.rows("attention_hook")) == STEPS


def test_every_matrix_before_the_first_forward_of_a_step(output: Output) -> None:
    weights: list[dict[str, np.ndarray]] = []
    trained(output, weights, linear_hook=[])
    found = columns(output, "linear_hook")
    assert sorted(found) == sorted((f"{name}.linear", step) for name in LINEAR for step in range(STEPS))
    for (name, step), values in found.items():
        singular = np.linalg.svd(weights[step][name.replace("linear", "weight")], compute_uv=False)
        frobenius = np.linalg.norm(singular)
        assert values["frobenius_norm"] == pytest.approx(frobenius, rel=1e-6)
        assert values["kernel_norm"] == pytest.approx(singular[0], rel=5e-3)
        assert values["sr"] == pytest.approx(frobenius / singular[0], rel=5e-3)


def test_routers_by_their_weights(output: Output) -> None:
    weights: list[dict[str, np.ndarray]] = []
    trained(output, weights, moe_router_weight_hook=["gate", "top"])
    found = {place: values["router_weight_similarity"] for place, values in columns(output, "moe_router_weight_hook").items()}
    expected = {
        (f"{name}.moe_router", step): similarity(weights[step][f"{name}.weight"])
        for name in ("gate", "top")
        for step in range(STEPS)
    }
    assert found == pytest.approx(expected, rel=1e-6)


def test_routers_by_their_logits_which_they_give_or_which_follow_from_their_weights(output: Output) -> None:
    weights: list[dict[str, np.ndarray]] = []
    net = trained(output, weights, moe_router_logit_hook=["gate", "top"])
    found = {place: values["per_token_expert_entropy"] for place, values in columns(output, "moe_router_logit_hook").items()}
    expected = {}
    for step in range(STEPS):
        expected["gate.moe_router", step] = entropy_per_token(net.logits[step])
        expected["top.moe_router", step] = entropy_per_token(net.top.called_with[step] @ weights[step]["top.weight"].T)
    assert found == pytest.approx(expected, rel=1e-5)


def test_what_does_not_fit_is_named_once_with_its_reason(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="monitor")
    trained(output, attention_hook=["gate"], linear_hook=["core"], moe_router_logit_hook=["core"])
    (said,) = warnings_in(caplog)
    assert said == (
        "[rank 0] Features that have no row in step 0: "
        f"linear_hook: {NOT_2D}: 'core'; moe_router_logit_hook: {NO_LOGITS}: 'core'; attention_hook: {NO_SCORES}: 'gate'. "
        "See docs/features.md."
    )
    assert not list(output.directory().glob("*_hook_*.csv"))
