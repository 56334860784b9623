"""A router on two ranks that have different numbers of tokens; ``routers.py HOW...``, in a directory each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attached
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

EXPERTS, TOP, STEPS = 6, 2, 2
OUTPUT = Path(os.environ["MONITOR_OUTPUT_DIR"])


class Router(nn.Module):
    num_experts, top_k = EXPERTS, TOP

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = nn.functional.linear(x, self.weight)
        self.logits = logits.detach().double()
        return torch.topk(logits.softmax(-1), TOP)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.router = nn.Linear(4, 8), Router()

    def forward(self, x: Tensor) -> Tensor:
        return self.router(self.up(x))[0]


def built(how: str) -> Any:
    torch.manual_seed(0)
    model: Any = Model()
    if how in ("ddp", "passed"):
        return DistributedDataParallel(model)
    if how == "parts":  # of which each rank has one alone
        model.up = DistributedDataParallel(model.up, process_group=ALONE)
        model.router = DistributedDataParallel(model.router)
    if how == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if how == "fsdp2":
        fully_shard(model.router)
        fully_shard(model)
    return model


def told(how: str) -> dict[str, Any]:
    """The counts of each expert and the squares of the z-loss, by step, as this rank has them."""
    os.environ["MONITOR_OUTPUT_DIR"] = str(OUTPUT / how)
    model, found = built(how), {"counts": [], "squares": [], "tokens": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def sees(module: Any, _args: Any, result: Any) -> None:
        chosen = [expert for token in result[1].tolist() for expert in token]
        found["counts"].append([chosen.count(expert) for expert in range(EXPERTS)])
        found["squares"].append(module.logits.logsumexp(-1).square().sum().item())
        found["tokens"] = len(module.logits)

    next(one for one in model.modules() if isinstance(one, Router)).register_forward_hook(sees)
    with Attached() as attach:
        attach(model, optimizer, **({"dp_group": dist.group.WORLD} if how == "passed" else {}))
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(STEPS):
            model(torch.randn(5 + 20 * dist.get_rank(), 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


torch.set_num_threads(1)
dist.init_process_group("gloo")
ALONE = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
answers = {how: told(how) for how in sys.argv[1:]}
(Path(os.environ["FRAMEWORK_RESULTS"]) / f"rank{dist.get_rank()}.json").write_text(
    json.dumps({"plain": {}, "monitored": answers})
)
dist.barrier()
dist.destroy_process_group()
