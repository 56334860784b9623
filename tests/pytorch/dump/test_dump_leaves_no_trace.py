"""Inside a dump everything computes the same bits, and after it everything is as it was."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dumping import Convolutional, Dump, Transformer, dumping, loss_of, seeded
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from monitor.pytorch import PrecisionDebugger


def trained(kind: type[nn.Module]) -> list[bytes]:
    """The bits of a loss and of all gradients, and the random state after them."""
    network = seeded(kind)
    loss = loss_of(network)
    loss.backward()
    tensors = [loss, *(parameter.grad for parameter in network.parameters()), torch.get_rng_state()]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def dumped(kind: type[nn.Module], tmp_path: Path, **arguments: str) -> list[bytes]:
    network = seeded(kind)
    with dumping(tmp_path, network, **arguments):
        loss = loss_of(network)
        loss.backward()
    tensors = [loss, *(parameter.grad for parameter in network.parameters()), torch.get_rng_state()]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("kind", [Convolutional, Transformer])
def test_a_run_that_is_dumped_computes_the_same_bits(kind: type[nn.Module], level: str, task: str, tmp_path: Path) -> None:
    assert dumped(kind, tmp_path, level=level, task=task) == trained(kind)


def tables() -> dict[str, dict[str, object]]:
    """Everything that could have been replaced."""
    places = {"torch": torch, "Tensor": Tensor, "F": F, "dist": torch.distributed, "overrides": torch.overrides}
    return {name: dict(vars(place)) for name, place in places.items()}


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_what_torch_is_made_of_is_the_same_after_a_dump(tmp_path: Path, level: str) -> None:
    network = seeded(Convolutional)
    before, kind = tables(), type(torch.overrides)
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    debugger.start(network)
    assert (tables() == before) is (level == "L0")
    loss_of(network).backward()
    debugger.stop()
    assert (tables(), type(torch.overrides)) == (before, kind)
    assert _get_current_function_mode_stack() == []
    debugger.step()


def test_modules_and_parameters_have_no_hooks_after_a_dump(tmp_path: Path) -> None:
    network = seeded(Convolutional)
    with dumping(tmp_path, network, level="mix"):
        loss_of(network).backward()
    hooks = [hooks for module in network.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    hooks += [parameter._backward_hooks for parameter in network.parameters()]
    assert [one for one in hooks if one] == []


def test_a_mode_that_a_user_has_entered_meanwhile_stays(tmp_path: Path) -> None:
    class Users(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start()
    with Users() as mode:
        F.relu(torch.ones(1))
        debugger.stop()
        assert _get_current_function_mode_stack() == [mode]
    debugger.step()
    assert list(Dump(tmp_path).data) == ["Functional.relu.0.forward"]


class Counting(TorchFunctionMode):
    """Counts the calls that are announced to it."""

    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_a_mode_that_is_left_within_a_dump_is_gone_and_the_dump_continues(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    with Counting() as mode, torch.device("meta"):
        debugger.start()
        F.relu(torch.ones(1, device="cpu"))
    counted = mode.calls
    F.gelu(torch.ones(1))
    assert torch.ones(1).device.type == "cpu"
    debugger.stop()
    assert (_get_current_function_mode_stack(), mode.calls) == ([], counted)
    debugger.step()
    assert list(Dump(tmp_path).data) == ["Functional.relu.0.forward", "Functional.gelu.0.forward"]


def test_the_default_device_may_be_set_and_changed_within_a_dump(tmp_path: Path) -> None:
    try:
        torch.set_default_device("meta")
        debugger = PrecisionDebugger(dump_path=tmp_path)
        debugger.start()
        F.relu(torch.ones(1, device="cpu"))
        torch.set_default_device("cpu")
        F.gelu(torch.ones(1))
        debugger.stop()
        debugger.step()
        assert torch.get_default_device().type == "cpu"
    finally:
        torch.set_default_device(None)
    assert _get_current_function_mode_stack() == []
    assert list(Dump(tmp_path).data) == ["Functional.relu.0.forward", "Functional.gelu.0.forward"]


def test_attention_in_evaluation_takes_the_way_that_it_takes_without_a_dump(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = layer(x)
        with dumping(tmp_path):
            found = layer(x)
    assert found.numpy().tobytes() == expected.numpy().tobytes()
    assert not [name for name in Dump(tmp_path).data if "multi_head_attention_forward" in name]


def test_a_dump_keeps_no_model_alive(tmp_path: Path) -> None:
    network = seeded(Convolutional)
    debugger = PrecisionDebugger(dump_path=tmp_path, level="mix")
    debugger.start(network)
    loss_of(network).backward()
    debugger.stop()
    debugger.step()
    known = weakref.ref(network)
    del network
    gc.collect()
    assert known() is None


def test_a_failure_of_a_dump_is_said_beside_it_and_does_not_reach_training(tmp_path: Path) -> None:
    class Unreadable(dict):  # type: ignore[type-arg]
        def items(self):
            raise RuntimeError("not to be looked into")

    network = nn.Sequential(Takes(), nn.ReLU())
    with dumping(tmp_path, network, level="L0"):
        network[0](torch.ones(1), Unreadable())
        network[1](torch.ones(1))
    dump = Dump(tmp_path)
    assert list(dump.data) == ["Module.1.ReLU.forward.0"]
    assert "not to be looked into" in (dump.directory / "dump_error_info.log").read_text()


class Takes(nn.Module):
    """Anything at all."""

    def forward(self, x: Tensor, _: object) -> Tensor:
        return x
