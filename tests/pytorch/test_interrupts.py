"""What Ctrl-C ends belongs to no row, if the program goes on."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from observing import ACTIVATIONS, drawn, seeded
from torch import Tensor, nn
from watching import EVERYTHING, Output, assert_rows, attached, warnings_in

from monitor.recording.attachment import Attachment
from monitor.stats.table import StatsTable
from monitor.stats.torch.memory import write_numbers

EXCEPTIONS = [RuntimeError, KeyboardInterrupt, asyncio.CancelledError]


class Raises(nn.Module):
    """Passes its input on, or raises once."""

    once: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        error, self.once = self.once, None
        if error is not None:
            raise error
        return x * 1.0


class Nested(nn.Sequential):
    """Its forward calls itself, as Lightning runs a training step."""

    def forward(self, x: Tensor, inner: bool = False) -> Tensor:
        return super().forward(x) if inner else self(x, True)


@pytest.mark.parametrize("kind", [nn.Sequential, Nested])
@pytest.mark.parametrize("error", EXCEPTIONS)
def test_a_forward_that_is_repeated_has_the_rows_of_the_last_one(
    output: Output, error: type[BaseException], kind: type[nn.Sequential]
) -> None:
    rows = []
    for fails in (True, False):
        model = seeded(lambda kind=kind: kind(nn.Linear(4, 4), nn.Sequential(Raises(), nn.Linear(4, 4))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        before = set(output.directories())
        with attached(output, model, optimizer, grad_acc_steps=2, wg_distribution=True, **ACTIVATIONS):
            for batch in range(4):
                if fails and batch in (1, 2):
                    model[1][0].once = error  # type: ignore[index]
                    with pytest.raises(error):
                        model(drawn(2, 4, dtype=torch.float64) * 100)
                model(drawn(2, 4, seed=batch, dtype=torch.float64)).square().sum().backward()
                if batch % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        (directory,) = set(output.directories()) - before
        rows.append({
            rows_of: sorted((row.name, row.step, row.micro_step, str(row.values)) for row in output.rows(rows_of, directory))
            for rows_of in ("actv", "actv_grad", "grad_unreduced", "grad_reduced")
        })  # fmt: skip
    assert rows[0] == rows[1]


def interrupt() -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt


def interrupted_at(function: Any, call: Callable[[], object], handle: Callable[[], object] = interrupt) -> bool:
    """Call ``call``. When it enters ``function``, a signal comes whose handler calls ``handle``. Returns whether it came."""
    came = []

    def trace(frame: Any, _event: str, _arg: Any) -> None:
        if frame.f_code is function.__code__:
            sys.settrace(None)
            came.append(True)
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, lambda *_: handle())
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return bool(came)


def out_of_time() -> None:
    """What a time limit of the program does."""
    raise TimeoutError


@pytest.mark.parametrize(("handle", "error"), [(interrupt, KeyboardInterrupt), (out_of_time, TimeoutError)])
@pytest.mark.parametrize("forwards", [True, False])
def test_an_interrupt_before_the_end_of_a_step_mixes_it_with_no_other(
    output: Output,
    caplog: pytest.LogCaptureFixture,
    forwards: bool,
    handle: Callable[[], object],
    error: type[BaseException],
) -> None:
    model = seeded(lambda: nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = {}
    with attached(output, model, optimizer, wg_distribution=True, param_distribution=True):
        for step in range(3):
            optimizer.zero_grad()
            if forwards:
                model(drawn(2, 4, seed=step, dtype=torch.float64)).square().sum().backward()
            for p in model.parameters():
                p.grad = torch.full_like(p, step + 1.0) if p.grad is None else p.grad
            expected |= {(name, step, None): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            if step == 1:
                with pytest.raises(error):
                    interrupted_at(Attachment._end_step, optimizer.step, handle)
            else:
                optimizer.step()
    assert_rows(output, "grad_reduced", expected)
    if forwards:
        assert_rows(output, "grad_unreduced", expected)
    for kind in ("param_origin", "param_updated"):
        assert [(row.name, row.step, row.micro_step) for row in output.rows(kind)] == [*expected]
    assert not any(record.levelname == "WARNING" for record in caplog.records if "failed" in record.getMessage())


@pytest.mark.parametrize("reading", [StatsTable.layout_of, StatsTable.note, write_numbers, StatsTable.seal])
def test_a_signal_handler_may_close_the_monitor_while_a_tensor_is_read(
    output: Output, caplog: pytest.LogCaptureFixture, reading: Any
) -> None:
    model = seeded(lambda: nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        model(drawn(2, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()

    with attached(output, model, optimizer, **EVERYTHING, update_ratio=True, mg_direction=True) as monitor:
        step()
        step()
        assert interrupted_at(reading, step, monitor.close)
        step()
    assert output.manifest()["steps"]["written"]["count"] == 2
    assert {row.step for row in output.rows("param_updated")} == {0, 1}
    assert any("interrupted" in line or "Step 2 has no rows" in line for line in warnings_in(caplog))
