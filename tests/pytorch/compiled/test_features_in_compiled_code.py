"""Features of weights, routers and outputs of compiled modules have the rows of eager code. Training keeps its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import MICRO_STEPS, STEPS, WAYS, Compile, Ways, needs_a_compiler, trained
from evidence import in_turn
from small_transformers import MODELS, inputs_of, made
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from watching import Output, Row, attached, warnings_in

TARGETS = {
    "linear_hook": [],
    "moe_router_weight_hook": ["layers.0.router"],
    "moe_router_logit_hook": ["layers.0.router", "layers.1.router"],
    "moe_router_load_hook": ["layers.0.router", "layers.1.router"],
    "activation_hook": ["layers.0.act", "layers.1"],
}
CONFIG: dict[str, Any] = {
    "recording_l2_features": True,
    "l2_targets": TARGETS,
    "dead_after_steps": 1,
    "ops": ["norm"],
    "ndigits": 17,
}


class Router(nn.Module):
    """Takes its tokens by name, and returns the chosen experts among other things."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.top_k = 2

    def forward(self, *, hidden_states: Tensor) -> tuple[Any, ...]:
        weights, chosen = F.linear(hidden_states, self.weight).softmax(-1).topk(self.top_k, -1)
        return weights, chosen, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.router = nn.Linear(4, 4), nn.ReLU(), Router()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.linear(x))
        result: Tensor = x + y * self.router(hidden_states=x * 1.0)[0].sum(-1, keepdim=True)
        return result


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OneBlock(Blocks):
    """Of which inductor makes half as many kernels."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[1]


class Overwriting(Router):
    """Changes its tokens when it has chosen."""

    def forward(self, *, hidden_states: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            result: tuple[Any, ...] = super().forward(hidden_states=hidden_states)
            hidden_states.zero_()
        return result


class Overwritten(Blocks):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.router, layer.act = Overwriting(), nn.ReLU(inplace=True)


class Checkpointed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def rows(output: Output) -> dict[str, list[Row]]:
    """The rows of each kind of the latest recording."""
    return {kind: output.rows(kind, output.directories()[-1]) for kind in TARGETS}


def assert_equal(found: dict[str, list[Row]], expected: dict[str, list[Row]]) -> None:
    for kind, wanted in expected.items():
        assert wanted, kind
        by_place = {(row.name, row.step, row.micro_step): row for row in found[kind]}
        assert len(by_place) == len(found[kind]) == len(wanted), kind
        for row in wanted:
            same = by_place[row.name, row.step, row.micro_step].values
            assert same.keys() == row.values.keys()
            assert [same[op] for op in same if same[op] is not None] == pytest.approx(
                [row.values[op] for op in same if same[op] is not None], rel=1e-9
            )
            assert {op for op in same if same[op] is None} == {op for op in same if row.values[op] is None}


@pytest.mark.parametrize(("way", "make"), in_turn(sorted(WAYS), [Blocks, Checkpointed]))
def test_each_way_of_compiling_has_the_rows_of_eager_code(output: Output, way: str, make: type[nn.Module]) -> None:
    trained(make, Ways.eager, output, config=CONFIG)
    expected = rows(output)
    before = trained(make, WAYS[way], backend="aot_eager")
    after = trained(make, WAYS[way], output, config=CONFIG, backend="aot_eager")
    assert_equal(rows(output), expected)
    assert all(map(torch.equal, after.numbers, before.numbers))
    assert (after.graphs, after.breaks) == (before.graphs, before.breaks)


def test_a_router_that_overwrites_its_tokens_has_no_row(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    trained(Overwritten, Ways.whole, output, config=CONFIG, backend="aot_eager")
    found = rows(output)
    assert found["moe_router_logit_hook"] == found["moe_router_load_hook"] == []
    assert len(found["activation_hook"]) == len(TARGETS["activation_hook"]) * STEPS * MICRO_STEPS
    assert "it changes its arguments in place in compiled code" in str(warnings_in(caplog))


@needs_a_compiler
@pytest.mark.usefixtures("one_compiler")
def test_what_inductor_compiles_has_them_too(output: Output) -> None:
    targets = {kind: [name for name in names if "layers.0" in name] for kind, names in TARGETS.items()}
    config = {**CONFIG, "l2_targets": targets}
    trained(OneBlock, Ways.eager, output, config=config)
    expected = rows(output)
    trained(OneBlock, Ways.whole, output, config=config)
    assert_equal(rows(output), expected)


def test_logits_are_computed_in_the_precision_of_autocast_in_compiled_code(output: Output) -> None:
    def under_autocast(compile_: Compile) -> Compile:
        def way(model: nn.Module, **options: Any) -> Any:
            called = compile_(model.float(), **options)

            def call(x: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    result: Tensor = called(x)
                return result

            return call

        return way

    def single(number: int) -> Tensor:
        return torch.sin(torch.arange(12.0) + number).view(3, 4)

    trained(Blocks, under_autocast(Ways.eager), output, inputs=single, config=CONFIG)
    expected = rows(output)
    trained(Blocks, under_autocast(Ways.whole), output, inputs=single, config=CONFIG, backend="aot_eager")
    assert_equal(rows(output), expected)


def test_an_evaluation_has_no_rows_and_steps_count_as_in_eager_code(output: Output) -> None:
    def evaluating(model: nn.Module, **options: Any) -> Any:
        compiled = torch.compile(model, **options)

        def call(x: Tensor) -> Any:
            model.eval()
            compiled(x)
            model.train()
            return compiled(x)

        return call

    trained(Blocks, evaluating, output, config=CONFIG, backend="aot_eager")
    found = rows(output)["activation_hook"]
    assert len(found) == len(TARGETS["activation_hook"]) * STEPS * MICRO_STEPS


ATTENTIONS = {
    *("LlamaAttention", "MixtralAttention", "GPT2Attention", "BertSelfAttention", "ViTAttention", "ViTSelfAttention"),
    *("T5Attention",),
}
"""Classes of the library that compute attention."""


def targets_of(model: nn.Module) -> dict[str, list[str]]:
    """All attentions, routers, weights, and the outputs of all blocks."""
    kinds = {name: type(one).__name__ for name, one in model.named_modules()}
    attentions = [name for name, kind in kinds.items() if kind in ATTENTIONS]
    routers = [name for name, kind in kinds.items() if kind == "MixtralTopKRouter"]
    blocks = [name for name, kind in kinds.items() if kind.endswith(("Layer", "Block")) and name[-1:].isdigit()]
    found = {"attention_hook": attentions, "attention_head_hook": attentions, "activation_hook": blocks, "linear_hook": []}
    return {**found, **dict.fromkeys(("moe_router_weight_hook", "moe_router_logit_hook", "moe_router_load_hook"), routers)}


@pytest.mark.parametrize(("name", "how"), [*((name, "") for name in MODELS), ("llama", "eager"), ("gpt2", "eager")])
def test_models_of_transformers_have_the_features_of_eager_code(output: Output, name: str, how: str) -> None:
    """``how`` is an implementation of attention; the model's own without it."""
    found: list[dict[tuple[str, str, int], dict[str, Any]]] = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model: Any = made(name).train()
        if how:
            model.set_attn_implementation(how)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        targets = targets_of(model)
        with attached(output, model, optimizer, **{**CONFIG, "l2_targets": targets}):
            for _ in range(2):
                result = call(**inputs_of(name))
                result.logits.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        rows = [row for kind in targets for row in output.rows(kind, output.directories()[-1])]
        found.append({(row.kind, row.name, row.step): row.values for row in rows})
    eager, there = found
    assert there.keys() == eager.keys()
    assert {kind for kind, *_ in eager} == {kind for kind, names in targets.items() if names or kind == "linear_hook"}
    for place, values in eager.items():
        known = {op: value for op, value in values.items() if value is not None}
        assert {op: value for op, value in there[place].items() if value is not None} == pytest.approx(known, rel=1e-5), place
