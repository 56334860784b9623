"""Small random models of transformers, as tests of numbers of models need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from observing import drawn
from torch import Tensor, nn

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(2 * 9).view(2, 9) * 7 % 64}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64, num_key_value_heads=2))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts: Any = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts, vocab_size=64))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout: Any = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, **no_dropout))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: Any = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0))


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "mamba": mamba,
}


def inputs_of(name: str) -> dict[str, Tensor]:
    """What a model is called with."""
    if name == "vit":
        return {"pixel_values": drawn(2, 3, 8, 8)}
    words = tokens()
    return {**words, "decoder_input_ids": words["input_ids"]} if name == "t5" else words


def made(name: str) -> nn.Module:
    """A model with the weights of a fixed seed."""
    torch.manual_seed(0)
    return MODELS[name]()
