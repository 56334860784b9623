"""Megatron-core; ``megatron_run.py HOW...``: several setups, one after the other, each with an output directory of its own.

A setup is words joined by ``-``:

- ``tp``, ``pp``, ``ep``: two ranks of that kind; the others are data-parallel; ``sequence`` parallelism
- ``fp32``, ``fp16``, else bfloat16
- ``distributed`` optimizer, two ``instances`` of it; ``overlap`` of reduction and backward; ``tokens``: loss per token
- ``each``: a row of the unreduced gradient a micro-batch
- ``ungrouped``: no groups are passed; ``inner``, ``member``: an optimizer inside the one that steps is passed
- ``unwrapped``: what is said of a model that is passed without its wrapper, first
- ``released``: nothing references the monitor, and whether model and optimizer outlive their last user is reported
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, Attached, norm_of, run
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron_on_cpu import on_cpu

MICRO_STEPS, BATCH, LENGTH, VOCABULARY = 2, 2, 8, 32
STEPS = 3
OUTPUT = Path(os.environ["MONITOR_OUTPUT_DIR"])
PATCHED = [
    (cls, name, vars(cls)[name])
    for cls, name in [(_ParamAndGradBucketGroup, "start_grad_sync")]
    + [(cls, name) for cls in (FP32Optimizer, MixedPrecisionOptimizer, ChainedOptimizer) for name in ("step", "prepare_grads")]
]
OVERFLOWS = 1
"""The step of ``fp16`` that is skipped."""


class Setup:
    """One way to train, of ``how``'s words."""

    def __init__(self, how: str) -> None:
        self.words = set(how.split("-"))
        self.dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(
            next(iter(self.words & {"fp32", "fp16"}), ""), torch.bfloat16
        )
        self.distributed = "distributed" in self.words
        self.local: list[float] = []

    def ranks(self, kind: str) -> int:
        return 2 if kind in self.words else 1

    def build(self) -> tuple[DistributedDataParallel, Any]:
        """The wrapped model chunk of this rank, and its optimizer."""
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.ranks("tp"),
            pipeline_model_parallel_size=self.ranks("pp"),
            expert_model_parallel_size=self.ranks("ep"),
            num_distributed_optimizer_instances=self.ranks("instances"),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        torch.manual_seed(0)
        config = self._config()
        spec = _spec(config)
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        model = GPTModel(
            config, spec, VOCABULARY, LENGTH, pre_process=first, post_process=last, share_embeddings_and_output_weights=True
        ).to(self.dtype)
        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce="overlap" in self.words,
            use_distributed_optimizer=self.distributed,
            num_distributed_optimizer_instances=self.ranks("instances"),
        )
        if "overlap" in self.words:
            wrapping.bucket_size = 2000
        wrapped = DistributedDataParallel(config, wrapping, model)
        optimizer = get_megatron_optimizer(self._optimizer_config(), [wrapped])
        config.grad_scale_func = optimizer.scale_loss
        config.no_sync_func = wrapped.no_sync
        return wrapped, optimizer

    def _config(self) -> TransformerConfig:
        return TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            ffn_hidden_size=32,
            use_cpu_initialization=True,
            params_dtype=self.dtype,
            pipeline_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16,
            fp16=self.dtype == torch.float16,
            tensor_model_parallel_size=self.ranks("tp"),
            pipeline_model_parallel_size=self.ranks("pp"),
            expert_model_parallel_size=self.ranks("ep"),
            num_moe_experts=2 if "ep" in self.words else None,
            add_bias_linear="ep" not in self.words,
            calculate_per_token_loss="tokens" in self.words,
            sequence_parallel="sequence" in self.words,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            finalize_model_grads_func=self._finalize,
        )

    def _finalize(self, model: list[Any], *args: Any, **kwargs: Any) -> None:
        """All micro-batches are done, and without ``overlap`` nothing is reduced yet."""
        if "overlap" not in self.words:
            self.note_local(model[0])
        finalize_model_grads(model, *args, **kwargs)

    def note_local(self, model: Any) -> None:
        self.local.append(norm_of(p.main_grad for p in model.parameters()))

    def _optimizer_config(self) -> OptimizerConfig:
        return OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            params_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16,
            fp16=self.dtype == torch.float16,
            initial_loss_scale=1024.0,
            hysteresis=1,
            use_distributed_optimizer=self.distributed,
            clip_grad=1e9,
        )

    def attach(self, attach: Attach, model: Any, optimizer: Any) -> None:
        passed = optimizer
        if self.words & {"inner", "member"}:
            passed = optimizer.chained_optimizers[0]
            passed = passed.optimizer if "inner" in self.words else passed
        groups = {
            "dp_group": parallel_state.get_data_parallel_group(),
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
            "process_group": parallel_state.get_pipeline_model_parallel_group(),
        }
        with _configured(monitor_mbs_grad="each" in self.words):
            attach([model], passed, MICRO_STEPS, params_have_main_grad=True, **({} if "ungrouped" in self.words else groups))

    def refusal(self, attach: Attach, model: Any, optimizer: Any) -> str:
        """What is said of a model that nothing wraps."""
        try:
            attach(model.module, optimizer, params_have_main_grad=True)
        except ValueError as error:
            return str(error)
        return ""


@contextmanager
def _configured(**fields: Any) -> Iterator[None]:
    """The configuration with other fields."""
    path = Path(os.environ["MONITOR_CONFIG"])
    other = Path(os.environ["FRAMEWORK_RESULTS"], f"config{dist.get_rank()}.json")
    other.write_text(json.dumps(json.loads(path.read_text()) | fields))
    os.environ["MONITOR_CONFIG"] = str(other)
    yield
    os.environ["MONITOR_CONFIG"] = str(path)


class Norm(torch.nn.LayerNorm):
    """Megatron's own refuses to be used with sequence parallelism, where each rank normalises a part of the sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def _spec(config: TransformerConfig) -> Any:
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    if not config.sequence_parallel:
        return spec
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules([spec] * config.num_layers, Norm)


def train(attach: Attach) -> dict[str, Any]:
    told = {}
    for how in sys.argv[1:]:
        os.environ["MONITOR_OUTPUT_DIR"] = str(OUTPUT / how)
        with Attached() if isinstance(attach, Attached) else nullcontext(attach) as one, on_cpu():
            told[how] = _train(Setup(how), one)
        told[how]["patched"] = [name for cls, name, original in PATCHED if vars(cls)[name] is not original]
        parallel_state.destroy_model_parallel()
    return told


def _train(setup: Setup, attach: Attach) -> dict[str, Any]:
    model, optimizer = setup.build()
    refusal = setup.refusal(attach, model, optimizer) if "unwrapped" in setup.words else ""
    setup.attach(attach, model, optimizer)
    told: dict[str, Any] = {
        "losses": [],
        "gradients": [],
        "before": [],
        "after": [],
        "gathered": [],
        "exp_avg": [],
        "exp_avg_sq": [],
        "done": [],
    }
    for step in range(STEPS):
        told["before"].append(_norm_of_all((t for t, _ in _stepped(optimizer))))
        for name in ("exp_avg", "exp_avg_sq"):
            told[name].append(_norm_of_all((state[name] for _, state in _stepped(optimizer) if state)))
        model.zero_grad_buffer()
        optimizer.zero_grad()
        told["losses"] += _forward_backward(setup, model, step)
        if setup.dtype == torch.float16 and step == OVERFLOWS:
            next(model.parameters()).main_grad.view(-1)[0] = torch.inf
        done, norm, _ = optimizer.step()
        told["done"].append(done)
        told["gradients"].append(norm)
        told["after"].append(_norm_of_all((t for t, _ in _stepped(optimizer))))
        told["gathered"].append(_norm_of_gathered(model))
    told["local"], told["refusal"] = setup.local, refusal
    told["weights"] = [sum(p.detach().double().sum() for p in model.parameters()).item().hex()]
    if "released" in setup.words:
        known = weakref.ref(model), weakref.ref(optimizer)
        if isinstance(attach, Attached):
            attach.release()
        del model, optimizer
        gc.collect()
        told["alive"] = [one() is not None for one in known]
    return told


def _forward_backward(setup: Setup, model: Any, step: int) -> list[str]:
    torch.manual_seed(100 * step + parallel_state.get_data_parallel_rank())
    batches = iter([torch.randint(VOCABULARY, (BATCH, LENGTH)) for _ in range(MICRO_STEPS)])

    def forward(batches: Iterator[torch.Tensor], model: Any) -> Any:
        setup.note_local(model)
        tokens = next(batches)
        last = parallel_state.is_pipeline_last_stage()
        output = model(tokens, torch.arange(LENGTH).expand(BATCH, -1), None, labels=tokens if last else None)
        return output, loss

    def loss(output: torch.Tensor) -> Any:
        found = output.float()
        if "tokens" in setup.words:
            return found.sum(), torch.tensor(found.numel(), dtype=torch.int), {"loss": found.detach().sum()}
        return found.mean(), {"loss": found.detach().mean()}

    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches,
        model=[model],
        num_microbatches=MICRO_STEPS,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return [one["loss"].item().hex() for one in found]


def _norm_of_gathered(model: Any) -> float:
    """The norm of the weights that the model computes with, gathered from the ranks that hold the parts."""
    squares = sum((_whole(p).double().square().sum() for p in model.parameters() if not getattr(p, "shared", False)), 0.0)
    total = torch.as_tensor(squares, dtype=torch.float64)
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return float(total.sqrt())


def _whole(parameter: Any) -> torch.Tensor:
    held = parameter.detach()
    if not getattr(parameter, "tensor_model_parallel", False):
        return held
    parts = [torch.empty_like(held) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, held.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=parameter.partition_dim)


def _stepped(optimizer: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """What the inner optimizers step, as far as no other rank has it too, and its state."""
    for member in optimizer.chained_optimizers:
        replicated = not hasattr(member, "gbuf_ranges")
        for tensor in member.get_parameters():
            split = getattr(tensor, "tensor_model_parallel", False)
            first = split or parallel_state.get_tensor_model_parallel_rank() == 0
            if first and not getattr(tensor, "shared", False):
                yield from [(tensor, member.optimizer.state.get(tensor))] if _is_first(member, replicated) else []


def _is_first(member: Any, replicated: bool) -> bool:
    """Whether no data-parallel rank before this one has the same."""
    expert = any(group.get("is_expert_parallel") for group in member.param_groups)
    rank = parallel_state.get_expert_data_parallel_rank() if expert else parallel_state.get_data_parallel_rank()
    return rank == 0 if replicated else member.distributed_optimizer_instance_id == 0


def _norm_of_all(tensors: Iterator[torch.Tensor]) -> float:
    """The norm over all ranks."""
    squares = sum((torch.sum(t.detach().double() ** 2) for t in tensors), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(squares)
    return float(squares.sqrt())


run(train)
