"""What frameworks tell of local gradients: all that is wanted, and in a step that is not collected nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from monitor.failures import Failures
from monitor.pytorch.frameworks import megatron
from monitor.pytorch.frameworks.fsdp1 import Fsdp1
from monitor.pytorch.frameworks.fsdp2 import Fsdp2
from monitor.pytorch.frameworks.megatron import MainGradients
from monitor.pytorch.hooks import TorchCallPatch
from monitor.recording.attached_model import NamedParameter


@pytest.fixture(autouse=True)
def _a_rank_of_two() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Gradients:
    """Notes what it is called with."""

    def __init__(self, *, wanted: bool) -> None:
        self.names: list[str] = []
        self.wanted = wanted

    def arrived(self, parameter: NamedParameter, gradient: Tensor, *, complete: bool) -> None:
        del gradient, complete
        self.names.append(parameter.name)


def fsdp1() -> nn.Module:
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(nn.Linear(4, 4), **options)


def fsdp2() -> nn.Module:
    return fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize(("build", "framework"), [(fsdp1, Fsdp1), (fsdp2, Fsdp2)])
@pytest.mark.parametrize("wanted", [True, False])
def test_gradients_are_announced_only_while_they_are_wanted(
    build: Callable[[], nn.Module], framework: Any, wanted: bool
) -> None:
    model = build()
    parameters = [NamedParameter(0, name.rpartition(".")[2], p) for name, p in model.named_parameters()]
    gradients = Gradients(wanted=wanted)
    optimizer = torch.optim.SGD(model.parameters())
    caught = framework([model], optimizer, main_grad=False).catch_unreduced(parameters, gradients, Failures())
    try:
        model(torch.ones(2, 4)).sum().backward()
    finally:
        caught.remove()
    assert sorted(gradients.names) == (["bias", "weight"] if wanted else [])


@pytest.mark.parametrize("wanted", [True, False])
def test_a_parameter_that_was_frozen_after_megatron_wrapped_it_does_not_stand_in_the_way(wanted: bool) -> None:
    model = nn.Linear(4, 4)
    for p in model.parameters():
        p.main_grad = torch.zeros(p.shape)
    kept = [get_gradient_edge(p) for p in model.parameters()]  # as Megatron does
    model.bias.requires_grad_(False)
    gradients = Gradients(wanted=wanted)
    caught = MainGradients([NamedParameter(0, name, p) for name, p in model.named_parameters()], gradients, Failures())
    try:
        model(torch.ones(2, 4)).sum().backward()
    finally:
        caught.remove()
    assert len(kept) == 2
    assert gradients.names == (["weight"] if wanted else [])


def test_a_megatron_without_a_method_that_is_patched_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "STEPS", (TorchCallPatch(megatron.MegatronOptimizer, "no_such_step"),))
    with pytest.raises(
        ValueError, match=r"cannot observe megatron-core .* \(MegatronOptimizer has no no_such_step\): use a version"
    ):
        megatron.check_version()
