"""Llama of transformers, sharded by FSDP2.

torchrun --nproc-per-node 2 llama_fsdp2.py
"""

import torch
import torch.distributed as dist
from small_gpt import CONTEXT, VOCABULARY, batches, report, report_weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import monitor  # +

STEPS = 4

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT + 1, use_cache=False, **sizes))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
monitor.watch(model, optimizer)  # +

batch = batches(dist.get_rank(), dist.get_world_size())
for step in range(STEPS):
    tokens, _ = next(batch)
    model(input_ids=tokens, labels=tokens).loss.backward()
    report(step, torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor())
    optimizer.step()
    optimizer.zero_grad()
report_weights(p.to_local() for p in model.parameters())
dist.destroy_process_group()
