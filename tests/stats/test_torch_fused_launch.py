"""What a launch costs after the first one, and which kernel a device has."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import assert_agrees

from monitor.stats.partials import COLUMNS
from monitor.stats.torch import dispatch
from monitor.stats.torch.device_kernel import TorchDeviceKernel
from monitor.stats.torch.dispatch import DeviceKernels, ListedTensor, engine_for, reduce_into, reduce_listed
from monitor.stats.triton.launch import Launch

CPU = torch.device("cpu")


class Function:
    """Acts as a kernel of Triton's, of which only a device can compile one."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: float, **constants: Any) -> Any:
            self.launched.append((grid, arguments, constants))
            return self.compiled

        return launch


class Compiled:
    """What Triton returns from a launch."""

    function, packed_metadata = 77, "metadata"

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.ran.append(arguments)


def test_what_was_compiled_is_launched_directly_from_then_on() -> None:
    compiled = Compiled()
    function = Function(compiled)
    launch = Launch(function, {"WIDE": True, "LANES": 128}, {"num_warps": 4})
    for programs in (5, 6, 7):
        launch(programs, 123, 1, 2.5)
    assert function.launched == [((5, 1, 1), (1, 2.5), {"WIDE": True, "LANES": 128, "num_warps": 4})]
    assert compiled.ran == [(n, 1, 1, 123, 77, "metadata", None, None, None, 1, 2.5, True, 128) for n in (6, 7)]


def test_what_cannot_be_launched_directly_is_launched_by_triton_each_time() -> None:
    function = Function(None)
    launch = Launch(function, {}, {})
    for _ in range(3):
        launch(1, 0, 1)
    assert not launch.ready
    assert len(function.launched) == 3


def test_a_device_without_a_backend_of_tritons_has_the_portable_kernel_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernels = DeviceKernels()
    assert engine_for(CPU) is None
    assert type(kernels.kernel(1e-8, CPU)) is TorchDeviceKernel
    assert kernels.kernel(1e-8, CPU) is kernels.kernel(1e-8, CPU)
    assert kernels.list(1e-8, CPU) is None
    assert not caplog.records


class Active:
    """Acts as Triton's driver of a device that this machine does not have."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def get_active_torch_device(self) -> torch.device:
        return torch.device(self.kind)

    def get_current_target(self) -> Any:
        raise OSError("no C compiler was found")


def with_driver(monkeypatch: pytest.MonkeyPatch, active: Active) -> None:
    triton = pytest.importorskip("triton")
    backend = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    monkeypatch.setattr(triton.backends, "backends", {"any": backend})
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))


def test_a_device_that_triton_should_compile_for_and_does_not_is_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_driver(monkeypatch, Active("cpu"))
    monkeypatch.setattr(logging.getLogger("monitor"), "propagate", True)
    kernels = DeviceKernels()
    assert {type(kernels.kernel(eps, CPU)) for eps in (1e-8, 1e-8, 0.0)} == {TorchDeviceKernel}
    [said] = [record.getMessage() for record in caplog.records]
    assert "no C compiler was found" in said
    assert "TRITON_CACHE_DIR" in said


def test_a_device_of_another_type_than_tritons_driver_is_for_is_not_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_driver(monkeypatch, Active("cuda"))
    monkeypatch.setattr(logging.getLogger("monitor"), "propagate", True)
    assert engine_for(CPU) is None
    assert not caplog.records


def test_without_triton_nothing_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(logging.getLogger("monitor"), "propagate", True)
    assert engine_for(CPU) is None
    assert not caplog.records


def test_without_triton_the_monitor_is_imported() -> None:
    """Builds of torch for CPUs do not bring it."""
    without = "import sys; sys.modules['triton'] = None; import monitor.pytorch"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_triton_without_knobs_is_asked_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not dispatch._is_interpreted(SimpleNamespace())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch._is_interpreted(SimpleNamespace())


class Page:
    """A page, and whether it is being written."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(3, len(COLUMNS), dtype=torch.float64)
        self.entered = 0

    def written(self) -> Page:
        return self

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        self.entered += 1


def test_a_list_where_nothing_is_launched_together_is_reduced_one_by_one() -> None:
    first, second = Page(), Page()
    tensors = [torch.randn(50), torch.randn(60), torch.randn(70)]
    items = [ListedTensor(tensors[0], first, 0), ListedTensor(tensors[1], second, 2), ListedTensor(tensors[2], first, 1)]
    assert reduce_listed(items, 1e-8) == []
    for item in items:
        assert_agrees(item.page.tensor[item.row].numpy(), item.tensor, 1e-8)
    assert (first.entered, second.entered) == (2, 2)


def test_a_tensor_of_a_list_that_cannot_be_read_is_named_and_hides_no_other() -> None:
    page = Page()
    items = [
        ListedTensor(torch.randn(20), page, 0),
        ListedTensor(torch.randn(50), page, 7),
        ListedTensor(torch.randn(30), page, 2),
    ]
    [(place, error)] = reduce_listed(items, 1e-8)
    assert place == 1
    assert isinstance(error, Exception)
    assert page.tensor[[0, 2]].any(dim=1).all()


def test_the_operator_writes_nothing_where_the_micro_step_is_negative() -> None:
    table = torch.zeros(3, len(COLUMNS), dtype=torch.float64)
    reduce_into(torch.randn(10), table, 1, torch.tensor(-1), 1e-8)
    assert not table.any()
