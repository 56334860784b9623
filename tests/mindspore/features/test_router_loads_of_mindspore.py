"""How many tokens go to each expert of a MindSpore router, on the host and with the operations of a device."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, as_measured, attached, step_with, warnings_in, with_fixed_weights
from mindspore import Parameter, Tensor, nn, ops
from numpy_definitions import exact

from monitor.mindspore.features.choices import choices_of
from monitor.mindspore.features.matrices import logit_sums_of
from monitor.mindspore.features.reading import call_of
from monitor.recording.features.reading import PADDED, UNKNOWN_EXPERTS, NotARouterError, RouterCall

KIND = "moe_router_load_hook"
EXPERTS, TOP, STEPS = 5, 2, 2


class Choosing(nn.Cell):
    """Gives weights and numbers of experts, or a map of them. Keeps what it was called with and what it chose."""

    def __init__(self, capacity: int | None, by_map: bool) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((EXPERTS, 4), np.float32)))
        self.num_experts, self.top_k, self.capacity, self.by_map = EXPERTS, TOP, capacity, by_map
        self.tokens: list[np.ndarray] = []
        self.chosen: list[np.ndarray] = []

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = ops.topk(ops.softmax(ops.matmul(x, self.weight.T)), TOP)
        self.tokens.append(exact(x))
        if self.capacity is not None:
            chosen = ms.mint.where(chosen == self.capacity, -1, chosen)  # one expert has no room at all
        self.chosen.append(chosen.asnumpy())
        if self.by_map:
            chosen = (chosen.expand_dims(-1) == Tensor(np.arange(EXPERTS))).any(axis=-2)
        return weights, chosen


class Model(nn.Cell):
    def __init__(self, capacity: int | None, by_map: bool) -> None:
        super().__init__()
        self.gate = Choosing(capacity, by_map)

    def construct(self, x: Tensor) -> Tensor:
        return self.gate(ops.cat([x, x * 0.3 - 1.0, 2.0 - x]))[0].sum()


@pytest.mark.parametrize("there", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("by_map", [False, True], ids=["indices", "map"])
@pytest.mark.parametrize("capacity", [None, 1])
def test_experts_have_the_tokens_that_the_router_sends_them(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, there: bool, by_map: bool, capacity: int | None
) -> None:
    output = as_measured(tmp_path, monkeypatch, there=there)
    net = with_fixed_weights(Model(capacity, by_map))
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    weights = []
    with attached(output, net, optimizer, recording_l2_features=True, l2_targets={KIND: ["gate"]}, ndigits=17):
        for number in range(STEPS):
            weights.append(exact(net.gate.weight))
            step_with(net, optimizer, number)
    rows = output.rows(KIND)
    assert len(rows) == STEPS * (1 + EXPERTS)
    for step in range(STEPS):
        router, *experts = rows[step * (1 + EXPERTS) : (step + 1) * (1 + EXPERTS)]
        counts = [int((net.gate.chosen[step] == expert).sum()) for expert in range(EXPERTS)]
        assert [row.name for row in experts] == [f"gate.experts.{expert}" for expert in range(EXPERTS)]
        assert [row.values["assigned"] for row in experts] == counts
        assert [row.values["load"] for row in experts] == pytest.approx([one / sum(counts) for one in counts])
        logits = net.gate.tokens[step] @ weights[step].T
        exponents = np.log(np.exp(logits).sum(-1))
        dropped = None if capacity is None else pytest.approx(1 - sum(counts) / (len(logits) * TOP))
        assert {name: value for name, value in router.values.items() if not name.startswith("load")} == {
            "assigned": sum(counts),
            "imbalance": pytest.approx(max(counts) * EXPERTS / sum(counts)),
            "dead_experts": counts.count(0),
            "dropped": dropped,
            "z_loss": pytest.approx((exponents**2).mean(), rel=1e-5),
            "logit_max": pytest.approx(logits.max(), rel=1e-5),
        }


def test_a_router_that_pads_is_not_counted_and_says_why(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = with_fixed_weights(Model(None, True))
    net.gate.moe_pad_expert_input_to_capacity = True
    with pytest.raises(NotARouterError, match="pads the tokens"):
        choices_of(net.gate, (), RouterCall())
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, recording_l2_features=True, l2_targets={KIND: ["gate"]}):
        step_with(net, optimizer)
    assert f"{KIND}: {PADDED}: 'gate'" in warnings_in(caplog)[0]


@pytest.mark.parametrize("there", [False, True], ids=["host", "device"])
def test_an_expert_out_of_reach_changes_nothing_and_nan_is_seen(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    as_measured(tmp_path, monkeypatch, there=there)
    logits = np.array([[1.0, 2.0, -np.inf], [0.5, -3.0, 0.25]], np.float32)
    found = logit_sums_of(Tensor(logits))
    expected = (np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2).sum()
    assert (found.tokens, float(found.squares), float(found.greatest)) == (2, pytest.approx(expected, rel=1e-6), 2.0)
    logits[1, 1] = np.nan
    broken = logit_sums_of(Tensor(logits))
    assert np.isnan([float(broken.squares), float(broken.greatest)]).all()


@pytest.mark.parametrize("there", [False, True], ids=["host", "device"])
def test_numbers_of_experts_are_told_from_a_mask_of_the_same_shape(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    as_measured(tmp_path, monkeypatch, there=there)
    cell = nn.Cell()
    cell.num_experts, cell.top_k = 3, 1
    chosen = Tensor(np.array([[0, 1, 1], [1, 1, 1], [0, 2, 0]], np.int32))
    numbers, mask = (choices_of(cell, chosen, RouterCall(tokens=tokens)).counts.asnumpy().tolist() for tokens in (9, 3))
    assert (numbers, mask) == ([3, 5, 1], [1, 3, 2])
    with pytest.raises(NotARouterError):
        choices_of(cell, chosen, RouterCall())


@pytest.mark.parametrize("there", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_numbers_of_all_experts_are_no_mask_in_which_the_first_expert_is_missing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, there: bool, dtype: type
) -> None:
    as_measured(tmp_path, monkeypatch, there=there)
    cell = nn.Cell()
    cell.num_experts = 3
    every = np.array([[0, 1, 2], [2, 0, 1]] * 2, dtype)
    assert choices_of(cell, Tensor(every), RouterCall(tokens=4)).counts.asnumpy().tolist() == [4, 4, 4]
    cell.num_experts = 2
    with pytest.raises(NotARouterError):
        choices_of(cell, Tensor(every[:, :2] % 2), RouterCall(tokens=4))


def test_of_no_tokens_none_were_dropped_and_of_unknown_choices_it_is_unknown() -> None:
    cell = nn.Cell()
    cell.num_experts, cell.top_k, cell.capacity = EXPERTS, TOP, 1
    for none in (np.zeros((0, TOP), np.int32), np.zeros((0, EXPERTS), bool)):
        assert choices_of(cell, Tensor(none), RouterCall(tokens=0)).dropped == 0
    cell.top_k = None
    assert choices_of(cell, Tensor(np.ones((3, EXPERTS), bool)), RouterCall(tokens=3)).dropped is None


@pytest.mark.parametrize("dtype", [ms.bool_, ms.uint8, ms.int32], ids=str)
def test_a_mask_before_the_tokens_does_not_hide_them(dtype: ms.Type) -> None:
    cell = nn.Cell()
    cell.num_experts, cell.top_k = EXPERTS, TOP
    given = Tensor(np.ones((2, 3), np.int32)).to(dtype), Tensor(np.zeros((2, 3, 4), np.float32))
    chosen = Tensor(np.array([[[0, 1], [2, 1], [3, 4]], [[1, 0], [1, 2], [4, 1]]], np.int32))
    assert choices_of(cell, chosen, call_of(cell, given, {})).counts.asnumpy().tolist() == [2, 5, 2, 1, 2]


def test_a_result_that_does_not_say_how_many_experts_there_are_is_refused() -> None:
    result = Tensor(np.zeros((6, 2), np.float32)), Tensor(np.zeros((6, 2), np.int32))
    with pytest.raises(NotARouterError, match=UNKNOWN_EXPERTS):
        choices_of(nn.Cell(), result, RouterCall(tokens=6))
    cell = nn.Cell()
    cell.weight = Parameter(Tensor(np.zeros((8, 4), np.float32)))
    call = call_of(cell, (Tensor(np.zeros((6, 4), np.float32)),), {})
    assert choices_of(cell, result, call).counts.asnumpy().tolist() == [12, *[0] * 7]
