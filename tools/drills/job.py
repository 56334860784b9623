"""A rank of a job that trains a small model, with a monitor or without, and with a fault: ``job.py SPEC``, see ``spec.py``.

It appends the loss of each step to a file of its own, as soon as the step has ended.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from faults import FAULTS, PlannedError, StopError
from spec import Job

MONITORS = {"torch": "monitor.pytorch", "mindspore": "monitor.mindspore"}


def main(job: Job) -> int:
    training = training_of(job)
    for step in range(job.begin):  # instead of a checkpoint
        training.step(step)
    monitor = attached(job, training) if job.config is not None else None
    fault = FAULTS[job.fault](job, training)
    fault.armed()
    losses = os.open(job.told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for step in range(job.begin, job.steps):
        loss = one_step(step, job, training, fault)
        os.write(losses, f"{step} {loss}\n".encode())
        fault.after(step)
    fault.restored()
    if monitor is not None:
        monitor.close()
    os.write(losses, b"end\n")
    training.end()
    if job.world > 1:
        os._exit(0)  # with gloo, torch itself aborts now and then while the interpreter ends
    return 0


def one_step(step: int, job: Job, training: Any, fault: Any) -> str:
    """The loss, or what the fault of training was that the loop has caught."""
    if step == job.at:
        fault.begins()
    if step == job.until:
        fault.ends()
    try:
        loss: str = training.step(step)
    except PlannedError as planned:
        training.drop_gradients()
        loss = f"raised: {planned}"
    return loss


def training_of(job: Job) -> Any:
    if job.framework == "torch":
        from train_torch import TorchTraining

        return TorchTraining(job)
    from train_mindspore import MindSporeTraining

    return MindSporeTraining(job)


def attached(job: Job, training: Any) -> Any:
    path = Path(job.output).with_name("config.json" if job.dynamic else f"config-{job.rank}.json")
    if not (job.dynamic and path.exists()):
        path.write_text(json.dumps(job.config))
    os.environ.update({"MONITOR_OUTPUT_DIR": job.output} | ({"DYNAMIC_MONITOR": "True"} if job.dynamic else {}))
    module = __import__(MONITORS[job.framework], fromlist=["TrainerMon"])
    monitor = module.TrainerMon(path, params_have_main_grad=False) if job.framework == "torch" else module.TrainerMon(path)
    monitor.set_monitor(training.model, 1, training.optimizer, start_iteration=job.begin)
    training.compile_again()
    return monitor


if __name__ == "__main__":
    try:
        sys.exit(main(Job.parse(sys.argv[1])))
    except StopError as stop:
        sys.exit(stop.status)
