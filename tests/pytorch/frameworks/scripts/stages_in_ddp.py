"""Two stages of a pipeline, each in DistributedDataParallel over two ranks: ``stages_in_ddp.py HOW``. With ``rehearsed`` each
stage learns the shapes from a forward and a backward of its own, before the first micro-batch. With ``static`` it is given
them. With ``by-hand`` the stages are not wrapped: the loop reduces gradients itself, and the monitor is given no group.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, norm_of, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

HOW = sys.argv[1]
MICRO_STEPS, STEPS = 4, 3


def stage_of(number: int, data_parallel: Any, pipeline: Any) -> Any:
    torch.manual_seed(number)
    layer = nn.ModuleDict({f"layer{number}": nn.Linear(4, 4)})
    part = Called(layer) if HOW == "by-hand" else DistributedDataParallel(Called(layer), process_group=data_parallel)
    x, of = torch.zeros(2, 4, requires_grad=True), torch.zeros(2, 4)
    shapes = {
        "input_args": (x if number else of,),
        "output_args": (x,),
        "input_grads": (of if number else None,),
        "output_grads": (None if number else of,),
    }
    return PipelineStage(part, number, 2, torch.device("cpu"), group=pipeline, **shapes if HOW == "static" else {})


class Called(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def train(attach: Attach) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    data_parallel, pipeline = mesh["dp"].get_group(), mesh["pp"].get_group()
    number, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stage = stage_of(number, data_parallel, pipeline)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1, momentum=0.9)
    groups = {} if HOW == "by-hand" else {"process_group": pipeline, "dp_group": data_parallel}
    attach(stage.submod, optimizer, MICRO_STEPS, **groups)
    schedule = Schedule1F1B(stage, MICRO_STEPS, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(7 + replica)
    told: dict[str, Any] = {"gradients": [], "bits": []}
    for _ in range(STEPS):
        x, target = torch.randn(8, 4), torch.randn(8, 4)
        schedule.step(*([] if number else [x]), target=target if number else None)
        for parameter in stage.submod.parameters() if HOW == "by-hand" else ():
            dist.all_reduce(parameter.grad, group=data_parallel)
        told["gradients"].append(norm_of(p.grad for p in stage.submod.parameters()))
        told["bits"].append([float(g).hex() for p in stage.submod.parameters() for g in p.grad.flatten()])
        optimizer.step()
        optimizer.zero_grad()
    return told


run(train)
