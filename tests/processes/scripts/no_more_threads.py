"""Training continues where no thread can be started any more: ``RLIMIT_AS`` leaves no room for another stack.

usage: no_more_threads.py DIRECTORY FORMATS before|while
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
from torch import nn

directory, formats, when = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())


def step() -> None:
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def leave_no_room() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (6 << 20), resource.RLIM_INFINITY))


def monitored() -> None:
    from monitor.pytorch import TrainerMon

    TrainerMon(directory / "config.json", params_have_main_grad=False).set_monitor(model, 1, optimizer)


step()
os.environ["MONITOR_OUTPUT_DIR"] = str(directory / "out")
config = {"wg_distribution": True, "ops": ["norm", "min", "max"], "step_count_per_record": 2, "format": formats}
appended = {"append_output": ["Jan01_00-00-00", "Dec31_23-59-59"]} if when == "before" else {}
(directory / "config.json").write_text(json.dumps(config | appended))
if when == "before":
    import monitor.pytorch
    import monitor.sinks.csv
    import monitor.sinks.hdf5
    import monitor.sinks.parquet  # noqa: F401

    leave_no_room()
    monitored()
else:
    monitored()
    step()
    time.sleep(0.3)
    leave_no_room()
for _ in range(8):
    step()
    time.sleep(0.03)
print("trained", model[0].weight.sum().item(), flush=True)
