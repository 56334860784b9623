"""What is measured where nothing waits for the device, in MindSpore's own operations: run here on tensors in host memory."""

from __future__ import annotations

from typing import Any

import pytest
from attaching import as_measured, attached
from mindspore import dtype as types, nn
from mindspore.experimental import optim
from reading_back import Output
from watching_cells import OPS, TwoLayers, train

from monitor.mindspore import tensor_reader

ALL: dict[str, Any] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "mv_distribution": True,
    "param_distribution": True,
    "update_ratio": True,
    "mg_direction": True,
    "recording_l2_features": True,
    "l2_targets": {
        "linear_hook": [],
        "moe_router_weight_hook": ["b"],
        "moe_router_logit_hook": ["b"],
        "activation_hook": ["a", "b"],
    },
    "dead_after_steps": 1,
    "ops": list(OPS),
    "ndigits": 12,
}


def rows_of(output: Output) -> dict[tuple[str, str, int], dict[str, Any]]:
    kinds = {path.stem.rpartition("_")[0] for path in output.directory().glob("*.csv")}
    return {(kind, row.name, row.step): row.values for kind in kinds for row in output.rows(kind)}


def rows_and_losses(tmp: Any, patched: pytest.MonkeyPatch, *, there: bool) -> tuple[Any, Any]:
    output = as_measured(tmp, patched, there=there)
    net = TwoLayers()
    net.b.to_float(types.float16)
    optimizer = optim.AdamW(net.trainable_params(), 0.01)
    with attached(output, net, optimizer, **ALL):
        losses = train(net, optimizer, range(4))
    return rows_of(output), losses


def test_the_rows_are_those_of_the_host_also_where_a_cell_computes_in_float16(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, losses = rows_and_losses(tmp_path, monkeypatch, there=False)
    there, same_losses = rows_and_losses(tmp_path, monkeypatch, there=True)
    assert same_losses == losses
    assert set(there) == set(here)
    for place, values in here.items():
        for op, value in values.items():
            assert there[place][op] == value or there[place][op] == pytest.approx(value, rel=2e-5, abs=2e-6), (place, op)


def test_the_step_that_has_just_ended_can_be_asked_for(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "on_the_host", lambda: False)
    net = TwoLayers()
    optimizer = nn.SGD(net.trainable_params())
    with attached(output, net, optimizer, **ALL) as monitor:
        train(net, optimizer, range(1))
        metrics = monitor.generate_wgrad_metrics()
    reduced, unreduced = ({tag.rpartition("/")[0]: values for tag, values in one.items()} for one in metrics)
    assert reduced == unreduced
    assert len(reduced) == 4
