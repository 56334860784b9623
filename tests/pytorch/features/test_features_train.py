"""A model that trains leaves rows of features: of the right calls, under the right names, with the right numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from definitions import attention_weights, entropy_and_greatest, entropy_per_token, similarity
from observing import drawn, small_gpt, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from watching import Output, Row, attached, footprint, warnings_in

FORMAT: dict[str, Any] = {"recording_l2_features": True, "ndigits": 17, "ops": ["norm"]}
SDPA = F.scaled_dot_product_attention


class CoreAttention(nn.Module):
    """Is called with Q and K of shape (s, b, h, d) or (b, s, h, d), as Megatron's core attention is."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query * key.mean() + value.mean()


class Attention(nn.Module):
    """``attend`` is given q, k, v of shape (b, h, s, d)."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.attend, self.heads = attend, heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return x + self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width)

    def weights(self, x: Tensor, **how: Any) -> Tensor:
        """By definition, of the same input."""
        with torch.no_grad():
            q, k, _ = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return attention_weights(q, k, **how)


class Gate(nn.Module):
    """A router that returns what was made of its logits."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden))
        self.bias = nn.Parameter(torch.randn(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shares = torch.softmax(F.linear(x, self.weight, self.bias), -1)
        return *torch.topk(shares, 1), shares


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, is_causal=True)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5
    return torch.softmax(scores + torch.full(scores.shape[2:], -math.inf).triu(1), -1) @ v


def rows(
    output: Output, kind: str, model: nn.Module, run: Callable[[], object], grad_acc_steps: int = 1, **config: Any
) -> list[Row]:
    """One step in which ``run`` does forward and backward."""
    optimizer = torch.optim.SGD([*model.parameters()] or [nn.Parameter(torch.zeros(1))], lr=0.0)
    with attached(output, model, optimizer, grad_acc_steps, **FORMAT, **config):
        run()
        optimizer.step()
    return output.rows(kind)


def attention_rows(output: Output, model: nn.Module, run: Callable[[], object], *names: str, **config: Any) -> list[Row]:
    return rows(output, "attention_hook", model, run, l2_targets={"attention_hook": list(names)}, **config)


def attention(seed: int = 0, attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), Attention(attend), Attention(attend))


def spread_of(row: Row) -> tuple[float, float]:
    assert list(row.values) == ["entropy", "softmax_max"]
    return row.values["entropy"], row.values["softmax_max"]


@pytest.mark.parametrize("order", ["s,b,h,d", "b,s,h,d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_name", [True, False])
def test_q_and_k_are_what_a_core_attention_is_called_with(
    output: Output, order: str, dtype: torch.dtype, *, by_name: bool
) -> None:
    model = nn.ModuleDict({"core_attention": CoreAttention()})
    query, key = drawn(5, 5, 4, 8).to(dtype).requires_grad_(), drawn(5, 5, 2, 8, seed=2).to(dtype)
    names = {"query": query, "key": key, "value": query}

    def run() -> None:
        core = model["core_attention"]
        (core(**names) if by_name else core(*names.values())).sum().backward()

    (row,) = attention_rows(output, model, run, "core_attention", sa_order=order, sa_heads=0, sa_batch_rows=0)
    layout = (1, 2, 0, 3) if order == "s,b,h,d" else (0, 2, 1, 3)
    expected = entropy_and_greatest(attention_weights(query.permute(layout), key.permute(layout)), 0, 0)
    assert (row.name, row.step, row.micro_step) == ("core_attention.attention", 0, 0)
    assert spread_of(row) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("given", ["no_mask", "padding"])
def test_a_core_attention_with_another_mask_than_a_causal_one_has_no_row(
    output: Output, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    class Masked(CoreAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask_type: str) -> Tensor:
            del attn_mask_type
            return super().forward(query, key, value)

    model, x = nn.ModuleDict({"core": Masked()}), drawn(5, 5, 4, 8).requires_grad_()
    assert attention_rows(output, model, lambda: model["core"](x, x, x, attn_mask_type=given).sum().backward(), "core") == []
    assert "its Q and K are arguments, and its mask is not causal: 'core'" in warnings_in(caplog)[0]


class ComputingCore(nn.Module):
    """Is called with Q, K and V of shape (b, s, h, d), and computes an attention that is not causal."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask_type: str = "") -> Tensor:
        del attn_mask_type
        q, k, v = (one.transpose(1, 2) for one in (query, key, value))
        return torch.softmax(q @ k.mT * 0.7, -1) @ v


@pytest.mark.parametrize("given", [{}, {"attn_mask_type": "padding"}])
@pytest.mark.parametrize("keys", [5, 7])
def test_a_core_attention_that_computes_its_scores_is_read_where_it_does(output: Output, given: Any, keys: int) -> None:
    model, q, k = nn.ModuleDict({"core": ComputingCore()}), drawn(2, 5, 4, 8).requires_grad_(), drawn(2, keys, 4, 8, seed=2)
    asked = {"sa_order": "b,s,h,d", "sa_heads": 0, "sa_batch_rows": 0}
    (row,) = attention_rows(output, model, lambda: model["core"](q, k, k, **given).sum().backward(), "core", **asked)
    weights = attention_weights(q.transpose(1, 2), k.transpose(1, 2), causal=False, scale=0.7)
    assert spread_of(row) == pytest.approx(entropy_and_greatest(weights, 0, 0), rel=2e-6)


def test_q_and_k_that_a_core_attention_changes_are_not_read_afterwards(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    class Rotating(CoreAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with torch.no_grad():
                query.neg_()
            return super().forward(query, key, value)

    model, x = nn.ModuleDict({"core": Rotating()}), drawn(5, 5, 4, 8)
    key = drawn(5, 5, 4, 8, seed=2).requires_grad_()
    assert attention_rows(output, model, lambda: model["core"](x, key, key).sum().backward(), "core") == []
    assert "its Q and K were changed in its forward: 'core'" in warnings_in(caplog)[0]


HOW: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "causal": (causal, {}),
    "not causal": (SDPA, {"causal": False}),
    "scale": (lambda q, k, v: SDPA(q, k, v, is_causal=True, scale=1.5), {"scale": 1.5}),
    "boolean mask": (
        lambda q, k, v: SDPA(q, k, v, attn_mask=torch.ones(6, 6, dtype=torch.bool).tril(2)),
        {"causal": False, "mask": torch.ones(6, 6, dtype=torch.bool).tril(2)},
    ),
    "added mask": (lambda q, k, v: SDPA(q, k, v, drawn(6, 6)), {"causal": False, "mask": drawn(6, 6)}),
    "written out": (written_out, {}),
    "torch.matmul": (lambda q, k, v: torch.matmul(torch.softmax(torch.matmul(q, k.mT) / 2, -1), v), {"causal": False}),
    "Tensor.matmul": (
        lambda q, k, v: q.matmul(k.transpose(-1, -2)).softmax(-1).matmul(v),
        {"causal": False, "scale": 1.0},
    ),
    "F.softmax": (
        lambda q, k, v: F.softmax((q @ k.mT).add(drawn(6, 6)), dim=3, dtype=torch.float64).float() @ v,
        {"causal": False, "scale": 1.0, "mask": drawn(6, 6)},
    ),
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_q_and_k_are_what_a_module_hands_to_torch(output: Output, how: tuple[Any, dict[str, Any]]) -> None:
    attend, defined = how
    model, x = attention(attend=attend), drawn(3, 6, 8)
    found = attention_rows(output, model, lambda: model(x).sum().backward(), "1", "2", sa_heads=0, sa_batch_rows=0)
    first = model[0](x)
    expected = [model[1].weights(first, **defined), model[2].weights(model[1](first), **defined)]
    assert [row.name for row in found] == ["1.attention", "2.attention"]
    for row, weights in zip(found, expected, strict=True):
        assert spread_of(row) == pytest.approx(entropy_and_greatest(weights, 0, 0), rel=2e-6)


def test_grouped_queries_share_their_keys(output: Output) -> None:
    model = Attention(lambda q, k, v: SDPA(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True))
    x = drawn(2, 5, 8)
    (row,) = attention_rows(output, model, lambda: model(x).sum().backward(), "", sa_heads=0, sa_batch_rows=0)
    with torch.no_grad():
        q, k, _ = model.qkv(x).view(2, 5, 3, 2, -1).permute(2, 0, 3, 1, 4)
    assert spread_of(row) == pytest.approx(entropy_and_greatest(attention_weights(q, k[:, :1]), 0, 0), rel=2e-6)


@pytest.mark.parametrize(("heads", "batch_rows"), [(None, None), (1, 2), (2, 1), (0, 1), (9, 9)])
def test_the_sample_is_what_was_asked_for(output: Output, heads: int | None, batch_rows: int | None) -> None:
    asked = {} if heads is None else {"sa_heads": heads, "sa_batch_rows": batch_rows}
    model, x = Attention(causal), drawn(3, 6, 8)
    (row,) = attention_rows(output, model, lambda: model(x).sum().backward(), "", **asked)
    sample = (heads if heads is not None else 1, batch_rows if batch_rows is not None else 1)
    assert spread_of(row) == pytest.approx(entropy_and_greatest(model.weights(x), *sample), rel=2e-6)


def test_calls_and_micro_steps_are_distinguished(output: Output) -> None:
    model = attention()
    twice = nn.Sequential(model[1], model[1])

    def run() -> None:
        for seed in range(3):
            twice(drawn(2, 4, 8, seed=seed)).sum().backward()

    found = rows(output, "attention_hook", twice, run, 3, l2_targets={"attention_hook": ["0"]})
    assert [(row.name, row.micro_step) for row in found] == [
        place for step in range(3) for place in (("0.attention", step), ("0.attention#1", step))
    ]
    for row in found:
        x = drawn(2, 4, 8, seed=row.micro_step or 0)
        x = model[1](x) if row.name.endswith("#1") else x
        assert spread_of(row) == pytest.approx(entropy_and_greatest(model[1].weights(x)), rel=2e-6)


def test_micro_steps_combine_to_the_mean_over_their_queries(output: Output) -> None:
    model = Attention(causal)
    lengths = (4, 9)

    def run() -> None:
        for length in lengths:
            model(drawn(1, length, 8, seed=length)).sum().backward()

    wanted = {"l2_targets": {"attention_hook": [""]}, "micro_steps": "combined"}
    (row,) = rows(output, "attention_hook", model, run, 2, **wanted)
    means = [entropy_and_greatest(model.weights(drawn(1, length, 8, seed=length))) for length in lengths]
    expected = [sum(mean[i] * n for mean, n in zip(means, lengths, strict=True)) / sum(lengths) for i in range(2)]
    assert spread_of(row) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_not_recorded_again(output: Output, *, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gate = nn.Sequential(*attention()[1:]), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(checkpoint(self.first, x, use_reentrant=reentrant))

    model, x = Checkpointed(), drawn(2, 4, 8).requires_grad_()
    targets = {"attention_hook": ["first.0", "first.1"], "linear_hook": [], "moe_router_logit_hook": ["gate"]}
    found = rows(output, "attention_hook", model, lambda: model(x).sum().backward(), l2_targets=targets)
    assert [(row.name, row.micro_step) for row in found] == [("first.0.attention", 0), ("first.1.attention", 0)]
    assert len(output.rows("linear_hook")) == 3
    assert len(output.rows("moe_router_logit_hook")) == 1
    assert torch._C._len_torch_function_stack() == 0


def test_evaluation_has_no_rows(output: Output) -> None:
    model, x = attention(), drawn(2, 4, 8)

    def run() -> None:
        with torch.no_grad():
            model(2 * x)
        model.eval()
        model(3 * x)
        model.train()
        model(x).sum().backward()

    (row,) = attention_rows(output, model, run, "1")
    assert spread_of(row) == pytest.approx(entropy_and_greatest(model[1].weights(model[0](x))), rel=2e-6)


def test_steps_that_are_not_collected_are_left_alone(output: Output) -> None:
    model, x = attention(), drawn(2, 4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    modes: list[int] = []
    model[2].register_forward_pre_hook(lambda *_: modes.append(torch._C._len_torch_function_stack()))
    targets = {"attention_hook": ["2"], "linear_hook": ["0"]}
    with attached(output, model, optimizer, **FORMAT, step_interval=2, l2_targets=targets):
        for _ in range(4):
            attend = model[2].attend
            model[2].attend = lambda q, k, v, attend=attend: (
                modes.append(torch._C._len_torch_function_stack()),
                attend(q, k, v),
            )[1]
            model(x).sum().backward()
            optimizer.step()
            model[2].attend = attend
    assert modes == [0, 1, 0, 0, 0, 1, 0, 0]
    assert [row.step for row in output.rows("attention_hook")] == [0, 2]
    assert [row.step for row in output.rows("linear_hook")] == [0, 2]


def test_weights_have_their_norms_before_the_first_forward_of_each_step(output: Output) -> None:
    torch.manual_seed(0)
    model = small_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected: list[dict[str, Tensor]] = []
    with attached(output, model, optimizer, 2, **FORMAT, l2_targets={"linear_hook": []}):
        for _ in range(3):
            linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
            expected.append({name: torch.linalg.svdvals(linear.weight.detach().double()) for name, linear in linears.items()})
            for _ in range(2):
                model(tokens()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = output.rows("linear_hook")
    assert [(row.step, row.name) for row in found] == [
        (step, f"{name}.linear") for step, linears in enumerate(expected) for name in linears
    ]
    for row in found:
        values = expected[row.step][row.name.removesuffix(".linear")]
        frobenius, spectral = values.norm().item(), values[0].item()
        assert list(row.values) == ["sr", "kernel_norm", "frobenius_norm"]
        assert row.values["frobenius_norm"] == pytest.approx(frobenius, rel=1e-6)
        assert row.values["kernel_norm"] == pytest.approx(spectral, rel=5e-3)
        assert row.values["sr"] == pytest.approx(frobenius / spectral, rel=5e-3)


class VocabParallelEmbedding(nn.Module):
    """As Megatron calls what is no ``nn.Embedding``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Gated(nn.Module):
    """A layer that calls its matrix ``wg``."""

    def __init__(self) -> None:
        super().__init__()
        self.wg = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.wg


def test_an_empty_list_chooses_what_has_a_matrix_and_embeds_nothing(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(
        nn.Embedding(5, 4),
        VocabParallelEmbedding(),
        Gated(),
        nn.LayerNorm(4),
        nn.Unflatten(1, (1, 4)),
        nn.Conv1d(1, 2, 1),
        nn.PReLU(),
    )
    found = rows(
        output, "linear_hook", model, lambda: model(torch.tensor([1, 2])).sum().backward(), l2_targets={"linear_hook": []}
    )
    assert {row.name: row.values["kernel_norm"] for row in found} == {"2.linear": pytest.approx(1.0, rel=1e-6)}
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("targets", [{}, {"linear_hook": None}])
def test_without_targets_there_is_nothing_and_that_is_said(
    output: Output, caplog: pytest.LogCaptureFixture, targets: dict[str, Any]
) -> None:
    model = nn.Linear(4, 4)
    assert rows(output, "linear_hook", model, lambda: model(drawn(2, 4)).sum().backward(), l2_targets=targets) == []
    assert "l2_targets is empty" in warnings_in(caplog)[0]


def test_a_weight_that_is_not_finite_has_no_rank(output: Output) -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[1, 2] = math.nan
    (row,) = rows(output, "linear_hook", model, lambda: model(drawn(2, 4)).sum().backward(), l2_targets={"linear_hook": []})
    assert all(math.isnan(value) for value in row.values.values())


def test_a_weight_of_zeros_has_norms_and_no_rank(output: Output) -> None:
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.weight)
    (row,) = rows(output, "linear_hook", model, lambda: model(drawn(2, 4)).sum().backward(), l2_targets={"linear_hook": []})
    assert row.values == {"sr": None, "kernel_norm": 0.0, "frobenius_norm": 0.0}


@pytest.mark.parametrize("gate", [lambda: nn.Linear(8, 6), lambda: Gate(8, 6)], ids=["returns logits", "returns shares"])
def test_routers_have_both_of_their_features(output: Output, gate: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"router": gate()})
    hooks = ("moe_router_weight_hook", "moe_router_logit_hook")
    x = [drawn(3, 5, 8, seed=seed) for seed in range(2)]

    def run() -> None:
        for one in x:
            result = model["router"](one)
            (result if isinstance(result, Tensor) else result[0]).square().sum().backward()

    (alike,) = rows(output, hooks[0], model, run, l2_targets={hook: ["router"] for hook in hooks})
    assert (alike.name, alike.micro_step) == ("router.moe_router", None)
    assert alike.values == {"router_weight_similarity": pytest.approx(similarity(model["router"].weight), rel=1e-9)}
    found = output.rows(hooks[1])
    assert [(row.name, row.micro_step) for row in found] == [("router.moe_router", 0), ("router.moe_router#1", 0)]
    for row, one in zip(found, x, strict=True):
        logits = F.linear(one, model["router"].weight, model["router"].bias)
        assert row.values == {"per_token_expert_entropy": pytest.approx(entropy_per_token(logits), rel=1e-6)}


def test_logits_that_are_computed_are_rounded_as_autocast_rounds_those_of_the_router(output: Output) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"router": Gate(8, 6)}).float(), drawn(3, 5, 8).float()

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            result = model["router"](x)
        result[0].square().sum().backward()

    (row,) = rows(output, "moe_router_logit_hook", model, run, l2_targets={"moe_router_logit_hook": ["router"]})
    with torch.autocast("cpu", torch.bfloat16):
        rounded = F.linear(x, model["router"].weight, model["router"].bias)
    assert rounded.dtype == torch.bfloat16
    assert row.values == {"per_token_expert_entropy": pytest.approx(entropy_per_token(rounded.double()), rel=1e-6)}


def test_what_does_not_fit_is_named_in_one_warning(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    cross = Attention(lambda q, k, v: (q @ k[:, :, :2].mT) @ v[:, :, :2])
    model = nn.ModuleDict({"cross": cross, "norm": nn.LayerNorm(8), "unused": nn.Linear(8, 8), "one": nn.Linear(8, 1)})
    targets = {
        "attention_hook": ["cross", "norm"],
        "linear_hook": ["norm", "unused", "one"],
        "moe_router_weight_hook": ["one", "norm"],
        "moe_router_logit_hook": ["norm", "one"],
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, **FORMAT, l2_targets=targets):
        for _ in range(3):
            model["one"](model["norm"](cross(drawn(2, 4, 8)))).sum().backward()
            optimizer.step()
    (said,) = warnings_in(caplog)
    for part in (
        "attention_hook: no softmax over the product of its Q and K was found: 'cross'",
        "attention_hook: no Q and K were found: 'norm'",
        "linear_hook: it has no floating-point 2-D weight that this rank can read in forward: 'norm'",
        "linear_hook: it was not called in training mode, or is compiled: 'unused'",
        "moe_router_weight_hook: it has fewer than two experts: 'one'",
        "moe_router_logit_hook: its logits were not found: 'norm', 'one'",
    ):
        assert part in said
    assert {row.name for row in output.rows("linear_hook")} == {"one.linear"}


def test_a_target_that_is_no_module_is_named_with_what_may_have_been_meant(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_gpt()
    targets = {"attention_hook": ["h.0.atn"], "linear_hook": ["0:head", "1:head", "module.h.1.mlp.0"]}
    found = rows(output, "linear_hook", model, lambda: model(tokens()).sum().backward(), l2_targets=targets)
    assert [row.name for row in found] == ["h.1.mlp.0.linear", "head.linear"]
    (said,) = warnings_in(caplog)
    assert "attention_hook: 'h.0.atn' (nearest: 'h.0.attn'" in said
    assert "linear_hook: '1:head'" in said


def test_short_names_are_used_where_names_are_shortened(output: Output) -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8)])})})
    run = lambda: model["encoder"]["layers"][0](drawn(2, 8)).sum().backward()  # noqa: E731
    (row,) = rows(output, "linear_hook", model, run, squash_name=True, l2_targets={"linear_hook": ["encoder.layers.0"]})
    assert row.name == "0.linear"


def test_everything_is_taken_away_in_the_end(output: Output) -> None:
    model = attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = footprint(model, optimizer)
    targets = {
        hook: ["0", "1", "2"] for hook in ("attention_hook", "linear_hook", "moe_router_weight_hook", "moe_router_logit_hook")
    }
    with attached(output, model, optimizer, **FORMAT, l2_targets=targets):
        model(drawn(2, 4, 8)).sum().backward()
        optimizer.step()
        assert footprint(model, optimizer) != before
    assert footprint(model, optimizer) == before
