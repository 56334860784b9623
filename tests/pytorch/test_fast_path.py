"""The code in C takes ordinary tensors and calls, leaves all others to Python, and gives the same rows without a leak."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from evidence import examples
from torch import Tensor, nn
from watching import Output, attached, warnings_in
from ways import IN_PYTHON, WAYS, use

from monitor.pytorch import tensor_reader
from monitor.pytorch.fast_path import IN_C
from monitor.pytorch.tensor_reader import DeviceSteps, TorchTensorReader
from monitor.recording.activations import ModuleCollector
from monitor.recording.recorder import RecordedSeries, Recorder
from monitor.series import Series, SeriesTable
from monitor.stats.partials import COUNT, SUM
from monitor.stats.table import SealedTable
from monitor.stats.torch import memory
from monitor.stats.torch.host_kernel import count_magnitudes
from monitor.stats.torch.memory import TorchDevicePage
from monitor.stats.triton.launch import FusedKernel, Kind, TensorGroup

pytestmark = pytest.mark.skipif(not IN_C, reason="the code in C was not built, or this torch has no exchange of tensors")


class Counting(TorchTensorReader):
    """Counts the tensors that come to Python."""

    came = 0

    def record_in_python(self, *given: Any) -> None:
        self.came += 1
        super().record_in_python(*given)


class Subclass(Tensor):
    pass


def cut() -> Tensor:
    x = torch.ones(100)
    x.untyped_storage().resize_(40)
    return x


def freed() -> Tensor:
    x = torch.ones(100)
    x.untyped_storage().resize_(0)
    return x


def of_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4)


ORDINARY: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.ones(3, 4),
    "float64": lambda: torch.ones(5, dtype=torch.float64),
    "bfloat16": lambda: torch.ones(5, dtype=torch.bfloat16),
    "float16": lambda: torch.ones(5, dtype=torch.float16),
    "int64": lambda: torch.arange(5),
    "no dimension": lambda: torch.tensor(1.0),
    "a parameter": lambda: nn.Parameter(torch.ones(3)),
    "a result": lambda: torch.ones(3, requires_grad=True) * 1.0,
    "a view from the middle": lambda: torch.ones(6, 2)[2:4],
    "of one column": lambda: torch.ones(4, 1).t(),
}
OTHERS: dict[str, Callable[[], Tensor]] = {
    "int32": lambda: torch.ones(4, dtype=torch.int32),
    "bool": lambda: torch.ones(4, dtype=torch.bool),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "transposed": lambda: torch.ones(3, 4).t(),
    "expanded": lambda: torch.ones(1).expand(4),
    "empty": lambda: torch.ones(0),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "negated by its flag": lambda: torch._neg_view(torch.ones(4)),
    "a lazy copy": lambda: torch._lazy_clone(torch.ones(4)),
    "a subclass": lambda: torch.ones(4).as_subclass(Subclass),
    "of inference mode": of_inference,
    "of nine dimensions": lambda: torch.ones((1,) * 9),
    "freed": freed,
    "cut": cut,
    "meta": lambda: torch.ones(4, device="meta"),
}


def rows_of(reader: TorchTensorReader, x: Tensor) -> tuple[int, list[float]]:
    """How many of two records of ``x`` came to Python, and count and sum of the second."""
    recorder, watched = Recorder(reader), RecordedSeries(Series("actv", 0, "x"), (0, 1))
    recorder.activate(True)
    recorder.record(watched, torch.ones(2))  # the first tensor of a series makes its rows
    before = reader.came if isinstance(reader, Counting) else 0
    recorder.record(watched, x, 1)
    came = reader.came - before if isinstance(reader, Counting) else 0
    recorder.end_step()
    sealed = SealedTable()
    recorder.seal(sealed)
    rows = sealed.rows().kinds["actv"]
    return came, [float(rows.partials.columns[column][-1]) for column in (COUNT, SUM) if len(rows) == 2]


@pytest.mark.parametrize("kind", ORDINARY)
def test_an_ordinary_tensor_does_not_come_to_python(kind: str) -> None:
    x = ORDINARY[kind]()
    assert rows_of(Counting(SeriesTable(), 1e-8), x) == (0, [x.numel(), float(x.detach().sum())])


def histograms_of(reader: TorchTensorReader, x: Tensor) -> tuple[int, list[list[float]]]:
    """How many records came to Python once there were rows, and the histograms of ``x``: one of them is an alias's."""
    recorder = Recorder(reader)
    watched, other = RecordedSeries(Series("actv", 0, "x"), (0, 1, 2)), RecordedSeries(Series("actv", 0, "y"), (0,))
    recorder.activate(True)
    for one in (watched, other):
        recorder.record(one, torch.ones(2))  # makes its rows
    before = reader.came if isinstance(reader, Counting) else 0
    recorder.record(watched, x, 1)
    recorder.record(other, x)
    recorder.record_all([(watched, x)], pytest.fail)  # in place of the ones
    recorder.record(watched, x, 3)  # beyond its rows: Python makes another one
    came = reader.came - before if isinstance(reader, Counting) else 0
    recorder.end_step()
    sealed = SealedTable()
    recorder.seal(sealed)
    found = sealed.rows().kinds["actv"].partials.histogram
    return came, [] if found is None else found.tolist()


@pytest.mark.parametrize("kind", ORDINARY)
def test_the_magnitudes_of_ordinary_tensors_are_counted_in_c_if_they_are_not_wide(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = ORDINARY[kind]()
    came, found = histograms_of(Counting(SeriesTable(), 1e-8, magnitudes=True), x)
    assert came == (1 if x.dtype.itemsize < 8 else 3)
    counts = count_magnitudes(x)
    assert counts is not None
    assert found == 4 * [counts.tolist()]
    use(IN_PYTHON, monkeypatch)
    assert histograms_of(TorchTensorReader(SeriesTable(), 1e-8, magnitudes=True), x)[1] == found


def test_histograms_that_are_asked_for_later_are_counted_and_no_longer_when_they_are_not() -> None:
    reader, found = TorchTensorReader(SeriesTable(), 1e-8), []
    recorder, watched = Recorder(reader), RecordedSeries(Series("actv", 0, "x"), (0,))
    for wanted in (False, True, True, False):
        reader.magnitudes = wanted
        recorder.activate(True)
        recorder.record(watched, torch.tensor([0.0, 1.0, 2.0]))
        recorder.end_step()
        sealed = SealedTable()
        recorder.seal(sealed)
        histogram = sealed.rows().kinds["actv"].partials.histogram
        found.append(0 if histogram is None else int(histogram.sum()))
    assert found == [0, 3, 3, 0]


@pytest.mark.parametrize("kind", OTHERS)
def test_every_other_tensor_comes_to_python_and_has_the_row_that_it_has_without_c(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, row = rows_of(Counting(SeriesTable(), 1e-8), OTHERS[kind]())
    assert came == 1
    use(IN_PYTHON, monkeypatch)
    assert row == rows_of(Counting(SeriesTable(), 1e-8), OTHERS[kind]())[1]


class Kernel(FusedKernel):
    """Notes which elements it is given, and where their row is."""

    def __init__(self) -> None:
        self.given: list[tuple[int, ...]] = []

    def reduces_elements(self, x: Tensor, *where: Any) -> bool:
        self.given.append(where)
        return x.dtype is not torch.float16


class Stream:
    def record_event(self) -> object:
        return self


class OnADevice(Counting):
    """Its rows are in the memory of a device, as far as the code in C can tell. What comes to Python ends there."""

    def record_in_python(self, *_given: Any) -> None:
        self.came += 1

    def record_all_in_python(self, items: Any, _failed: Any) -> None:
        self.came += len(items)


class Lists:
    """Notes the groups that it is given. Reads no float64."""

    def __init__(self) -> None:
        self.given: dict[Kind, TensorGroup] = {}

    def launches(self, kind: Kind, group: TensorGroup) -> bool:
        self.given[kind] = group
        return kind[1] is not torch.float64


@dataclass
class Device:
    """A device of this reader, and what launches on it met."""

    kernel: Kernel
    lists: Lists
    current: Stream
    captured: bool = False


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(Kernel(), Lists(), Stream())
    monkeypatch.setattr(torch, "Stream", lambda **_: Stream())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: made.current)
    monkeypatch.setattr(memory, "_current_stream", lambda _: made.current)
    monkeypatch.setattr(tensor_reader, "_new_memory", TorchDevicePage)
    monkeypatch.setattr(tensor_reader.DEVICE_KERNELS, "kernel", lambda *_given, **_wanted: made.kernel)
    monkeypatch.setattr(tensor_reader.DEVICE_KERNELS, "list", lambda *_given, **_wanted: made.lists)
    return made


def recorded_on(device: Device) -> tuple[OnADevice, RecordedSeries, TorchDevicePage]:
    """A reader, and a series of two micro-steps that has its rows."""
    reader, watched = OnADevice(SeriesTable(), 1e-8), RecordedSeries(Series("actv", 0, "x"), (0, 1))
    reader.device_steps = DeviceSteps(lambda _: device.captured)
    slot, _ = reader.rows.slot(watched, torch.device("cpu"), 0)
    assert isinstance(slot.page.memory, TorchDevicePage)
    return reader, watched, slot.page.memory


def test_a_dense_tensor_of_a_device_is_launched_from_c(simulated: Device) -> None:
    reader, watched, page = recorded_on(simulated)
    x = torch.ones(6, 2)[2:4]
    reader.record(watched, x, 1)
    assert reader.came == 0
    assert simulated.kernel.given == [(-1, x.data_ptr(), 4, page.address(1))]
    assert page.address(1) == page.tensor[1].data_ptr()
    columns = reader.rows.table.columns
    assert list(columns.order[:2]) == [0, 1]
    assert reader.rows.table.layouts[columns.layout[1]].shape == (2, 2)


def test_a_tensor_of_a_device_that_is_unchanged_is_not_launched_again(simulated: Device) -> None:
    reader, watched, _ = recorded_on(simulated)
    other = RecordedSeries(Series("actv", 0, "y"), (0, 1))
    slot, _ = reader.rows.slot(other, torch.device("cpu"), 0)
    x = torch.ones(4)
    for one in (watched, other):
        reader.record(one, x, 1)
    assert (reader.came, len(simulated.kernel.given)) == (0, 1)
    assert reader.rows.table.columns.alias[slot.row + 1] == 1


@pytest.mark.parametrize("why", ["captured", "in another stream", "the kernel does not run"])
def test_what_needs_more_than_a_launch_comes_to_python_and_nothing_is_noted(why: str, simulated: Device) -> None:
    reader, watched, _ = recorded_on(simulated)
    simulated.captured = why == "captured"
    simulated.current = Stream() if why == "in another stream" else simulated.current
    reader.record(watched, torch.ones(4, dtype=torch.float16 if why == "the kernel does not run" else torch.float32))
    assert reader.came == 1
    assert reader.rows.table.writes == 0


@dataclass
class Sharded:
    """Acts as a DTensor whose part is on a device."""

    _local_tensor: Any
    is_cpu = False


def listed(device: Device, tensors: Sequence[Any]) -> tuple[OnADevice, list[int]]:
    """A reader that was given the tensors in a list, and the address of the row of each."""
    reader, items, addresses = OnADevice(SeriesTable(), 1e-8), [], []
    reader.device_steps = DeviceSteps(lambda _: device.captured)
    for number, x in enumerate(tensors):
        watched = RecordedSeries(Series("actv", 0, f"x{number}"))
        slot, _ = reader.rows.slot(watched, torch.device("cpu"), 0)
        items.append((watched, Sharded(x)))
        addresses.append(slot.page.memory.address(slot.local_row))
    reader.record_all(items, lambda _, error: pytest.fail(repr(error)))
    return reader, addresses


def test_a_list_on_a_device_is_one_launch_for_each_kind_of_tensor(simulated: Device) -> None:
    tensors = [torch.ones(16), torch.ones(3), torch.ones(2, 16), torch.ones(16, dtype=torch.bfloat16)]
    reader, rows = listed(simulated, tensors)
    assert reader.came == 0
    found = {kind: (group.addresses, group.sizes, group.rows) for kind, group in simulated.lists.given.items()}
    assert found == {
        (-1, torch.float32, True, True): ([tensors[i].data_ptr() for i in (0, 2)], [16, 32], [rows[0], rows[2]]),
        (-1, torch.float32, True, False): ([tensors[1].data_ptr()], [3], [rows[1]]),
        (-1, torch.bfloat16, True, True): ([tensors[3].data_ptr()], [16], [rows[3]]),
    }
    assert simulated.lists.given[-1, torch.float32, True, True].first is tensors[0]
    assert list(reader.rows.table.columns.order[:4]) == [1, 2, 3, 4]


LEFT = {
    "captured": torch.ones(2),
    "in another stream": torch.ones(2),
    "not dense": torch.ones(3, 4).t(),
    "the kernel does not run": torch.ones(2, dtype=torch.float64),
    "not of torch's own types": torch.ones(2).as_subclass(Subclass),
}


@pytest.mark.parametrize("why", LEFT)
def test_a_list_with_a_tensor_that_needs_more_than_a_launch_comes_to_python(why: str, simulated: Device) -> None:
    simulated.captured = why == "captured"
    reader, _ = listed(simulated, [])
    watched = RecordedSeries(Series("actv", 0, "x"))
    reader.rows.slot(watched, torch.device("cpu"), 0)
    simulated.current = Stream() if why == "in another stream" else simulated.current
    reader.record_all([(watched, Sharded(LEFT[why]))], lambda _, error: pytest.fail(repr(error)))
    assert reader.came == 1
    assert reader.rows.table.writes == 0


def test_a_lazy_copy_is_not_made_by_a_look_at_it() -> None:
    x = torch._lazy_clone(torch.ones(4))
    reader = TorchTensorReader(SeriesTable(), 1e-8)
    rows_of(reader, x)
    assert torch._C._is_cow_tensor(x)


class Calls(nn.Module):
    """Calls modules in every way that a plan may or may not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.named, self.nested, self.many, self.changing = Named(), Nested(), Many(), Changing()
        self.same, self.inside, self.held, self.back = nn.Linear(4, 4), nn.ReLU(inplace=True), Held(), Back()

    def forward(self, x: Tensor) -> Tensor:
        x = self.named(x, other=x * 2) + self.named(other=x, x=x)
        a, (b, c) = self.nested([x, (x + 1, None)], 3)
        y = sum(self.many([a, b, c] * 25))
        for times in range(3):
            y = self.same(y) if times else self.inside(self.same(y))
        y = y + sum(self.changing(y, times) for times in range(20))
        return self.back(y) + self.held(y)


class Named(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x * other


class Nested(nn.Module):
    def forward(self, inside: list[Any], _times: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first, (second, _) = inside
        return first * 2, (second.exp(), first * second)


class Many(nn.Module):
    def forward(self, given: list[Tensor]) -> list[Tensor]:
        return [one * 0.5 for one in given]


class Changing(nn.Module):
    """Another structure in every call."""

    def forward(self, x: Tensor, times: int) -> Any:
        return x * 0.1 if times % 2 else x.clone()


class Held(nn.Module):
    """Returns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, _x: Tensor) -> Tensor:
        return self.weight


class Back(nn.Module):
    """Returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_calls_of_every_structure_have_the_same_rows_in_both_ways(output: Output) -> None:
    found = {}
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            use(way, patch)
            torch.manual_seed(0)
            model, optimizer = (made := Calls()), torch.optim.SGD(made.parameters(), 0.0)
            with attached(output, model, optimizer, xy_distribution=True, all_xy=True, ops=["norm", "mean"], ndigits=17):
                for _ in range(4):
                    model(torch.linspace(0, 1, 12).view(3, 4).requires_grad_()).sum().backward()
                    optimizer.step()
            directory = output.directories()[-1]
        found[way] = [output.rows(kind, directory) for kind in ("actv", "actv_grad")]
    assert repr(found["in C"]) == repr(found[IN_PYTHON])
    assert min(map(len, found["in C"])) > 4 * 100


class Handing(nn.Module):
    """Returns one input beside a result: Python ends this call, and finds the gradients of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(4, 4), nn.Linear(4, 4), Both()

    def forward(self, x: Tensor) -> Tensor:
        y, handed = self.both(self.first(x), self.second(x))
        return y + handed


class Both(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * b, a


class OnAThread(nn.Module):
    """Uses the result of another thread, whose operations cannot be told from those of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(4, 4), nn.Linear(4, 4), Both()

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        h = self.first(x)
        thread = threading.Thread(target=lambda: found.append(self.second(x)))
        thread.start()
        thread.join()
        return self.both(h, found[0])[0]


@pytest.mark.parametrize("kind", [Handing, OnAThread])
@pytest.mark.parametrize("place", [0, 1])
def test_of_several_inputs_only_the_chosen_one_is_followed_as_without_c(output: Output, kind: type, place: int) -> None:
    targets = {"both": {"input_grad": f"tuple[2]:{place}"}, "second": {"input": "tensor"}}
    found = {}
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            use(way, patch)
            torch.manual_seed(0)
            model = kind()
            optimizer = torch.optim.SGD(model.parameters(), 0.0)
            with attached(output, model, optimizer, xy_distribution=True, targets=targets, ops=["norm"]):
                for _ in range(3):
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
            directory = output.directories()[-1]
        found[way] = [output.rows(kind, directory) for kind in ("actv", "actv_grad")]
    assert repr(found["in C"]) == repr(found[IN_PYTHON])


def test_an_interrupt_that_comes_while_a_tensor_is_recorded_reaches_training() -> None:
    reader = TorchTensorReader(SeriesTable(), 1e-8)
    recorder, watched, x = Recorder(reader), RecordedSeries(Series("actv", 0, "x"), (0,)), torch.ones(4)
    recorder.record(watched, x)

    class Interrupting:
        """A row's memory, where an interrupt comes."""

        @property
        def native(self) -> bytes:
            raise KeyboardInterrupt

    watched.slots[torch.device("cpu")] = Interrupting()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        recorder.record(watched, x)


def test_nodes_of_a_graph_are_known_until_the_outermost_call_has_ended(output: Output) -> None:
    """Also if the root is not called: nothing else tells when a forward is complete."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    known: list[int] = []
    with attached(output, model, optimizer, xy_distribution=True, all_xy=True, ops=["norm"]):
        (collector,) = [one for one in gc.get_objects() if type(one) is ModuleCollector and model in one.roots.values()]
        model[0][0].register_forward_hook(lambda *_: known.append(len(collector.nodes)))
        for called in (model, model, model[0], model):
            called(torch.ones(2, 4, requires_grad=True) * 1.0).sum().backward()
            assert collector.nodes == {}
            optimizer.step()
    assert known[-1] > 0


def test_a_gradient_that_comes_after_its_step_has_no_row_and_that_is_said(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.ones(2, 4)
    with attached(output, model, optimizer, xy_distribution=True, all_xy=True, ops=["norm"]):
        model(x).sum().backward()
        optimizer.step()
        late = model(x).sum()
        optimizer.step()
        late.backward()
    assert {row.step for row in output.rows("actv_grad")} == {0}
    assert [said for said in warnings_in(caplog) if "A backward ran after its optimizer step" in said]


def test_a_graph_that_outlives_the_monitor_has_no_rows_and_then_frees_the_model(output: Output) -> None:
    class Freed(nn.Linear):
        pass

    model = Freed(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.ones(2, 4, requires_grad=True)
    with attached(output, model, optimizer, xy_distribution=True, all_xy=True, ops=["norm"]):
        model(x).sum().backward()
        optimizer.step()
        left = model(x * 1.0).sum()
    before = x.grad.clone() if x.grad is not None else torch.zeros(2, 4)
    left.backward()
    assert x.grad is not None
    assert torch.equal(x.grad - before, model.weight.sum(0).expand(2, 4))
    del left, model, optimizer
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Freed]


COPIES = 300
"""More steps never wait for the writer."""


def test_steps_leave_neither_memory_nor_references(output: Output) -> None:
    """``make prove`` takes 100,000 steps."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.ones(2, 4)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    watched = (None, True, False, Tensor, nn.Parameter, (), 0, 1)
    kinds: dict[str, Any] = {"wg_distribution": True, "param_distribution": True, "xy_distribution": True, "all_xy": True}
    with attached(output, model, optimizer, **kinds, ops=["norm"], step_count_per_record=10) as monitor:
        train(1)
        (recording,) = monitor._recordings
        assert recording.run is not None
        ring = recording.run.pipeline._ring  # it keeps the copies that a slow writer has needed once: here all before counting
        for copy in [ring.take(0.0) for _ in range(COPIES)]:
            assert copy is not None
            ring.put_back(copy)
        train(1200)
        gc.collect()
        tracemalloc.start()
        held, references = tracemalloc.get_traced_memory()[0], [sys.getrefcount(one) for one in watched]
        train(steps := examples(1000, 100_000))
        gc.collect()
        bound, most, least, deadline = 250_000 + 10 * steps, 500, math.inf, 0.0

        def grown() -> tuple[int, int]:
            more = [sys.getrefcount(one) - before for one, before in zip(watched, references, strict=True)]
            return tracemalloc.get_traced_memory()[0] - held, max(more)

        while not ((left := grown())[0] < bound and left[1] < most) and (left[0] < least or time.monotonic() < deadline):
            if left[0] < least:  # steps still wait for the writer, which may have little of a busy machine
                least, deadline = left[0], time.monotonic() + 20
            time.sleep(0.05)
        held_by = tracemalloc.take_snapshot().statistics("lineno")[:8]
        tracemalloc.stop()
    assert left[0] < bound, held_by
    assert left[1] < most
