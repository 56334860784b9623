"""Attention, linear layers and routers of real transformers, built small: all are found, and their numbers are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from definitions import attention_weights, entropy_and_greatest, entropy_per_token, similarity
from torch import Tensor, nn
from torch.nn import functional as F
from watching import Output, attached

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
LENGTH = 12


def llama(how: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation=how))


def mixtral(how: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, **EXPERTS, attn_implementation=how))


def gpt2(how: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**SMALL_GPT2, attn_implementation=how))


MODELS: dict[str, tuple[Callable[[str], nn.Module], list[str], list[str]]] = {
    "llama": (llama, ["model.layers.0.self_attn", "model.layers.1.self_attn"], []),
    "mixtral": (
        mixtral,
        ["model.layers.0.self_attn", "model.layers.1.self_attn"],
        ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    ),
    "gpt2": (gpt2, ["transformer.h.0.attn", "transformer.h.1.attn"], []),
}


class Captured:
    """Q and K as the attention functions of the library are given them, and what routers are given."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

        self.attention: list[tuple[Tensor, Tensor]] = []
        self.routed: list[Tensor] = []
        for one in model.modules():
            if isinstance(one, MixtralTopKRouter):
                one.register_forward_hook(lambda _module, args, _result: self.routed.append(args[0].detach().clone()))
        chosen = type(ALL_ATTENTION_FUNCTIONS).get_interface

        def interface(functions: Any, name: str, default: Any) -> Any:
            return self._around(chosen(functions, name, default))

        monkeypatch.setattr(type(ALL_ATTENTION_FUNCTIONS), "get_interface", interface)

    def _around(self, attend: Any) -> Any:
        def attended(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any) -> Any:
            self.attention.append((query.detach().clone(), key.detach().clone()))
            return attend(module, query, key, *rest, **kwargs)

        return attended


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_a_transformer_is_found_and_told(
    output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    torch.manual_seed(0)
    build, attentions, routers = MODELS[name]
    model = build(how).train()
    captured = Captured(model, monkeypatch)
    targets = {
        "attention_hook": attentions,
        "linear_hook": [],
        "moe_router_weight_hook": routers,
        "moe_router_logit_hook": routers,
    }
    config = {"recording_l2_features": True, "l2_targets": targets, "ndigits": 17, "sa_heads": 0, "sa_batch_rows": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, **config):
        x = torch.randint(0, 64, (2, LENGTH))
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()

    rows = output.rows("attention_hook")
    assert [row.name for row in rows] == [f"{one}.attention" for one in attentions]
    for row, (query, key) in zip(rows, captured.attention, strict=True):
        expected = entropy_and_greatest(attention_weights(query, key), 0, 0)
        assert (row.values["entropy"], row.values["softmax_max"]) == pytest.approx(expected, rel=2e-6)
    assert_norms(output, model)
    assert_routing(output, model, routers, captured.routed)
    assert [one for one in caplog.records if one.name == "monitor" and one.levelname == "WARNING"] == []


def assert_norms(output: Output, model: nn.Module) -> None:
    """Every matrix but embeddings, each once."""
    expected = {
        f"{name}.linear": torch.linalg.svdvals(module.weight.detach().double())
        for name, module in model.named_modules()
        if not isinstance(module, nn.Embedding)
        and isinstance(getattr(module, "weight", None), Tensor)
        and module.weight.dim() == 2
    }
    found = {row.name: row.values for row in output.rows("linear_hook")}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name]["frobenius_norm"] == pytest.approx(values.norm().item(), rel=1e-6)
        assert found[name]["kernel_norm"] == pytest.approx(values[0].item(), rel=1e-3)


def assert_routing(output: Output, model: nn.Module, routers: list[str], routed: list[Tensor]) -> None:
    weights = [model.get_submodule(name).weight for name in routers]
    alike = [row.values["router_weight_similarity"] for row in output.rows("moe_router_weight_hook")]
    assert alike == pytest.approx([similarity(weight) for weight in weights], rel=1e-9)
    entropies = [row.values["per_token_expert_entropy"] for row in output.rows("moe_router_logit_hook")]
    logits = [F.linear(x, weight) for x, weight in zip(routed, weights, strict=True)]
    assert entropies == pytest.approx([entropy_per_token(one) for one in logits], rel=1e-6)


def test_a_whole_layer_may_be_named_for_the_attention_in_it(output: Output) -> None:
    torch.manual_seed(0)
    model = llama("sdpa").train()
    names = ["model.layers.0.self_attn", "model.layers.0"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, recording_l2_features=True, l2_targets={"attention_hook": names}):
        x = torch.randint(0, 64, (2, LENGTH))
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
    first, second = output.rows("attention_hook")
    assert first.values == second.values
    assert {first.name, second.name} == {f"{name}.attention" for name in names}
