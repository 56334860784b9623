"""A module whose scores are not known for certain has no row of attention, and a warning gives the reason."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from definitions import attention_weights, entropy_and_greatest
from observing import drawn
from torch import Tensor, nn
from torch.nn import functional as F
from watching import Output, Row, attached, warnings_in

from monitor.recording.features.reading import NO_SOFTMAX, NOT_OPAQUE, PART_OF_QUERIES, SEVERAL, of_all_queries

SDPA = F.scaled_dot_product_attention
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows(output: Output, module: nn.Module, *given: Tensor, named: str = "attention", **called: Any) -> list[Row]:
    """Of a step in which ``module`` is called once."""
    model = nn.ModuleDict({"attention": module})
    optimizer = torch.optim.SGD([*model.parameters()] or [nn.Parameter(torch.zeros(1))], lr=0.0)
    asked: dict[str, Any] = {"l2_targets": {"attention_hook": [named]}, "sa_order": "b,s,h,d"}
    asked |= {"recording_l2_features": True, "ndigits": 17, "sa_heads": 0, "sa_batch_rows": 0}
    with attached(output, model, optimizer, **asked):
        model["attention"](*(one.requires_grad_() for one in given), **called).sum().backward()
        optimizer.step()
    return output.rows("attention_hook")


def has_no_row(reason: str, output: Output, caplog: pytest.LogCaptureFixture, module: nn.Module, *given: Tensor) -> bool:
    return rows(output, module, *given) == [] and f"attention_hook: {reason}" in warnings_in(caplog)[-1]


def values_of(row: Row) -> tuple[float, float]:
    return row.values["entropy"], row.values["softmax_max"]


class Core(nn.Module):
    """Is called with Q, K and V of shape (b, s, h, d); ``attend`` with shape (b, h, s, d)."""

    def __init__(self, attend: Attend, *inner: nn.Module) -> None:
        super().__init__()
        self.attend, self.inner = attend, nn.Sequential(*inner)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask_type: str = "") -> Tensor:
        del attn_mask_type
        return self.inner(self.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)))


class Layer(nn.Module):
    """Is called with tokens of shape (b, s, 8); ``attend`` with shape (b, 2, s, 4)."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.attend = nn.Linear(8, 24), attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.split(x))

    def split(self, x: Tensor) -> Tensor:
        return self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)


def with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([q @ k.mT, torch.ones(*q.shape[:3], 1)], -1).softmax(-1)[..., :-1] @ v


def in_a_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril().triu(-2)
    scores = torch.baddbmm(torch.zeros(1), q, k.mT, beta=0.0).masked_fill(~seen, -1e9)
    return scores.softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


def of_elements(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1).exp()
    return (weights.unsqueeze(-1) * v.unsqueeze(2)).sum(3)


OF_ITS_OWN: dict[str, Attend] = {
    "with a sink": with_sink,
    "in a window, 3-D": in_a_window,
    "einsum": by_einsum,
    "sigmoid": lambda q, k, v: (q @ k.mT).sigmoid() @ v,
    "linear": lambda q, k, v: (F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v),
    "element by element": of_elements,
    "operators": lambda q, k, v: torch.ops.aten.matmul(torch.ops.aten.matmul.default(q, k.mT), v),
    "of normalized factors": lambda q, k, v: F.layer_norm(q, q.shape[-1:]) * k + v,
}


@pytest.mark.parametrize("attend", OF_ITS_OWN.values(), ids=OF_ITS_OWN)
def test_arguments_are_not_read_if_the_module_computes_attention_itself(
    output: Output, caplog: pytest.LogCaptureFixture, attend: Attend
) -> None:
    q, k, v = (drawn(2, 6, 3, 8, seed=seed) for seed in range(3))
    assert has_no_row(NOT_OPAQUE, output, caplog, Core(attend), q, k, v)


class Mixing(nn.Module):
    """Both inputs are hidden states of shape (batch, frames, sequence, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        mixed: Tensor = self.inner(x.flatten(0, 1), context.flatten(0, 1), context.flatten(0, 1))[0]
        return mixed.view_as(x)


CLOSED: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: Core(lambda q, k, v: SDPA(q, k, v) + v, torch.compile(nn.Identity(), backend="eager")),
    "nn.MultiheadAttention": Mixing,
}


@pytest.mark.parametrize("build", CLOSED.values(), ids=CLOSED)
def test_arguments_are_not_read_if_the_calls_of_the_module_cannot_be(
    output: Output, caplog: pytest.LogCaptureFixture, build: Callable[[], nn.Module]
) -> None:
    module = build()
    given = [drawn(2, 6, 3, 8, seed=seed) for seed in range(2 if isinstance(module, Mixing) else 3)]
    assert has_no_row(NOT_OPAQUE, output, caplog, module, *given)


def test_arguments_are_read_there_too_if_the_mask_is_said_to_be_causal(output: Output) -> None:
    q, k, v = (drawn(2, 6, 3, 8, seed=seed) for seed in range(3))
    (row,) = rows(output, CLOSED["compiled"](), q, k, v, attn_mask_type="causal")
    weights = attention_weights(q.transpose(1, 2), k.transpose(1, 2))
    assert values_of(row) == pytest.approx(entropy_and_greatest(weights, 0, 0), rel=2e-6)


def in_chunks(attend: Attend) -> Attend:
    return lambda q, k, v: torch.cat([attend(part, k, v) for part in q.split(3, 2)], 2)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(("attend", "reason"), [(SDPA, PART_OF_QUERIES), (written_out, SEVERAL)], ids=["sdpa", "softmax"])
@pytest.mark.parametrize("core", [False, True])
def test_queries_in_chunks_are_not_taken_for_all_queries(
    output: Output, caplog: pytest.LogCaptureFixture, attend: Attend, reason: str, *, core: bool
) -> None:
    given = [drawn(2, 9, 4, 8, seed=seed) for seed in range(3)] if core else [drawn(2, 9, 8)]
    module = Core(in_chunks(attend)) if core else Layer(in_chunks(attend))
    assert has_no_row(reason, output, caplog, module, *given)


def test_one_chunk_that_a_softmax_covers_is_not_taken_for_all_queries(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    def first_of_them(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([written_out(q[:, :, :3], k, v), v[:, :, 3:]], 2)

    assert has_no_row(PART_OF_QUERIES, output, caplog, Layer(first_of_them), drawn(2, 9, 8))


@pytest.mark.parametrize(
    ("given", "batch", "queries", "all_of_them"),
    [
        ((2, 9, 8), 2, 9, True),
        ((9, 2, 8), 2, 9, True),
        ((2, 9, 8), 2, 3, False),
        ((9, 2, 8), 2, 3, False),
        ((9, 9, 8), 9, 9, True),
        ((2, 9, 8), 6, 3, True),  # three windows of each row
        ((2, 9, 8), 2, 10, True),  # with a token for the class
        ((2, 4, 9, 8), 2, 9, True),
        ((2, 9, 4, 8), 2, 3, False),
    ],
)
def test_queries_are_a_part_if_they_are_fewer_than_the_tokens_of_a_row(
    given: tuple[int, ...], batch: int, queries: int, *, all_of_them: bool
) -> None:
    assert of_all_queries(given, batch, queries) == all_of_them


class Gated(Layer):
    """The weights of a mixture are a softmax over products with a weight, of the shape of scores."""

    def __init__(self, attend: Attend, weight_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__(attend)
        self.weight, self.weight_of = nn.Parameter(drawn(1, 2, 4, 6)), weight_of

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        gates = (q @ self.weight_of(self.weight)).softmax(-1)
        return self.attend(q, k, v) * gates.amax(-1, keepdim=True)


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": lambda weight: weight,
    "view": lambda weight: weight[0],
    "expanded": lambda weight: weight.expand(2, -1, -1, -1),
    "computed": lambda weight: weight * 2,
}


@pytest.mark.parametrize("weight_of", WEIGHTS.values(), ids=WEIGHTS)
def test_products_with_a_weight_are_no_scores(output: Output, weight_of: Callable[[Tensor], Tensor]) -> None:
    module, x = Gated(lambda q, k, v: SDPA(q, k, v, is_causal=True), weight_of), drawn(2, 6, 8)
    (row,) = rows(output, module, x)
    with torch.no_grad():
        q, k, _ = module.split(x)
    assert values_of(row) == pytest.approx(entropy_and_greatest(attention_weights(q, k), 0, 0), rel=2e-6)


def test_a_softmax_over_products_with_a_weight_alone_is_no_attention(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    module = Gated(lambda q, k, v: q + k + v, WEIGHTS["parameter"])
    assert has_no_row(NO_SOFTMAX, output, caplog, module, drawn(2, 6, 8))


def test_scores_are_not_kept_until_the_module_returns(output: Output) -> None:
    alive: list[bool] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        kept, weights = weakref.ref(scores), scores.softmax(-1)
        del scores
        alive.append(kept() is not None)
        return weights @ v

    assert len(rows(output, Layer(attend), drawn(2, 6, 8))) == 1
    assert alive == [False]


def test_a_softmax_before_a_forward_raises_has_no_row(output: Output) -> None:
    class Raising(Layer):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            if not self.raised:
                self.raised = True
                written_out(9 * q, k, v)
                raise KeyError("the user's")
            return written_out(q, k, v)

        raised = False

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Raising(written_out)

        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(KeyError, match="the user's"):
                self.inner(x)
            return self.inner(x)

    module, x = Again(), drawn(2, 6, 8)
    found = rows(output, module, x, named="attention.inner")
    with torch.no_grad():
        q, k, _ = module.inner.split(x)
    expected = entropy_and_greatest(attention_weights(q, k, causal=False, scale=1.0), 0, 0)
    assert [values_of(row) for row in found] == [pytest.approx(expected, rel=2e-6)]


class Nested(nn.Module):
    """Attention over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (2, 4)).transpose(1, 2) for one in self.projections)
        return SDPA(q, k, v).transpose(1, 2).flatten(-2)


def test_of_nested_sequences_the_warning_says_that_they_are_nested(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Nested())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    features = {hook: ["0"] for hook in ("attention_hook", "activation_hook")}
    with attached(output, model, optimizer, recording_l2_features=True, l2_targets=features):
        sequences = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged)
        model(sequences).values().sum().backward()
        optimizer.step()
    said = warnings_in(caplog)[-1]
    assert "attention_hook: its Q and K are split over ranks along the sequence, are nested, or have no elements: '0'" in said
    assert "activation_hook: its output is nested, " in said
