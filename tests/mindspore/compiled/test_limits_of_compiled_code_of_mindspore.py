"""What compiled code cannot record has no rows, and one warning says so. Training has the same bits."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, warnings_in, with_fixed_weights
from compiled_steps import (
    RECORDED,
    WHOLE,
    Deep,
    Skipping,
    adam,
    called,
    mode_of,
    plain,
    recorded,
    rows_in,
    state_of,
    step_of,
    train,
)
from mindspore import Tensor, nn, ops
from training import inputs
from watching_cells import written

from monitor.mindspore import TrainerMon

MORE = {
    "update_ratio": True,
    "optimizer_health": True,
    "mg_direction": True,
    "stack_info": True,
    "run_numbers": True,
    "ops": [*RECORDED["ops"], "abs_p50"],
}


@pytest.mark.parametrize("how", WHOLE)
def test_kinds_that_need_more_than_single_tensors_are_missing_and_the_norm_of_gradients_is_not(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    bits, rows = recorded(how, Deep, output, **MORE)
    assert bits == plain(how, Deep)
    assert all(values["abs_p50"] is not None for values in rows.values())
    for kind in ("update_ratio", "optimizer_health", "other"):
        assert output.rows(kind) == []
    found = {(row.name, row.step): row.values["value"] for row in output.rows("run")}
    gradients = [values["norm"] for (kind, _, step, _), values in rows.items() if kind == "grad_reduced" and step == 1]
    assert np.isclose(found["grad_norm", 1], np.sqrt(np.square(gradients).sum()))
    assert not any(name.startswith("lr") for name, _ in found)
    (said,) = (one for one in warnings_in(caplog) if "Cells or steps are compiled" in one)
    for name in ("update_ratio", "optimizer_health", "mg_direction", "stack_info", "learning_rate"):
        assert name in said
    assert "abs_p50" not in said
    assert said.endswith(str(output.manifest()["notes"]["compiled_code"]))
    assert [one for one in warnings_in(caplog) if "has no row of" in one] == []


class Recomputed(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.body.recompute()


@pytest.mark.parametrize("how", WHOLE)
def test_recomputed_cells_have_no_rows(how: str, output: Output, caplog: pytest.LogCaptureFixture) -> None:
    bits, rows = recorded(how, Recomputed, output)
    assert bits == plain(how, Recomputed)
    names = {name for kind, name, *_ in rows if kind.startswith("actv")}
    assert {"a.input", "a.output", "b.input", "b.output", ".output"} <= names
    assert not any(name.startswith("body") for name in names)
    assert any("Cells that are recomputed have no rows in compiled code" in said for said in warnings_in(caplog))


@pytest.mark.parametrize("how", WHOLE)
def test_evaluation_has_no_rows(how: str, output: Output) -> None:
    _, expected = recorded(how, Deep, output)
    before = output.directories()
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        monitor = TrainerMon(written(output, **RECORDED))
        monitor.set_monitor(net, 1, optimizer)
        step = step_of(how, net, optimizer)
        evaluate = net if how == "graph" else ms.jit(called(net))
        for number in range(3):
            step(inputs(number))
            evaluate(inputs(number))  # in training mode, but without a backward
            net.set_train(False)
            evaluate(inputs(number))
            net.set_train(True)
        monitor.close()
    (directory,) = set(output.directories()) - set(before)
    assert rows_in(output, directory) == expected


@pytest.mark.parametrize("how", WHOLE)
def test_a_copy_of_a_model_computes_with_its_own_weights_and_has_no_rows(how: str, output: Output) -> None:
    with mode_of(how):
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        with TrainerMon(written(output, **RECORDED)) as monitor:
            monitor.set_monitor(net, 1, optimizer)
            other = copy.deepcopy(net)
            train(step_of(how, net, optimizer))
            call = other if how == "graph" else ms.jit(called(other))
            of_copy = call(inputs(0)).asnumpy()
        fresh = with_fixed_weights(Deep())
        call = fresh if how == "graph" else ms.jit(called(fresh))
        assert of_copy.tobytes() == call(inputs(0)).asnumpy().tobytes()
    assert {step for _, _, step, _ in rows_in(output, output.directory())} == {0, 1, 2}


def test_a_closed_monitor_leaves_cells_as_they_were(output: Output) -> None:
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())
    attributes = [set(vars(cell)) for root in (net, optimizer) for _, cell in root.cells_and_names()]
    with TrainerMon(written(output, **RECORDED)) as monitor:
        monitor.set_monitor(net, 1, optimizer)
        assert type(net) is Deep
        train(step_of("jit", net, optimizer))
    left = [set(vars(cell)) for root in (net, optimizer) for _, cell in root.cells_and_names()]
    assert [sorted(one - before - {"_monitored_program"}) for one, before in zip(left, attributes, strict=True)] == [[]] * len(
        left
    )


def test_a_model_that_was_recorded_in_compiled_code_can_be_freed(output: Output) -> None:
    net = with_fixed_weights(Deep())
    optimizer = adam(net.trainable_params())
    with TrainerMon(written(output, **RECORDED)) as monitor:
        monitor.set_monitor(net, 1, optimizer)
    known = weakref.ref(net)
    del net, optimizer, monitor
    gc.collect()
    assert known() is None


class Listing(nn.Cell):
    """A cell takes a list and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.taking, self.b = Taking(), nn.Dense(4, 2)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(self.taking([x, x * 2.0])["y"])).sum()


class Taking(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(4, 4)

    def construct(self, pair: Any) -> Any:
        return {"y": self.inner(pair[0]) * pair[1]}


@pytest.mark.parametrize("how", WHOLE)
def test_tensors_in_lists_and_dictionaries_have_no_rows(how: str, output: Output, caplog: pytest.LogCaptureFixture) -> None:
    bits, rows = recorded(how, Listing, output)
    assert bits == plain(how, Listing)
    names = {name for kind, name, *_ in rows if kind.startswith("actv")}
    assert {"taking.inner.input", "taking.inner.output", "b.input", ".output"} <= names
    assert not any(name.startswith(("taking.input", "taking.output")) for name in names)
    assert any("Taking takes or returns lists or dictionaries" in said for said in warnings_in(caplog))


def test_a_compiled_step_that_skips_its_optimizer_is_a_skipped_step(output: Output) -> None:
    def run(monitor: TrainerMon | None) -> list[bytes]:
        net = with_fixed_weights(Deep())
        optimizer = adam(net.trainable_params())
        if monitor is not None:
            monitor.set_monitor(net, 1, optimizer)
        step = Skipping(net, optimizer)
        for number, apply in enumerate((1, 0, 1)):
            step(inputs(number), Tensor([apply], ms.int32))
            if monitor is not None:
                monitor.batch_ended()
        return state_of(net, optimizer)

    with mode_of("graph"):
        with TrainerMon(written(output, **RECORDED)) as monitor:
            bits = run(monitor)
        assert bits == run(None)
    rows = rows_in(output, output.directory())
    assert {step for kind, _, step, _ in rows if kind == "actv"} == {0, 1, 2}
    assert {step for kind, _, step, _ in rows if kind == "param_updated"} == {0, 2}
    manifest = json.loads((output.directory() / "manifest.json").read_text())
    assert "skipped" in json.dumps(manifest)
