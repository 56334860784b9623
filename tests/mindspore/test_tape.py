"""Measurements that MindSpore's executor makes in its own order."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import FrameType
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import EVERYTHING, Output, attached, step_with, with_fixed_weights
from mindspore import Tensor, mint, nn, ops
from training import Net

from monitor.failures import EarlierFailure
from monitor.mindspore import tape as tapes
from monitor.mindspore.tape import ReadSlot, Tape
from monitor.mindspore.tensor_reader import MindSporeTensorReader
from monitor.recording.recorder import RecordedSeries, Recorder
from monitor.series import Series, SeriesTable
from monitor.stats.host.array_kernel import count_magnitudes
from monitor.stats.mindspore.kernels import MindSporeHostKernel
from monitor.stats.mindspore.tensors import as_given, executor
from monitor.stats.partials import COLUMNS, MAX, SUM
from monitor.stats.table import SealedTable

EPS = 1e-8
DTYPES = [
    ms.float32, ms.float16, ms.bfloat16, ms.float64, ms.int64, ms.int32, ms.int16, ms.int8, ms.uint64, ms.uint32, ms.uint16,
    ms.uint8, ms.bool_, ms.complex64, ms.complex128,
]  # fmt: skip


def tensors() -> list[Tensor]:
    """A tensor of each dtype, and tensors that are unusual in other ways."""
    numbers = np.random.default_rng(0).normal(size=(3, 5)) * 10
    plain = [Tensor(numbers).astype(dtype) for dtype in DTYPES]
    large = Tensor(np.random.default_rng(1).normal(size=(50, 3000)).astype(np.float32))
    special = Tensor(np.array([np.nan, np.inf, 1.0, -np.inf], np.float32))
    beyond_range = Tensor(np.full((2, 2), 1e300))
    subnormal = Tensor(np.full((2, 2), 1e-40, np.float32))
    empty, scalar = Tensor(np.zeros((0, 3), np.float32)), Tensor(3.0, ms.float32)
    deep = Tensor(np.ones((1, 2) * 5, np.float32))
    return [*plain, large, special, beyond_range, subnormal, empty, scalar, deep, plain[0].T, plain[0][:, 1]]


@pytest.fixture
def tape() -> Tape:
    made = Tape()
    made.set_up(EPS, higher=False, check_sums=False, magnitudes=False)
    return made


@pytest.mark.parametrize("magnitudes", [False, True])
@pytest.mark.parametrize(("higher", "check_sums"), [(False, False), (True, True)])
def test_the_numbers_are_those_of_the_kernel_that_waits_bit_for_bit(
    tape: Tape, higher: bool, check_sums: bool, magnitudes: bool
) -> None:
    tape.set_up(EPS, higher=higher, check_sums=check_sums, magnitudes=magnitudes)
    kernel, some = MindSporeHostKernel(EPS, higher=higher, check_sums=check_sums), tensors()
    expected = np.zeros((len(some), len(COLUMNS)))
    for number, x in enumerate(some):
        assert kernel.reduce_into(x, expected, number)
        tape.read(x, ReadSlot(tape.slot(number), number))
    tape.wait()
    found = tape.drain()
    assert found.ids.tolist() == list(range(len(some)))
    np.testing.assert_array_equal(found.rows, expected)
    if magnitudes:
        np.testing.assert_array_equal(found.histograms, [count_magnitudes(x.asnumpy()) for x in some])
    assert (found.histograms is not None) == magnitudes
    layouts = [found.layouts[place] for place in found.layout]
    assert layouts == [(tuple(x.shape), str(x.dtype).lower().removesuffix("_")) for x in some]


def test_a_slot_can_ask_for_check_sums_that_the_tape_does_not_measure(tape: Tape) -> None:
    kernel, x = MindSporeHostKernel(EPS, check_sums=True), Tensor(np.arange(6))
    expected = np.zeros((1, len(COLUMNS)))
    kernel.reduce_into(x, expected, 0)
    tape.read(x, ReadSlot(tape.slot(0, checked=True), 0))
    tape.wait()
    np.testing.assert_array_equal(tape.drain().rows, expected)


def test_an_entry_has_the_numbers_of_the_moment_of_the_call(tape: Tape) -> None:
    one, slot = Tensor(np.ones((4, 4), np.float32)), ReadSlot(tape.slot(1), 1)
    x = ms.Parameter(one.copy(), name="x")
    for _ in range(5):
        tape.read(x, slot)
        ops.assign_add(x, one)
        tape.read(mint.matmul(x, x), slot)  # Python drops this tensor at once
    tape.wait()
    rows = tape.drain().rows
    assert rows[:, MAX].tolist() == [1.0, 16.0, 2.0, 36.0, 3.0, 64.0, 4.0, 100.0, 5.0, 144.0]


def test_a_call_does_not_wait_for_the_calls_of_other_slots(tape: Tape) -> None:
    x, slots = Tensor(np.ones((1500, 1500), np.float32)), [ReadSlot(tape.slot(number), number) for number in range(2)]
    for slot in slots:
        tape.read(x, slot)  # MindSpore compiles each operator
    tape.wait()
    tape.drain()
    product = x
    for _ in range(5):
        product = mint.matmul(product, x)
    for slot in slots:
        tape.read(product, slot)
    assert tape.drain().ids.tolist() == [], "the matrices are not multiplied yet"
    tape.wait()
    assert tape.drain().ids.tolist() == [0, 1]


def test_tensors_of_other_shapes_than_a_slots_first_share_an_operator(tape: Tape) -> None:
    one, other = (ReadSlot(tape.slot(number), number) for number in (1, 2))
    first, second = Tensor(np.ones(3, np.float32)), Tensor(np.ones(4, np.float32))
    own = [slot.operator_for(first) for slot in (one, other)]
    assert own[0] is not own[1]
    assert one.operator_for(second) is other.operator_for(second)
    assert [slot.operator_for(first) for slot in (one, other)] == own


def test_no_gradient_flows_through_the_operator(tape: Tape) -> None:
    w = ms.Parameter(Tensor(np.ones((3, 3), np.float32)), name="w")

    def loss(x: Tensor) -> Tensor:
        out = mint.matmul(x, w)
        tape.read(out, ReadSlot(tape.slot(1), 1))
        return out.sum()

    x = Tensor(np.full((3, 3), 2.0, np.float32))
    _, (gradient,) = ms.value_and_grad(loss, None, [w])(x)
    np.testing.assert_array_equal(gradient.asnumpy(), np.full((3, 3), 6.0))


class Reading(nn.Cell):
    """Reads a tensor where MindSpore casts the tensors of its own operations."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def construct(self, x: Tensor) -> Tensor:
        self.tape.read(x, ReadSlot(self.tape.slot(1), 1))
        return mint.matmul(x, x)


def test_a_cell_that_casts_its_operations_does_not_cast_what_is_measured(tape: Tape) -> None:
    x = Tensor(np.full((3, 3), 1.0001, np.float32))
    assert Reading(tape).to_float(ms.float16)(x).dtype == ms.float16
    tape.wait()
    found = tape.drain()
    assert found.layouts == [((3, 3), "float32")]
    assert found.rows[0, SUM] == pytest.approx(9.0009, rel=1e-6)


def test_gated_slots_make_entries_while_the_tape_is_on(tape: Tape) -> None:
    x, slot = Tensor(np.ones(3, np.float32)), ReadSlot(tape.slot(7, gated=True), 7)
    for on in (False, True, False):
        tape.turn(on)
        tape.read(x, slot)
        tape.wait()
    assert tape.drain().ids.tolist() == [7]


def test_slots_of_a_tape_that_is_gone_make_no_entries_and_no_errors(tape: Tape) -> None:
    x, other = Tensor(np.ones(3, np.float32)), Tape()
    slot = ReadSlot(other.slot(1), 1)
    del other
    after = Tape()  # in the place of the other one
    for one in (tape, after):
        one.read(x, slot)
        one.wait()
        assert one.drain().ids.tolist() == []


def test_an_error_of_training_that_the_wait_receives_is_passed_on(tape: Tape) -> None:
    x = Tensor(np.ones((2, 3), np.float32))

    def read_a_result_of_a_failure() -> None:
        tape.read(mint.index_select(x, 0, Tensor([7])), ReadSlot(tape.slot(1), 1))
        tape.wait()

    with pytest.raises(EarlierFailure):
        read_a_result_of_a_failure()


def test_when_the_wait_has_received_an_error_no_operator_is_still_running(tape: Tape) -> None:
    large = Tensor(np.full((1500, 1500), 1e-3, np.float32))
    for number in range(4):
        large = mint.matmul(large, large)
        tape.read(large, ReadSlot(tape.slot(number), number))
    fail(large)
    with pytest.raises(EarlierFailure):
        tape.wait()
    assert tape.drain().ids.tolist() == [0, 1, 2, 3]


def fail(x: Tensor) -> None:
    """Call an operation without a kernel on the CPU. MindSpore finds this out after a moment."""
    mint.zeros_like(x)
    time.sleep(0.05)


SCRIPT = """
import os, sys
import mindspore as ms
from monitor.mindspore.tape import new_tape
print(new_tape() is None)
"""


@pytest.mark.parametrize("variable", [{"MONITOR_NATIVE": "0"}, {"MS_CUSTOM_AOT_WHITE_LIST": "/nowhere"}])
def test_without_the_operator_there_is_no_tape(variable: dict[str, str]) -> None:
    environment = {**os.environ, **variable, "GLOG_v": "3"}
    found = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == "True"


def rows_of(output: Output) -> list[object]:
    others = output.directories()
    net = with_fixed_weights(Net())
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **EVERYTHING):
        for number in range(2):
            step_with(net, optimizer, number)
    (directory,) = set(output.directories()) - set(others)
    kinds = ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_updated", "exp_avg")
    return [output.rows(kind, directory) for kind in kinds]


def test_the_rows_are_those_of_a_reader_that_waits(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows_of(output)
    monkeypatch.setattr("monitor.mindspore.tensor_reader.new_tape", lambda: None)
    assert rows_of(output) == found


class Masked(nn.Cell):
    """Has a large tensor of integers as an argument of each call."""

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask.sum()


def test_large_tensors_that_the_operator_copies_are_copied_in_the_first_step_alone(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[bool] = []
    drain = Tape.drain

    def drained(tape: Tape) -> tapes.Measurements:
        found = drain(tape)
        copied.append(bool(found.copied))
        return found

    monkeypatch.setattr(Tape, "drain", drained)
    net = nn.SequentialCell(nn.Dense(4, 4))
    net.masked = Masked()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    mask = Tensor(np.ones(1 << 19, np.int32))
    step = ms.value_and_grad(lambda x: net.masked(net(x), mask).sum(), None, optimizer.parameters)
    with attached(output, net, optimizer, xy_distribution=True, all_xy=True, ops=["max"]):
        for _ in range(3):
            optimizer(step(Tensor(np.ones((2, 4), np.float32)))[1])
    assert copied.count(True) == 1
    assert [row.step for row in output.rows("actv") if row.name == "masked.input_1"] == [0, 1, 2]


def test_rows_of_many_large_tensors_are_those_of_the_kernel_bit_for_bit() -> None:
    recorder = Recorder(MindSporeTensorReader(SeriesTable(), EPS, magnitudes=True))
    numbers = np.random.default_rng(0).normal(size=(1200, 300))
    large = [Tensor(number * numbers).astype(dtype) for number, dtype in enumerate(DTYPES)]
    weight = ms.Parameter(large[0], name="weight")
    some = [x for three in zip(large, tensors(), reversed(large), strict=False) for x in three] + [large[0].T, weight]
    watched = [RecordedSeries(Series("actv", 0, f"x{number:02}"), (0,)) for number in range(len(some))]
    kernel, expected = MindSporeHostKernel(EPS), np.zeros((len(some), len(COLUMNS)))
    for number, x in enumerate(some):
        assert kernel.reduce_into(x, expected, number)
    for _ in range(2):  # large tensors that the operator copies are read at once in the second step
        recorder.activate(True)
        recorder.record_all(list(zip(watched, some, strict=True)), lambda _, error: pytest.fail(repr(error)))
        recorder.end_step()
        sealed = SealedTable()
        recorder.seal(sealed)
        found = sealed.rows().kinds["actv"].partials
        np.testing.assert_array_equal(found.columns.T, expected)
        np.testing.assert_array_equal(found.histogram, [count_magnitudes(x.asnumpy()) for x in some])


@pytest.mark.parametrize("dtype", [ms.float32, ms.float64, ms.int32])
def test_histograms_that_are_asked_for_later_are_counted_and_no_longer_when_they_are_not(dtype: Any) -> None:
    recorder, found = Recorder(MindSporeTensorReader(SeriesTable(), EPS)), []
    watched, x = RecordedSeries(Series("actv", 0, "x"), (0,)), Tensor(np.array([0, 1, 2]), dtype)
    for wanted in (False, True, True, False):
        recorder.use(EPS, magnitudes=wanted)
        recorder.activate(True)
        recorder.record(watched, x)
        recorder.end_step()
        sealed = SealedTable()
        recorder.seal(sealed)
        histogram = sealed.rows().kinds["actv"].partials.histogram
        found.append(0 if histogram is None else int(histogram.sum()))
    assert found == [0, 3, 3, 0]


def test_no_code_of_python_runs_while_the_operator_is_called_where_a_signal_handler_could_raise(output: Output) -> None:
    net = with_fixed_weights(Net())
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    called: list[str] = []
    with attached(output, net, optimizer, **EVERYTHING):
        step_with(net, optimizer, 0)
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
        try:
            step_with(net, optimizer, 1)
        finally:
            sys.setprofile(None)
    assert "run_op_async" in called
    assert "__infer__" not in called
    assert {row.step for row in output.rows("actv")} == {0, 1}


@pytest.mark.parametrize("place", [0, 1])
def test_a_signal_handler_that_raises_around_a_measurement_leaves_the_recording_of_gradients_on(place: int) -> None:
    calls: list[str] = []

    def interrupt(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "set_mixed_precision_type":
            calls.append(event)
            if len(calls) == place + 1:
                raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), as_given():
            pass
    finally:
        sys.setprofile(None)
    assert executor.enable_grad()
