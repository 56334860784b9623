"""One rank whose model the Trainer of transformers cuts over ranks; ``metrics_of_sharded_trainer.py HOW YAML RESULTS``.

``HOW`` is ``fsdp2`` or ``zero2``. What the Trainer has logged goes to ``RESULTS/rank{i}.json``, with the norms of
the gradients that hooks have seen where parameters stay what they are.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}

import torch
import torch.distributed as dist
from by_hand import arrays, norm
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from monitor.pytorch.training.huggingface import TrainingMetricsCallback

HOW, YAML, RESULTS = sys.argv[1:4]
STEPS, ROWS = 3, 2
MICRO_STEPS = 2 if HOW == "fsdp2" else 1


def arguments() -> TrainingArguments:
    zero = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    return TrainingArguments(
        output_dir=RESULTS,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=MICRO_STEPS,
        max_grad_norm=0.5,
        learning_rate=0.01,
        logging_steps=2 if HOW == "fsdp2" else 1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **({"deepspeed": zero} if HOW == "zero2" else {"use_cpu": True}),
    )


def shard(trainer: Trainer) -> None:
    """As with ``fsdp="full_shard"``, which accelerate refuses without a GPU."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["GPT2Block"]}
    state = trainer.accelerator.state
    state.fsdp_plugin, state.distributed_type = FullyShardedDataParallelPlugin(fsdp_version=2, **wrapped), DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def main() -> None:
    torch.set_num_threads(1)
    if HOW == "zero2":
        import deepspeed_uncompiled  # noqa: F401

    given = arguments()  # which has the ranks meet
    torch.manual_seed(0)
    small = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(**small))
    local: list[dict[str, float]] = [{} for _ in range(STEPS)]
    for name, parameter in model.named_parameters() if HOW == "zero2" else ():
        parameter.register_hook(partial(see, local, name))
    torch.manual_seed(1 + dist.get_rank())
    data = [{"input_ids": row, "labels": row} for row in torch.randint(32, (24, 8))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if HOW == "zero2" else None
    callback = TrainingMetricsCallback(YAML, model_flops="measure")
    trainer = Trainer(model, given, train_dataset=data, optimizers=(optimizer, None), callbacks=[callback])
    if HOW == "fsdp2":
        shard(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    told: dict[str, Any] = {name: [entry[name] for entry in logged] for name in ("step", "loss", "grad_norm")}
    (Path(RESULTS) / f"rank{dist.get_rank()}.json").write_text(json.dumps(told | {"local": local}))
    dist.barrier()
    dist.destroy_process_group()


def see(local: list[dict[str, float]], name: str, gradient: torch.Tensor) -> None:
    """A weight that is used twice has its gradients added up before."""
    next(step for step in local if name not in step)[name] = norm(*arrays([gradient]))


main()
