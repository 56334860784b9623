"""Arguments that cannot be right are named before anything is attached."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from watching import EVERYTHING, Output, attached, footprint, train

from monitor.pytorch import TrainerMon

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))
GRADIENTS: dict[str, Any] = {"wg_distribution": True, "ops": ["norm", "max"]}


def config_at(path: Path, **config: Any) -> Path:
    path.write_text(json.dumps(config))
    return path


def small_model(layers: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers)), nn.Tanh(), nn.Linear(5, 3))


class Bare:
    """Neither an optimizer nor a wrapper of one."""


class Circle:
    """Wraps itself."""

    @property
    def optimizer(self) -> Circle:
        return Circle()


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "text": ({"grad_acc_steps": "2"}, TypeError, "grad_acc_steps is a str and must be an integer"),
    "float": ({"grad_acc_steps": 2.0}, TypeError, "grad_acc_steps is a float and must be an integer"),
    "bool": ({"grad_acc_steps": True}, TypeError, "grad_acc_steps is a bool and must be an integer"),
    "the optimizer second": ({"grad_acc_steps": Bare()}, TypeError, "integer. The order is set_monitor(model, grad_acc_steps,"),
    "no micro-batch": ({"grad_acc_steps": 0}, ValueError, "grad_acc_steps is 0 and must be at least 1"),
    "a start before 0": ({"start_iteration": -1}, ValueError, "start_iteration is -1 and must be at least 0"),
    "a start that is no number": ({"start_iteration": None}, TypeError, "start_iteration is a NoneType"),
    "no module": ({"model": "model"}, TypeError, "model is a str: expected a torch.nn.Module"),
    "no module in the list": ({"model": [nn.Tanh(), None]}, TypeError, "model is a NoneType: expected a torch.nn.Module"),
    "no chunk": ({"model": []}, ValueError, "model is an empty list"),
    "no optimizer": ({"optimizer": None}, TypeError, "optimizer is a NoneType: expected a torch.optim.Optimizer"),
    "a bare optimizer": ({"optimizer": Bare()}, TypeError, "optimizer is a Bare: expected a torch.optim.Optimizer"),
    "a circle of wrappers": ({"optimizer": Circle()}, TypeError, "optimizer is a Circle: expected a torch.optim.Optimizer"),
    "no group": ({"dp_group": [0, 1]}, TypeError, "dp_group is a list: expected a process group"),
    "no group of tensors": ({"tp_group": "tp"}, TypeError, "tp_group is a str: expected a process group"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_one_is_named_before_anything_is_attached(output: Output, tmp_path: Path, case: str) -> None:
    wrong, kind, message = REFUSED[case]
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    before = footprint(model, optimizer)
    monitor = TrainerMon(config_at(tmp_path / "c.json", **EVERYTHING))
    with pytest.raises(kind, match=re.escape(message)):
        monitor.set_monitor(**{"model": model, "grad_acc_steps": 1, "optimizer": optimizer, **wrong})
    assert footprint(model, optimizer) == before
    assert output.directories() == []


@pytest.mark.usefixtures("output")
def test_a_process_group_that_is_none_is_named(tmp_path: Path) -> None:
    model = small_model()
    monitor = TrainerMon(config_at(tmp_path / "c.json"), process_group=7)
    with pytest.raises(TypeError, match="process_group is a int"):
        monitor.set_monitor(model, 1, SGD(model.parameters(), lr=0.1))


@pytest.mark.usefixtures("output")
def test_a_text_is_no_flag(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="params_have_main_grad is 'False': expected True or False"):
        TrainerMon(config_at(tmp_path / "c.json"), params_have_main_grad="False")


def test_what_fails_while_it_attaches_leaves_no_hook_and_a_run_that_has_ended(output: Output, tmp_path: Path) -> None:
    class Refusing(nn.Linear):
        def register_forward_hook(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no hooks here")

    model = nn.Sequential(nn.Linear(5, 5), Refusing(5, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    before = footprint(model, optimizer)
    monitor = TrainerMon(config_at(tmp_path / "c.json", **EVERYTHING), params_have_main_grad=False)
    with pytest.raises(RuntimeError, match="no hooks here"):
        monitor.set_monitor(model, 1, optimizer)
    assert footprint(model, optimizer) == before
    assert output.manifest()["closed"] is True


def test_integers_of_numpy_are_integers(output: Output, tmp_path: Path) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with TrainerMon(config_at(tmp_path / "c.json", **GRADIENTS), params_have_main_grad=False) as monitor:
        monitor.set_monitor(model, np.int64(1), optimizer, start_iteration=np.int32(7))
        train(model, optimizer, 1, X)
    assert output.manifest()["steps"]["written"]["ranges"] == [[7, 7, 1]]


def test_a_group_that_this_rank_is_no_member_of_is_none(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **GRADIENTS) as monitor:
        monitor.set_monitor(model, 1, optimizer, dp_group=dist.GroupMember.NON_GROUP_MEMBER)
        train(model, optimizer, 1, X)
    assert len(output.rows("grad_reduced")) == 4
