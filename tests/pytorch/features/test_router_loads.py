"""How many tokens go to each expert, against what hooks of these tests count and what the models say themselves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from observing import drawn
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn import functional as F
from watching import Output, Row, attached, warnings_in

from monitor.pytorch.features.choices import choices_of, confirmed, count_indices, counts_of
from monitor.pytorch.features.reading import call_of, entropy_of, logit_sums_from, logit_sums_of, logits_from
from monitor.recording.features.reading import (
    ANOTHER_CHOICE,
    OTHER_MAP,
    PART_OF_CHOICE,
    UNCLEAR_CHOICE,
    UNKNOWN_EXPERTS,
    NotARouterError,
    RouterCall,
)

KIND = "moe_router_load_hook"
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4))


def qwen2() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, num_experts=6, shared_expert_intermediate_size=16))


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=4, head_dim=8))


def deepseek() -> nn.Module:
    """Sigmoid scores with a correction, of two groups of four: the greatest logits are not what it chooses."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    fields = {**SMALL, **GROUPED, "num_key_value_heads": 4}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**fields))
    for layer in model.model.layers:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(0, 0.3, 8))
        nn.init.normal_(layer.mlp.gate.weight, std=0.5)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mixtral": (mixtral, "gate"),
    "qwen2": (qwen2, "gate"),
    "gpt_oss": (gpt_oss, "router"),
    "deepseek": (deepseek, "gate"),
}
STEPS, MICRO_STEPS = 2, 2


class Seen:
    """What the routers of a model chose, counted one by one, and their logits in float64."""

    def __init__(self, model: nn.Module, routers: list[str]) -> None:
        self.counts: list[Counter[int]] = []
        self.logits: list[Tensor] = []
        for name in routers:
            model.get_submodule(name).register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: tuple[Tensor, ...], result: tuple[Tensor, ...]) -> None:
        self.counts.append(Counter(expert for token in result[2].tolist() for expert in token))
        tokens, bias = args[0].detach().double().flatten(0, -2), getattr(module, "bias", None)
        self.logits.append(tokens @ module.weight.detach().double().T + (0.0 if bias is None else bias.detach().double()))


def there(row: Row) -> dict[str, Any]:
    """The values of a row without those that are missing."""
    return {name: value for name, value in row.values.items() if value is not None}


def by_router(rows: list[Row]) -> list[tuple[Row, list[Row]]]:
    """The row of each router's call, and those of its experts, which follow it."""
    found: list[tuple[Row, list[Row]]] = []
    for row in rows:
        if row.name.endswith(".experts"):
            found.append((row, []))
        else:
            found[-1][1].append(row)
    return found


def assert_call(router: Row, experts: list[Row], counts: Counter[int], logits: Tensor) -> None:
    every, total = [counts[expert] for expert in range(logits.shape[1])], sum(counts.values())
    assert [row.name for row in experts] == [f"{router.name}.{expert}" for expert in range(len(every))]
    for row, count in zip(experts, every, strict=True):
        assert there(row) == {"load": pytest.approx(count / total, rel=1e-15), "assigned": count}
    loads = torch.tensor(every, dtype=torch.float64) / total
    percentiles = torch.quantile(loads, torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
    assert there(router) == {
        "assigned": total,
        **dict(zip(("load_p05", "load_p50", "load_p95"), map(pytest.approx, percentiles), strict=True)),
        "imbalance": pytest.approx(max(every) * len(every) / total),
        "dead_experts": every.count(0),
        "z_loss": pytest.approx(logits.logsumexp(-1).square().mean().item(), rel=1e-5),
        "logit_max": pytest.approx(logits.max().item(), rel=1e-5),
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_transformers_experts_have_the_tokens_that_it_sends_them(
    output: Output, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    torch.manual_seed(0)
    build, gate = MODELS[name]
    model = build().train()
    routers = [f"model.layers.{layer}.mlp.{gate}" for layer in range(2)]
    seen, optimizer = Seen(model, routers), torch.optim.SGD(model.parameters(), lr=0.1)
    config: dict[str, Any] = {"recording_l2_features": True, "l2_targets": {KIND: routers}, "ndigits": 17}
    with attached(output, model, optimizer, grad_acc_steps=MICRO_STEPS, **config):
        for _ in range(STEPS):
            for _ in range(MICRO_STEPS):
                x = torch.randint(1, 64, (2, 12))
                model(input_ids=x, labels=x).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    calls = by_router(output.rows(KIND))
    assert [(row.step, row.micro_step, row.name) for row, _ in calls] == [
        (step, micro, f"{router}.experts") for step in range(STEPS) for micro in range(MICRO_STEPS) for router in routers
    ]
    for (router, experts), counts, logits in zip(calls, seen.counts, seen.logits, strict=True):
        assert_call(router, experts, counts, logits)
    assert warnings_in(caplog) == []


def test_mixtral_says_the_same_of_its_logits(output: Output) -> None:
    torch.manual_seed(0)
    model = mixtral().train()
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, recording_l2_features=True, l2_targets={KIND: routers}):
        x = torch.randint(1, 64, (2, 12))
        result = model(input_ids=x, output_router_logits=True)
        result.logits.sum().backward()
        optimizer.step()
    for (_, experts), logits in zip(by_router(output.rows(KIND)), result.router_logits, strict=True):
        chosen = logits.topk(2, -1).indices
        assert [row.values["assigned"] for row in experts] == [(chosen == expert).sum().item() for expert in range(4)]


class Switch(nn.Module):
    """Sends each token to one expert, as long as it has room; others get the number -1."""

    def __init__(self, hidden: int, experts: int, capacity: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden))
        self.num_experts, self.capacity = experts, capacity

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        chosen = logits.argmax(-1)
        if self.capacity is not None:
            place = F.one_hot(chosen, self.num_experts).cumsum(0).gather(1, chosen[:, None])[:, 0]
            chosen = torch.where(place <= self.capacity, chosen, -1)
        return logits.softmax(-1).amax(-1), chosen


class Layer(nn.Module):
    def __init__(self, router: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.router, self.out, self.times = router, nn.Linear(8, 1), times

    def forward(self, x: Tensor) -> Tensor:
        results = [self.router(x + number) for number in range(self.times)]
        weights = sum(one[0] if isinstance(one, tuple) else one.sum(-1) for one in results)
        return (self.out(x)[:, 0] * weights).sum()


def rows_of(output: Output, model: nn.Module, steps: int = 1, tokens: int = 40, **config: Any) -> list[Row]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fields = {"recording_l2_features": True, "l2_targets": {KIND: ["router"]}, "ndigits": 17, **config}
    torch.manual_seed(1)
    before = set(output.directories())
    with attached(output, model, optimizer, grad_acc_steps=steps, **fields):
        for _ in range(steps):
            model(torch.randn(tokens, 8)).backward()
        optimizer.step()
    (directory,) = set(output.directories()) - before
    return output.rows(KIND, directory)


def test_what_a_capacity_refuses_is_dropped_and_no_load(output: Output) -> None:
    torch.manual_seed(0)
    router, *experts = rows_of(output, Layer(Switch(8, 4, capacity=9)))
    torch.manual_seed(0)
    free = Layer(Switch(8, 4, None)).router
    torch.manual_seed(1)
    wanted = Counter(free(torch.randn(40, 8))[1].tolist())
    kept = [min(wanted[expert], 9) for expert in range(4)]
    assert max(wanted.values()) > 9
    assert [row.values["assigned"] for row in experts] == kept
    assert router.values["assigned"] == sum(kept)
    assert router.values["dropped"] == pytest.approx((40 - sum(kept)) / 40)


def test_a_capacity_that_leaves_all_numbers_does_not_show_whether_it_refuses(output: Output) -> None:
    """Routers may refuse by a weight of 0, and return the number of the expert all the same."""
    assert "dropped" not in there(rows_of(output, Layer(Switch(8, 4, capacity=40)))[0])


def test_without_a_capacity_nothing_is_said_of_dropped_tokens(output: Output) -> None:
    assert "dropped" not in there(rows_of(output, Layer(Switch(8, 4, None)))[0])


def test_micro_steps_that_are_combined_add_their_counts(output: Output) -> None:
    torch.manual_seed(0)
    model = Layer(Switch(8, 4, None))
    each = rows_of(output, model, steps=3)
    whole = rows_of(output, model, steps=3, micro_steps="combined")
    assert len(each) == 3 * 5
    assert len(whole) == 5
    sums = [sum(row.values["assigned"] for row in each[place::5]) for place in range(5)]
    assert [row.values["assigned"] for row in whole] == sums
    assert [row.values["load"] for row in whole[1:]] == pytest.approx([one / 120 for one in sums[1:]])
    assert whole[0].values["imbalance"] == pytest.approx(max(sums[1:]) * 4 / 120)
    assert whole[0].values["z_loss"] == pytest.approx(sum(row.values["z_loss"] for row in each[::5]) / 3)
    assert whole[0].values["logit_max"] == max(row.values["logit_max"] for row in each[::5])


def test_a_second_call_has_rows_of_its_own(output: Output) -> None:
    names = [row.name for row in rows_of(output, Layer(Switch(8, 2, None), times=2))]
    assert names == [f"router.experts{expert}{call}" for call in ("", "#1") for expert in ("", ".0", ".1")]


def test_more_micro_steps_than_said_have_rows_too(output: Output) -> None:
    model = Layer(Switch(8, 2, None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, recording_l2_features=True, l2_targets={KIND: ["router"]}):
        for _ in range(2):
            model(torch.randn(4, 8)).backward()
        optimizer.step()
    assert [(row.micro_step, row.values["assigned"]) for row in output.rows(KIND) if row.name == "router.experts"] == [
        (0, 4),
        (1, 4),
    ]


def test_a_router_of_transformers_that_returns_a_mask_is_counted_by_it(output: Output) -> None:
    """The integers of Switch Transformer's router have a 1 for the expert of a token, and none beyond its capacity."""
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

    torch.manual_seed(0)
    config = SwitchTransformersConfig(hidden_size=8, num_experts=4, expert_capacity=8, router_jitter_noise=0.0)
    router = SwitchTransformersTop1Router(config)
    model = Layer(router)
    model.forward = lambda x: (model.out(x) * model.router(x[None])[1][0]).sum()
    seen: list[Tensor] = []
    router.register_forward_hook(lambda _module, _args, result: seen.append(result[0]))
    row, *experts = rows_of(output, model)
    (mask,) = seen
    assert [one.values["assigned"] for one in experts] == mask.sum((0, 1)).tolist()
    assert row.values["assigned"] == mask.sum().item() < 40


class Fixed(nn.Module):
    """Returns the same for whatever tokens."""

    def __init__(self, result: Any, **known: Any) -> None:
        super().__init__()
        self.result = result
        vars(self).update(known)

    def forward(self, _x: Tensor) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("result", "known", "reason"),
    [
        ((torch.rand(6, 4), torch.rand(6, 4, 3) > 0.5), {"num_experts": 4}, OTHER_MAP),  # DeepSpeed: the slots of experts
        ((torch.rand(6, 4), torch.rand(12, 4) > 0.5), {}, OTHER_MAP),
        ((torch.rand(6, 4), torch.randint(4, (13,))), {"num_experts": 4}, UNCLEAR_CHOICE),
        ((torch.rand(6, 4), torch.randint(4, (6, 2))), {}, UNKNOWN_EXPERTS),
        ((torch.rand(6, 3), torch.randint(6, (3,))), {"num_experts": 3}, UNCLEAR_CHOICE),  # the tokens of each expert
        ((torch.rand(3, 4), torch.randint(6, (3, 4))), {"num_experts": 3}, UNCLEAR_CHOICE),  # experts choose tokens
        ((torch.rand(3, 2), torch.randint(6, (3, 2))), {"num_experts": 3}, UNCLEAR_CHOICE),  # as many as there are tokens
        ((torch.randint(4, (6, 4)), torch.rand(6, 4) > 0.5), {"num_experts": 4, "top_k": 4}, UNCLEAR_CHOICE),  # keeps some
        ((torch.randint(6, (6, 2)), torch.rand(6) > 0.5), {"num_experts": 6}, OTHER_MAP),
        ((torch.ones(6, 4, dtype=torch.int64), torch.rand(6, 4)), {"second_expert_policy": "all"}, PART_OF_CHOICE),  # NLLB
    ],
    ids=[
        "slots",
        "other tokens",
        "a remainder",
        "experts unknown",
        "counts",
        "expert choice",
        "expert choice of capacity 1",
        "mask of indices",
        "mask of tokens",
        "a part",
    ],
)
def test_a_result_that_is_no_choice_of_each_token_is_refused(result: Any, known: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotARouterError, match=reason):
        choices_of(Fixed(result, **known), result, RouterCall(tokens=6))


@dataclass(slots=True)
class Chosen:
    logits: Tensor
    experts: Tensor


def test_a_choice_in_a_dictionary_or_a_dataclass_counts_as_one_in_a_tuple() -> None:
    logits, experts = torch.eye(4)[[0, 1, 1]], torch.tensor([[0, 1], [1, 2], [1, 0]])
    for result in ((logits, experts), {"logits": logits, "experts": experts}, Chosen(logits, experts)):
        assert choices_of(Fixed(None, num_experts=4), result, RouterCall(tokens=3)).counts.tolist() == [2, 3, 1, 0]


def test_numbers_of_experts_are_told_from_a_mask_of_the_same_shape() -> None:
    """Four sequences of four tokens, and four experts."""
    chosen = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1], [1, 1, 0, 3]])
    numbers = choices_of(Fixed(None, num_experts=4, top_k=1), chosen, RouterCall(tokens=16))
    mask = choices_of(Fixed(None, num_experts=4), chosen, RouterCall(tokens=4))
    assert numbers.counts.tolist() == [4, 11, 0, 1]
    assert mask.counts.tolist() == [2, 4, 2, 4]
    with pytest.raises(NotARouterError, match=UNCLEAR_CHOICE):
        choices_of(Fixed(None, num_experts=4), chosen, RouterCall())


def test_the_numbers_of_all_experts_are_no_mask_in_which_the_first_expert_is_missing() -> None:
    scores = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    every = scores.topk(4, -1).indices
    assert choices_of(Fixed(None, num_experts=4), every, RouterCall(tokens=30)).counts.tolist() == [30] * 4
    both = scores[:, :2].topk(2, -1).indices  # as a mask of the second choices alone
    assert choices_of(Fixed(None, num_experts=2, top_k=2), both, RouterCall(tokens=30)).counts.tolist() == [30] * 2
    with pytest.raises(NotARouterError, match=UNCLEAR_CHOICE):
        choices_of(Fixed(None, num_experts=2), both, RouterCall(tokens=30))


class PublishedGate(nn.Module):
    """As DeepSeek publishes its gate: the weights and numbers of the chosen experts. Only its weight tells how many exist."""

    topk = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).softmax(-1)
        chosen = scores.topk(self.topk, -1).indices
        return scores.gather(1, chosen), chosen


def test_a_weight_tells_how_many_experts_there_are() -> None:
    gate, tokens = PublishedGate(), torch.randn(40, 8)
    chosen = gate(tokens)
    counts = Counter(chosen[1].flatten().tolist())
    assert counts_of(gate, chosen, call_of(gate, (tokens,), {})).tolist() == [counts[expert] for expert in range(6)]
    assert call_of(gate, (torch.randn(40, 6),), {}).experts is None  # its columns would be the experts


class LogitsOnly(nn.Linear):
    top_k = 2


def test_a_router_of_logits_alone_chooses_the_greatest(output: Output) -> None:
    torch.manual_seed(0)
    model = Layer(LogitsOnly(8, 4))
    experts = rows_of(output, model)[1:]
    torch.manual_seed(1)
    counts = Counter(model.router(torch.randn(40, 8)).topk(2).indices.flatten().tolist())
    assert [row.values["assigned"] for row in experts] == [counts[expert] for expert in range(4)]


class Rectified(LogitsOnly):
    """As ReMoE: each positive number is a choice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_a_layer_that_changes_its_logits_is_not_guessed(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    assert rows_of(output, Layer(Rectified(8, 4))) == []
    assert f"{KIND}: {ANOTHER_CHOICE}: 'router'" in warnings_in(caplog)[0]


def test_a_router_that_corrects_its_logits_is_not_guessed(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = Layer(LogitsOnly(8, 4))
    model.router.register_buffer("e_score_correction_bias", torch.zeros(4))
    assert rows_of(output, model) == []
    assert f"{KIND}: {ANOTHER_CHOICE}: 'router'" in warnings_in(caplog)[0]


def test_a_layer_that_does_not_say_how_many_it_chooses_is_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    assert rows_of(output, Layer(nn.Linear(8, 4))) == []
    assert "neither the indices of the chosen experts nor logits with a top_k: 'router'" in warnings_in(caplog)[0]


def test_logits_that_are_not_found_leave_the_counts(output: Output) -> None:
    class Hashed(nn.Module):
        num_experts = 4

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.sum(-1), torch.arange(len(x)) % 4

    router, *experts = rows_of(output, Layer(Hashed()))
    assert [row.values["load"] for row in experts] == [0.25] * 4
    assert router.values["imbalance"] == 1.0
    assert {"z_loss", "logit_max"}.isdisjoint(there(router))


class Returning(nn.Module):
    """Returns what a function makes of its logits, beside the numbers of the chosen experts."""

    num_experts, top_k = 4, 2

    def __init__(self, result: Callable[[Tensor], Tensor], **known: Any) -> None:
        super().__init__()
        self.weight, self.result = nn.Parameter(drawn(4, 8)), result
        for name, value in known.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        return x.sum(-1), self.result(logits), logits.topk(2, -1).indices


def sparse(logits: Tensor) -> Tensor:
    """As Megatron's router: the scaled weights of the chosen experts."""
    chosen = logits.topk(2, -1).indices
    return torch.zeros_like(logits).scatter(1, chosen, 2.5 * logits.gather(1, chosen).softmax(-1))


@pytest.mark.parametrize(
    ("result", "known"),
    [
        (lambda x: x, True),
        (lambda x: x.softmax(-1).bfloat16(), True),
        (lambda x: x.sigmoid(), True),
        (sparse, True),
        (lambda x: (x / 3).tanh() * 3, False),
        (lambda x: F.normalize(x, dim=-1) / 0.1, False),
        (lambda x: (x / 2).softmax(-1), False),
        (lambda x: x + 0.1 * torch.linspace(-1, 1, 4), False),
    ],
    ids=["logits", "softmax", "sigmoid", "sparse", "softcap", "cosine", "temperature", "noise"],
)
def test_computed_logits_are_recorded_unless_the_router_returns_others(
    output: Output, result: Callable[[Tensor], Tensor], known: bool
) -> None:
    model = Layer(Returning(result))
    both = {KIND: ["router"], "moe_router_logit_hook": ["router"]}
    router = rows_of(output, model, l2_targets=both)[0]
    (entropy,) = output.rows("moe_router_logit_hook")
    torch.manual_seed(1)
    logits = torch.randn(40, 8).double() @ model.router.weight.detach().double().T
    shares = logits.softmax(-1)
    expected = logits.logsumexp(-1).square().mean(), logits.amax(), -(shares * shares.log()).sum(-1).mean()
    found = router.values["z_loss"], router.values["logit_max"], entropy.values["per_token_expert_entropy"]
    assert found == (pytest.approx([one.item() for one in expected], rel=1e-5) if known else (None,) * 3)
    assert router.values["assigned"] == 80


def test_of_a_single_token_logits_may_have_one_dimension() -> None:
    tokens, weight = torch.randn(1, 4), torch.randn(8, 4)
    sums, logits = (form(tokens, weight, None, torch.float32) for form in (logit_sums_from, logits_from))
    found = confirmed(sums, logits, ((tokens @ weight.T)[0], torch.tensor([[3, 1]])), True)
    assert found is not None
    assert [float(one) for one in found] == [float(one) for one in sums]


def test_a_router_without_tokens_has_neither_entropy_nor_a_greatest_logit() -> None:
    found = logit_sums_of(torch.zeros(0, 8))
    assert [float(one) for one in found] == [0, 0, -math.inf]
    assert entropy_of(torch.zeros(0, 8)).tokens == 0


def test_logits_that_are_not_finite_are_recorded_as_such(output: Output) -> None:
    model = Layer(Returning(lambda x: x))
    with torch.no_grad():
        model.router.weight[0, 0] = torch.nan
    assert math.isnan(rows_of(output, model)[0].values["z_loss"])


@pytest.mark.parametrize(
    ("known", "added"),
    [({"score_func": "sigmoid"}, 0.0), ({}, None), ({"expert_bias": None}, 5.0)],
    ids=["scores", "unknown", "logits"],
)
def test_a_bias_is_added_to_logits_only_if_it_is_theirs(output: Output, known: dict[str, Any], added: float | None) -> None:
    model = Layer(Returning(lambda x: x[:, :2], bias=nn.Parameter(torch.full((4,), 5.0)), **known))
    greatest = rows_of(output, model)[0].values["logit_max"]
    torch.manual_seed(1)
    logits = torch.randn(40, 8) @ model.router.weight.detach().T
    assert greatest == (None if added is None else pytest.approx(logits.max().item() + added, rel=1e-5))


def test_256_experts_are_written_by_as_few_operations_as_4(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    from monitor.pytorch import tensor_reader

    calls: list[int] = []
    written = tensor_reader.write_block
    monkeypatch.setattr(tensor_reader, "write_block", lambda *args: (calls.append(len(args[1])), written(*args)))
    rows = rows_of(output, Layer(Switch(8, 256, None)), tokens=500)
    assert calls == [256]
    assert len(rows) == 257
    assert sum(row.values["assigned"] for row in rows[1:]) == 500
    assert rows[0].values["dead_experts"] == [row.values["assigned"] for row in rows[1:]].count(0)


def test_a_compiled_router_is_counted_as_any_other(output: Output) -> None:
    torch.manual_seed(0)
    expected = [row.values for row in rows_of(output, Layer(Switch(8, 4, None)))]
    torch.manual_seed(0)
    model = torch.compile(Layer(Switch(8, 4, None)), backend="eager", fullgraph=True)
    assert [row.values for row in rows_of(output, model)] == expected
    assert expected


def test_a_router_beside_compiled_code_is_counted(output: Output) -> None:
    torch.manual_seed(0)
    expected = [row.values for row in rows_of(output, Layer(Switch(8, 4, None)))]
    torch.manual_seed(0)
    model = Layer(Switch(8, 4, None))
    model.out.compile(backend="eager")
    assert [row.values for row in rows_of(output, model)] == expected


@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_bit_for_bit(output: Output, name: str) -> None:
    build, gate = MODELS[name]

    def weights(watch: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = build().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        targets = {KIND: [f"model.layers.{layer}.mlp.{gate}" for layer in range(2)]}
        with ExitStack() as stack:
            if watch:
                stack.enter_context(attached(output, model, optimizer, recording_l2_features=True, l2_targets=targets))
            for _ in range(2):
                x = torch.randint(1, 64, (2, 12))
                model(input_ids=x, labels=x).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [*model.state_dict().values(), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(weights(False), weights(True), strict=True))
    assert output.rows(KIND)


def test_counting_asks_no_device_for_a_number() -> None:
    """Fake tensors of a device have no numbers: to read one, or to make a tensor as long as one says, raises."""
    with FakeTensorMode():
        scores, tokens = torch.rand(10, 4, device="cuda"), torch.rand(10, 8, device="cuda")
        chosen = scores.topk(2).indices
        counts = count_indices(chosen, 4)
        sums = logit_sums_from(tokens, torch.rand(4, 8, device="cuda"), None, torch.float32)
        sums = confirmed(
            sums, logits_from(tokens, torch.rand(4, 8, device="cuda"), None, torch.float32), (scores, chosen), False
        )
        with pytest.raises(DynamicOutputShapeException):
            torch.bincount(chosen.flatten())
    assert {str(one.device) for one in (counts, sums.squares, sums.greatest)} == {"cuda:0"}
    assert counts.shape == (4,)
