"""Each head of real transformers, built small, has the numbers of its definition, however the library attends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from definitions import rows_of_heads
from observing import drawn
from torch import Tensor, nn
from watching import Output, attached

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED: dict[str, Any] = {**SIZES, "vocab_size": 64, "num_key_value_heads": 2, "attention_dropout": 0.0}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LENGTH = 12
LARGE = 6.0
"""Weights of attention are multiplied by this: the softmax of a new model would be even."""


def llama(how: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**GROUPED, attn_implementation=how))


def mistral(how: str) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=4, attn_implementation=how))


def mixtral(how: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts: Any = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3}
    return MixtralForCausalLM(MixtralConfig(**GROUPED, **experts, attn_implementation=how))


def gpt2(how: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: Any = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, scale_attn_by_inverse_layer_idx=True, attn_implementation=how))


def bert(how: str) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT, vocab_size=64, attn_implementation=how))


def vit(how: str) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**SIZES, **NO_DROPOUT, image_size=8, patch_size=2, attn_implementation=how))


def t5(how: str) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: Any = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, attn_implementation=how))


def words() -> dict[str, Tensor]:
    x = torch.arange(2 * LENGTH).view(2, LENGTH) * 37 % 63 + 1
    return {"input_ids": x, "labels": x}


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, -3:] = 0
    return {**words(), "attention_mask": mask}


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": drawn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}


LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
MODELS: dict[str, tuple[Callable[[str], nn.Module], Callable[[], dict[str, Tensor]], list[str]]] = {
    "llama": (llama, words, LAYERS),
    "mistral": (mistral, words, LAYERS),
    "mistral padded": (mistral, padded, LAYERS),
    "mixtral": (mixtral, words, LAYERS),
    "gpt2": (gpt2, words, ["transformer.h.0.attn", "transformer.h.1.attn"]),
    "bert": (bert, words, ["bert.encoder.layer.0.attention", "bert.encoder.layer.1.attention.self"]),
    "bert padded": (bert, padded, ["bert.encoder.layer.0.attention.self", "bert.encoder.layer.1.attention.self"]),
    "vit": (vit, pictures, ["vit.layers.0.attention", "vit.layers.1.attention"]),
    "t5": (
        t5,
        padded,
        [
            *(f"encoder.block.{i}.layer.0.SelfAttention" for i in range(2)),
            *(
                f"decoder.block.{i}.layer.{j}.{name}"
                for i in range(2)
                for j, name in ((0, "SelfAttention"), (1, "EncDecAttention"))
            ),
        ],
    ),
}


def softmax(scores: np.ndarray) -> np.ndarray:
    """Not torch's: the module that is watched would seem to have another attention."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Scores:
    """The scores of each attention in float64, from what the library hands to its attention functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.each: list[Tensor] = []
        chosen = type(ALL_ATTENTION_FUNCTIONS).get_interface

        def interface(functions: Any, name: str, default: Any) -> Any:
            return self._around(chosen(functions, name, default), name)

        monkeypatch.setattr(type(ALL_ATTENTION_FUNCTIONS), "get_interface", interface)

    def _around(self, attend: Any, how: str) -> Any:
        def attended(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
            scores = self._of(module, query.detach().double(), key.detach().double(), mask, how, given)
            result = attend(module, query, key, value, mask, **given)
            if how == "eager":  # what the library itself reports
                assert np.allclose(softmax(scores.numpy()), result[1].detach().double().numpy(), atol=1e-6)
            self.each.append(scores)
            return result

        return attended

    def _of(self, module: nn.Module, query: Tensor, key: Tensor, mask: Any, how: str, given: dict[str, Any]) -> Tensor:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scale = query.shape[3] ** -0.5 if given.get("scaling") is None else given["scaling"]
        scores = query @ key.transpose(2, 3) * scale
        bias = given.get("position_bias")
        scores = scores if bias is None else scores + bias.detach().double()
        if mask is None:
            causal = how == "sdpa" and module.is_causal and given.get("is_causal") is not False
            seen = torch.ones_like(scores, dtype=torch.bool).tril() if causal else torch.ones((), dtype=torch.bool)
        elif isinstance(mask, Tensor):
            seen = mask if mask.dtype == torch.bool else mask == 0
        else:
            seen = dense(mask.mask_mod, scores)
        return scores.masked_fill(~seen, -math.inf)


def dense(mask_mod: Any, scores: Tensor) -> Tensor:
    seen = torch.zeros_like(scores, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, scores.shape)):
        seen[tuple(place)] = mask_mod(*place)
    return seen


def grown(model: nn.Module, attentions: list[str]) -> nn.Module:
    with torch.no_grad():
        for name in attentions:
            for weight in model.get_submodule(name).parameters():
                weight.mul_(LARGE)
    return model


def rows(output: Output, model: nn.Module, inputs: dict[str, Tensor], attentions: list[str], **config: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    targets = {"attention_head_hook": attentions}
    common = {"recording_l2_features": True, "l2_targets": targets, "ndigits": 17, "sa_batch_rows": 0}
    with attached(output, model, optimizer, **common, **config):
        model(**inputs).loss.backward()
        optimizer.step()
    return {row.name: row.values for row in output.rows("attention_head_hook")}


def assert_rows(found: dict[str, Any], scores: list[Tensor], attentions: list[str], **how: float) -> None:
    expected = {
        row: numbers
        for name, one in zip(attentions, scores, strict=True)
        for row, numbers in rows_of_heads(one, name, **how).items()
    }
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_each_head_of_a_transformer_is_that_of_its_definition(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    torch.manual_seed(0)
    build, inputs, attentions = MODELS[name]
    model, scores = grown(build(how), attentions).train(), Scores(monkeypatch)
    found = rows(output, model, inputs(), attentions, sa_logit_bound=4.0, sa_sink_tokens=2)
    assert_rows(found, scores.each, attentions, bound=4.0, sinks=2)
    assert [one for one in caplog.records if one.name == "monitor" and one.levelname == "WARNING"] == []


@contextmanager
def eagerly() -> Iterator[None]:
    """The library compiles FlexAttention, which this turns off."""
    torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("name", ["llama", "mistral padded", "mixtral", "bert padded", "vit"])
def test_flex_attention_is_read_block_by_block(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    torch.manual_seed(0)
    build, inputs, attentions = MODELS[name]
    model, scores = grown(build("flex_attention"), attentions).train(), Scores(monkeypatch)
    for weight in [*model.parameters()][:-1]:  # FlexAttention has no backward on a host
        weight.requires_grad_(False)
    monkeypatch.setattr("monitor.pytorch.features.attention.BLOCK", 20)
    monkeypatch.setattr("monitor.pytorch.features.attention.KEYS", 5)
    with eagerly():
        found = rows(output, model, inputs(), attentions)
    assert_rows(found, scores.each, attentions)
    assert [one for one in caplog.records if one.name == "monitor" and one.levelname == "WARNING"] == []
