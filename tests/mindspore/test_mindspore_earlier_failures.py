"""Operations of the user's that fail later than they are called: wherever the error shows, training sees it.

On a CPU, ``mint.zeros_like`` has no kernel, as is found out when somebody waits.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from attaching import EVERYTHING, Output, attached, footprint, step_with, steps_of, warnings_in
from mindspore import Tensor, mint, nn, ops
from mindspore.experimental import optim
from training import Net, inputs
from watching_cells import written

from monitor.failures import EarlierFailure
from monitor.mindspore import TrainerMon

pytestmark = [
    pytest.mark.skipif(ms.get_context("device_target") != "CPU", reason="it has one elsewhere"),
    pytest.mark.usefixtures("recording_ends"),
]


class Failing(Net):
    """Fails in its forward, in its loss, or in neither."""

    where = "nowhere"

    def construct(self, x: Tensor) -> Tensor:
        hidden = ops.tanh(self.a(x))
        if self.where == "the forward":
            mint.zeros_like(hidden)
        loss = ops.tanh(self.b(hidden)).sum()
        if self.where == "the loss":
            mint.zeros_like(loss)
        return loss


def failing_step(net: Failing, optimizer: nn.Cell, where: str) -> None:
    """What the user calls: the last call is the first that needs numbers."""
    net.where = where
    try:
        loss, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(1))
    finally:
        net.where = "nowhere"
    if where == "the loop":
        mint.zeros_like(loss)
    optimizer(gradients)
    loss.asnumpy()


def told(step: Callable[[], object]) -> str:
    """The error that training sees."""
    with pytest.raises(RuntimeError) as raised:
        step()
    return str(raised.value).strip().splitlines()[0]


def error_without_a_monitor() -> str:
    net = Failing()
    return told(lambda: failing_step(net, nn.SGD(net.trainable_params(), 0.1), "the forward"))


FORWARD: dict[str, Any] = {"xy_distribution": True, "forward_only": True}
BACKWARD: dict[str, Any] = {"xy_distribution": True, "backward_only": True}
LINEAR: dict[str, Any] = {"recording_l2_features": True, "l2_targets": {"linear_hook": ["a", "b"]}}

OUTPUTS: dict[str, Any] = {"recording_l2_features": True, "l2_targets": {"activation_hook": ["1"]}}


@pytest.mark.parametrize(
    ("where", "config"),
    [
        ("the forward", FORWARD),
        ("the forward", BACKWARD),
        ("the forward", LINEAR),
        ("the forward", EVERYTHING),
        ("the loss", {"wg_distribution": True}),
        ("the loss", BACKWARD),
        ("the loop", {"wg_distribution": True}),
        ("the loop", {"param_distribution": True}),
        ("the loop", {"mv_distribution": True}),
        ("the loop", {"mg_direction": True}),
        ("the loop", {"update_ratio": True}),
        ("the loop", {"ur_distribution": True, "format": "hdf5"}),
        ("the loop", EVERYTHING),
    ],
    ids=lambda one: one if isinstance(one, str) else "+".join(one) if len(one) < 5 else "everything",
)
def test_training_sees_its_error_wherever_it_shows(
    output: Output, caplog: pytest.LogCaptureFixture, where: str, config: dict[str, Any]
) -> None:
    expected = error_without_a_monitor()
    net = Failing()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **config):
        step_with(net, optimizer, 0)
        assert told(lambda: failing_step(net, optimizer, where)) == expected
        step_with(net, optimizer, 2)
    # A step whose optimizer was not called continues with the next forward, and that is all there is to say of it.
    assert not output.manifest()["failures"]
    assert [line for line in warnings_in(caplog) if "has more training forwards of the model" not in line] == []


def test_training_sees_its_error_where_a_parameter_was_frozen(output: Output) -> None:
    """The zeros of its gradient are looked at before the optimizer steps."""
    expected = error_without_a_monitor()
    net = Failing()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, wg_distribution=True):
        step_with(net, optimizer, 0)
        net.a.weight.requires_grad = False
        assert told(lambda: failing_step(net, optimizer, "the loop")) == expected
    assert not output.manifest()["failures"]


class Passing(nn.Cell):
    """Returns a tensor that cannot be computed."""

    def construct(self, x: Tensor) -> Tensor:
        return mint.zeros_like(x)


@pytest.mark.parametrize("config", [FORWARD, BACKWARD, OUTPUTS, {"wg_distribution": True}, EVERYTHING])
def test_an_error_of_training_is_no_failure_of_the_monitor_that_looks_at_the_tensor_that_failed(
    output: Output, config: dict[str, Any]
) -> None:
    net = nn.SequentialCell(nn.Dense(4, 5), Passing()).set_train(True)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    gradients_of = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
    with attached(output, net, optimizer, **config):
        assert told(lambda: optimizer(gradients_of(inputs(0))[1])) == error_without_a_monitor()
    assert output.manifest()["failures"] == {}


def forward_then_fail(net: Net, optimizer: nn.Cell) -> None:
    """A forward and a backward, without a wait, and an operation that fails."""
    ms.value_and_grad(net, None, optimizer.parameters)(inputs(1))
    mint.zeros_like(inputs(0))


def test_closing_passes_an_error_on_and_keeps_what_was_measured_before_it(output: Output) -> None:
    net, other = Net(), Net()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    before = footprint(net, optimizer)
    monitor = attached(output, net, optimizer, **FORWARD)
    monitor.set_monitor(other, 1, nn.SGD(other.trainable_params(), 0.1))
    step_with(net, optimizer, 0)
    forward_then_fail(net, optimizer)
    told(monitor.close)
    assert footprint(net, optimizer) == before
    assert footprint(other, optimizer) == before
    rows = [row for directory in output.directories() for row in output.rows("actv", directory)]
    assert [row.step for row in rows if row.name == "b.output"] == [0, 1]


def test_a_step_in_which_the_seal_receives_an_error_is_recorded(output: Output) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, **FORWARD) as monitor:
        forward_then_fail(net, optimizer)
        told(monitor.batch_ended)
        step_with(net, optimizer, 2)
    assert [row.step for row in output.rows("actv") if row.name == "b.output"] == [0, 1]


def test_a_discarded_step_leaves_no_rows_if_the_wait_receives_an_error(output: Output) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, **FORWARD) as monitor:
        recorder = monitor._recordings[0]._recorder
        forward_then_fail(net, optimizer)
        with pytest.raises(EarlierFailure):
            recorder.discard()
        assert not recorder.has_rows


AT_EXIT = """
import sys
sys.path.insert(0, sys.argv[2])
import mindspore as ms
from mindspore import mint, nn
from training import Net, inputs
from monitor.mindspore import TrainerMon

net = Net()
optimizer = nn.SGD(net.trainable_params(), 0.1)
monitor = TrainerMon(sys.argv[1])
monitor.set_monitor(net, 1, optimizer)
ms.value_and_grad(net, None, optimizer.parameters)(inputs(1))
mint.zeros_like(inputs(0))
"""


def test_a_process_that_ends_with_an_error_in_waiting_writes_its_last_step(output: Output) -> None:
    config = written(output, **FORWARD)
    # A native crash at exit leaves no traceback of its own.
    command = [sys.executable, "-X", "faulthandler", "-c", AT_EXIT, config, str(Path(__file__).parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    files = sorted(path.name for path in output.base.rglob("*"))
    assert ended.returncode == 0, f"exit status {ended.returncode}, files {files}, standard error:\n{ended.stderr}"
    assert {row.name for row in output.rows("actv")} >= {"a.output", "b.output"}
    assert "ZerosLikeExt unregistered" in ended.stderr  # so the error was still waiting


def test_what_comes_after_the_error_is_recorded(output: Output) -> None:
    net = Failing()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, **EVERYTHING):
        step_with(net, optimizer, 0)
        told(lambda: failing_step(net, optimizer, "the forward"))
        step_with(net, optimizer, 1)
        step_with(net, optimizer, 2)
    assert steps_of(output, "actv") == steps_of(output, "grad_reduced") == [0, 1, 2]


def test_attaching_raises_an_earlier_failure_as_it_is(output: Output) -> None:
    net = Net()
    optimizer = optim.AdamW(net.trainable_params(), 0.01)
    monitor = TrainerMon(written(output, wg_distribution=True))
    mint.zeros_like(inputs(0))  # has no kernel on the CPU, as is found out later
    with pytest.raises(RuntimeError):
        monitor.set_monitor(net, 1, optimizer)
    monitor.set_monitor(net, 1, optimizer)
    monitor.close()
