"""Features of Megatron-core on two ranks; ``megatron_features.py HOW...``

``tp`` has no experts, which Megatron takes with sequence parallelism alone; the others are data-parallel, one of them with the
``distributed`` optimizer, one with a ``capacity`` of experts, and one that is ``padded`` to it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attached
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron_on_cpu import on_cpu
from torch import Tensor
from torch.nn.functional import linear

BATCH, LENGTH, VOCABULARY = 2, 8, 32
OUTPUT = Path(os.environ["MONITOR_OUTPUT_DIR"])
ATTENTION, ROUTER = "decoder.layers.0.self_attention.core_attention", "decoder.layers.1.mlp.router"


def config_of(words: set[str]) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=32,
        num_moe_experts=None if "tp" in words else 4,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=2 if "tp" in words else 1,
        sequence_parallel=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def built(how: str) -> tuple[Any, Any]:
    words = set(how.split("-"))
    config = config_of(words)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.tensor_model_parallel_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    model = GPTModel(config, spec, VOCABULARY, LENGTH).bfloat16()
    if words & {"capacity", "padded"}:  # Megatron wants a dispatcher of CUDA with it; the router needs none
        config.moe_expert_capacity_factor, config.moe_pad_expert_input_to_capacity = 0.75, "padded" in words
    distributed = "distributed" in words
    wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    wrapped = DistributedDataParallel(config, wrapping, model)
    settings = OptimizerConfig(
        optimizer="adam", lr=0.01, params_dtype=torch.bfloat16, bf16=True, use_distributed_optimizer=distributed
    )
    return wrapped, get_megatron_optimizer(settings, [wrapped])


def step(model: Any, optimizer: Any) -> None:
    tokens = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    model(tokens, positions, mask, labels=tokens).float().sum().backward()
    model.finish_grad_sync()
    optimizer.step()


def spread_of(query: Tensor, key: Tensor) -> tuple[float, float]:
    """Of (s, b, h, d), all heads and rows, by definition."""
    query, key = (one.detach().double().permute(1, 2, 0, 3) for one in (query, key))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.mT / query.shape[3] ** 0.5
    weights = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    return torch.special.entr(weights).sum(-1).mean().item(), weights.amax(-1).mean().item()


def told(how: str) -> dict[str, Any]:
    os.environ["MONITOR_OUTPUT_DIR"] = str(OUTPUT / how)
    model, optimizer = built(how)
    found: dict[str, Any] = {}

    def attends(_module: Any, args: Any, kwargs: Any) -> None:
        query, key = [*args, *kwargs.values()][:2]
        found["spread"] = spread_of(query, key)
        found["heads"] = query.shape[2], key.shape[2]

    def routes(module: Any, args: Any) -> None:
        logits = linear(args[0].detach().float(), module.weight.detach().float()).double()
        found["entropy"] = torch.special.entr(logits.softmax(-1)).sum(-1).mean().item()
        found["z_loss"] = logits.logsumexp(-1).square().mean().item()
        found["asked"] = logits[..., 0].numel() * module.topk

    def routed(_module: Any, _args: Any, result: Any) -> None:
        found["counts"] = [sum(row) for row in zip(*result[1].int().tolist(), strict=True)]

    module = model.module
    module.get_submodule(ATTENTION).register_forward_pre_hook(attends, with_kwargs=True)
    if how != "tp":
        module.get_submodule(ROUTER).register_forward_pre_hook(routes)
        module.get_submodule(ROUTER).register_forward_hook(routed)
    named = {name: one.weight for name, one in module.named_modules() if isinstance(getattr(one, "weight", None), Tensor)}
    found["norms"] = {
        name: torch.linalg.svdvals(weight.detach().double()).tolist()
        for name, weight in named.items()
        if weight.dim() == 2 and "embedding" not in name
    }
    with Attached() as attach:
        attach(model, optimizer, params_have_main_grad=True, dp_group=parallel_state.get_data_parallel_group())
        step(model, optimizer)
    parallel_state.destroy_model_parallel()
    return found


torch.set_num_threads(1)
dist.init_process_group("gloo")
with on_cpu():
    answers = {how: told(how) for how in sys.argv[1:]}
result = {"plain": {}, "monitored": answers}
(Path(os.environ["FRAMEWORK_RESULTS"]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
dist.barrier()
dist.destroy_process_group()
