"""What looks for Q and K is there while the module's forward runs, and at no other time; it changes nothing."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from definitions import attention_weights, entropy_and_greatest
from observing import drawn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from watching import Output, attached, warnings_in

FORMAT: dict[str, Any] = {"recording_l2_features": True, "ndigits": 17, "ops": ["norm"]}


class Attention(nn.Module):
    """Of inputs of shape (b, h, s, d), which are Q, K and V at once."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        q = x * self.scale
        mixed = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return mixed if self.inner is None else self.inner(mixed)


class Raising(Attention):
    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            self.inner(x)
        raise KeyError("the user's")


class Interrupted(Attention):
    def forward(self, x: Tensor) -> Tensor:
        del x
        raise KeyboardInterrupt


class Seen(TorchFunctionMode):
    """A mode of the user's."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def watched(output: Output, model: nn.Module, *names: str, **config: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    targets = {"attention_hook": list(names)}
    return attached(output, model, optimizer, **{**FORMAT, "l2_targets": targets, **config}), optimizer


def depth() -> int:
    return torch._C._len_torch_function_stack()


def test_a_forward_that_raises_leaves_no_mode_behind(output: Output) -> None:
    model = nn.ModuleList([Raising(Attention()), Attention()])
    monitor, optimizer = watched(output, model, "0", "0.inner", "1")
    with monitor:
        with pytest.raises(KeyError, match="the user's"):
            model[0](drawn(1, 2, 4, 4))
        assert depth() == 0
        model[1](drawn(1, 2, 4, 4)).sum().backward()
        optimizer.step()
    # What the first of them had found before it failed was measured.
    assert sorted(row.name for row in output.rows("attention_hook")) == ["0.attention", "0.inner.attention", "1.attention"]


def test_an_interruption_leaves_no_mode_behind_the_step(output: Output) -> None:
    model = nn.ModuleList([Interrupted(), Attention()])
    monitor, optimizer = watched(output, model, "0", "1")
    with monitor:
        with pytest.raises(KeyboardInterrupt):
            model[0](drawn(1, 2, 4, 4))
        model[1](drawn(1, 2, 4, 4)).sum().backward()
        optimizer.step()
        assert depth() == 0
    assert "1.attention" in {row.name for row in output.rows("attention_hook")}


def test_attention_within_attention_has_its_own_row(output: Output) -> None:
    model, x = Attention(Attention()), drawn(1, 2, 5, 4)
    monitor, optimizer = watched(output, model, "", "inner")
    with monitor:
        model(x).sum().backward()
        optimizer.step()
    found = {row.name: row.values["entropy"] for row in output.rows("attention_hook")}
    within = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert found == {
        ".attention": pytest.approx(entropy_and_greatest(attention_weights(x, x))[0], rel=1e-6),
        "inner.attention": pytest.approx(entropy_and_greatest(attention_weights(within, within))[0], rel=1e-6),
    }


def test_a_mode_of_the_users_sees_what_it_always_saw(output: Output) -> None:
    model, x = nn.Sequential(Attention(), nn.Linear(4, 4)), drawn(1, 2, 5, 4)

    def names() -> list[str]:
        with Seen() as seen:
            model(x).sum().backward()
        return seen.names

    targets = {"attention_hook": ["0"], "linear_hook": ["1"], "moe_router_logit_hook": ["1"]}
    seen: dict[bool, list[str]] = {}
    for wanted in (False, True):
        monitor, optimizer = watched(output, model, recording_l2_features=wanted, l2_targets=targets)
        with monitor:
            seen[wanted] = names()
            optimizer.step()
    assert seen[True] == seen[False]
    assert "scaled_dot_product_attention" in seen[True]
    assert sum(len(output.rows("attention_hook", one)) for one in output.directories()) == 1


def test_a_mode_that_is_entered_in_a_forward_and_left_later_stays_where_it_is(output: Output) -> None:
    class Entering(Attention):
        def forward(self, x: Tensor) -> Tensor:
            mode.__enter__()
            return super().forward(x)

    mode, model = Seen(), Entering()
    monitor, optimizer = watched(output, model, "")
    with monitor:
        result = model(drawn(1, 2, 5, 4))
        assert torch._C._get_function_stack_at(0) is mode
        assert depth() == 1
        mode.__exit__(None, None, None)
        result.sum().backward()
        optimizer.step()
    assert len(output.rows("attention_hook")) == 1


def test_two_monitors_of_one_model_do_not_disturb_each_other(output: Output) -> None:
    model = Attention()
    first, optimizer = watched(output, model, "")
    second, _ = watched(output, model, "")
    with first, second:
        model(drawn(1, 2, 5, 4)).sum().backward()
        assert depth() == 0
        optimizer.step()


def test_a_compiled_function_within_computes_the_same_and_breaks_nothing(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.fused = torch.compile(
                lambda x: F.scaled_dot_product_attention(x, x, x) + 1, backend="aot_eager", fullgraph=True
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.fused(x * self.scale)

    model, x = Compiled(), drawn(1, 2, 5, 4)
    expected = model(x)
    monitor, optimizer = watched(output, model, "")
    with monitor:
        for _ in range(2):
            result = model(x)
            assert torch.equal(result, expected)
            result.sum().backward()
            optimizer.step()
    assert output.rows("attention_hook") == []
    assert "no Q and K were found" in warnings_in(caplog)[0]


def test_the_attention_of_a_compiled_model_has_no_rows_and_that_is_said(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    inner, x = Attention(), drawn(1, 2, 5, 4)
    model = torch.compile(nn.Sequential(inner, nn.Linear(4, 4)), backend="eager", fullgraph=True)
    targets = {"attention_hook": ["0"], "linear_hook": ["1"]}
    monitor, optimizer = watched(output, model, l2_targets=targets)
    with monitor:
        model(x).sum().backward()
        optimizer.step()
    assert "its backend does not show its calls: '0'" in warnings_in(caplog)[-1]
    assert output.rows("attention_hook") == []
    assert [row.name for row in output.rows("linear_hook")] == ["1.linear"]


def test_no_tensor_outlives_the_call(output: Output) -> None:
    class Kept(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q = x * self.scale
            kept.append(weakref.ref(q))
            with torch.no_grad():
                return F.scaled_dot_product_attention(q, q, q) + self.scale

    kept: list[weakref.ref[Tensor]] = []
    model = nn.Sequential(Kept(), nn.Linear(4, 4))
    hooks = {"attention_hook": ["0"], "linear_hook": [], "moe_router_logit_hook": ["1"]}
    monitor, _ = watched(output, model, l2_targets=hooks)
    with monitor, torch.no_grad():
        pass
    monitor, optimizer = watched(output, model, l2_targets=hooks)
    with monitor:
        result = weakref.ref(model(drawn(1, 2, 5, 4)))
        assert kept[0]() is None
        assert result() is None
        optimizer.step()


def test_a_failure_of_ours_does_not_reach_training(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("ours")

    for name in ("spread", "entropy_of", "similarity_of_rows"):
        monkeypatch.setattr(f"monitor.pytorch.features.reading.{name}", broken)
    monkeypatch.setattr("monitor.pytorch.features.reading.norms_of", broken)
    model = nn.Sequential(Attention(), nn.Linear(4, 4))
    hooks = ("linear_hook", "moe_router_weight_hook", "moe_router_logit_hook")
    monitor, optimizer = watched(output, model, l2_targets={"attention_hook": ["0"], **{hook: ["1"] for hook in hooks}})
    with monitor:
        model(drawn(1, 2, 5, 4)).sum().backward()
        optimizer.step()
    assert depth() == 0
    assert len([said for said in warnings_in(caplog) if "RuntimeError('ours')" in said]) == 3
