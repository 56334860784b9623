"""Megatron-core: tensor parallel, in bfloat16, with its optimizer's float32 weights.

torchrun --nproc-per-node 2 with_megatron.py
"""

from functools import partial

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from small_gpt import CONTEXT, VOCABULARY, batches, report, report_weights

import monitor  # +

STEPS, MICRO_STEPS = 5, 2

torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
tensor_parallel.model_parallel_cuda_manual_seed(1)
torch.manual_seed(0)
config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    tensor_model_parallel_size=2,
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    use_cpu_initialization=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    bias_activation_fusion=False,
    bias_dropout_fusion=False,
    masked_softmax_fusion=False,
    gradient_accumulation_fusion=False,
    finalize_model_grads_func=finalize_model_grads,
)
gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, CONTEXT).bfloat16()
model = [DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)]
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=1e9), model
)
config.grad_scale_func = optimizer.scale_loss
monitor.watch(model, optimizer)  # +


def loss_of(losses):
    return losses.float().mean(), {}


def forward_step(batch, chunk):
    tokens, targets = next(batch)
    positions = torch.arange(CONTEXT).expand_as(tokens)
    mask = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
    return chunk(tokens, positions, mask, labels=targets), loss_of


batch = batches(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
train = partial(get_forward_backward_func(), forward_step_func=forward_step, data_iterator=batch, model=model)
for step in range(STEPS):
    model[0].zero_grad_buffer()
    optimizer.zero_grad()
    train(num_microbatches=MICRO_STEPS, seq_length=CONTEXT, micro_batch_size=4, forward_only=False)
    _, norm, _ = optimizer.step()
    report(step, norm)
report_weights(gpt.parameters())
torch.distributed.destroy_process_group()
