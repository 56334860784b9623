"""T5 hands a position bias from layer to layer, each of which uses it and gives it back: where a NaN in its gradient began."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from evidence import sampled
from torch import Tensor, nn
from watching import Output, attached

from monitor.anomalies.events import EVENTS_FOLDER
from monitor.anomalies.ranking.ranking import Ranked, ranking_of

WATCHED = {
    **dict.fromkeys(("xy_distribution", "all_xy", "wg_distribution"), True),
    "alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True},
}
STEP = 1
FIRST, SECOND = "encoder.block.0.layer.0.SelfAttention", "encoder.block.1.layer.0.SelfAttention"


class Spoiled(torch.autograd.Function):
    """The tensor, whose gradient gets a NaN."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        gradient.view(-1)[3] = math.nan
        return gradient


def small_t5(seed: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")  # only here: it takes seconds

    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}
    config = transformers.T5Config(**sizes, relative_attention_num_buckets=8, decoder_start_token_id=0, pad_token_id=0)
    model: nn.Module = transformers.T5ForConditionalGeneration(config).train()
    return model


def spoil_attention(module: nn.Module, bad: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """In the backward of one attention, what it computes from its ``position_bias`` or its ``scores`` goes wrong."""
    from transformers.models.t5 import modeling_t5 as t5

    get_interface = t5.ALL_ATTENTION_FUNCTIONS.get_interface

    def interface(name: str, default: Any) -> Callable[..., Any]:
        attention = get_interface(name, default)

        def call(of: nn.Module, *args: Any, **kwargs: Any) -> Any:
            spoils = of is module and bad()
            if spoils and what == "position_bias":
                kwargs["position_bias"] = Spoiled.apply(kwargs["position_bias"])
            output, weights = attention(of, *args, **kwargs)
            return (Spoiled.apply(output) if spoils and what == "scores" else output), weights

        return call

    monkeypatch.setattr(t5.ALL_ATTENTION_FUNCTIONS, "get_interface", interface)


def first_event(output: Output, monkeypatch: pytest.MonkeyPatch, seed: int, where: str, what: str) -> tuple[Ranked, int]:
    """The first event, and how many origins there are."""
    model, done = small_t5(seed), []
    spoil_attention(model.get_submodule(where), lambda: len(done) == STEP, monkeypatch, what)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **WATCHED):
        while len(done) <= STEP:
            ids, labels = torch.randint(1, 32, (2, 7)), torch.randint(1, 32, (2, 5))
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done.append(model)
    ranking = ranking_of(output.base / EVENTS_FOLDER, 1)
    return ranking.ranked[0], ranking.origins


@pytest.mark.parametrize("seed", sampled(range(8)))
@pytest.mark.parametrize("what", ["position_bias", "scores"])
def test_a_nan_in_the_backward_of_the_first_attention_is_found_inside_it(
    what: str, seed: int, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, origins = first_event(output, monkeypatch, seed, FIRST, what)
    assert (first.step, first.subject.series.name, origins) == (STEP, f"{FIRST}.output_1", 1)
    assert first.location is not None
    assert first.location.text.startswith(f"inside {FIRST}, between the gradients of {FIRST}.o.input and")


@pytest.mark.parametrize("what", ["position_bias", "scores"])
def test_one_in_a_later_attention_is_found_there_and_not_where_the_bias_was_made(
    what: str, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, origins = first_event(output, monkeypatch, 0, SECOND, what)
    assert (first.step, first.subject.series.name, origins) == (STEP, f"{SECOND}.input_position_bias", 1)
    assert first.location is not None
    assert first.location.text.startswith(f"inside {SECOND}, between the gradients of {SECOND}.o.input and")
