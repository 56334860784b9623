"""Checksums of MindSpore's weights, reduced gradients and moments where replicas are checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from attaching import as_measured, attached, warnings_in
from memory_of_parameters import words_of
from mindspore import nn
from watching_cells import TwoLayers, arrays, train

from monitor.stats.ops import checksums
from monitor.stats.partials import BITS_LOW, COLUMNS, COUNT, Partials, check_columns

RECORDED = {
    "param_distribution": True,
    "wg_distribution": True,
    "mv_distribution": True,
    "xy_distribution": True,
    "all_xy": True,
}
CHECKED = ("param_origin", "param_updated", "grad_reduced", "exp_avg", "exp_avg_sq")


def checksum_of(x: np.ndarray) -> str:
    """By the definition, from the bits."""
    words = x.reshape(-1).view(np.uint32).tolist()
    sums = np.array([[len(words) + sum(words)], [sum(place * word for place, word in enumerate(words))]], dtype=np.uint64)
    row = np.zeros((len(COLUMNS), 1))
    row[COUNT], row[BITS_LOW:] = len(words), check_columns(sums)
    return f"{int(checksums(Partials(row))[0]):016x}"


@pytest.mark.parametrize("there", [False, True], ids=["on the host", "as on a device"])
def test_checksums_are_those_of_the_bits_and_activations_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    output = as_measured(tmp_path, monkeypatch, there=there)
    net = TwoLayers()
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 0.01)
    weights: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    with attached(output, net, optimizer, **RECORDED, replica_check=True, ops=["norm"]):
        train(net, optimizer, range(3), lambda step, when: weights.__setitem__((step, when), arrays(net)))
    for kind, when in (("param_origin", "before"), ("param_updated", "after")):
        found = {(row.name, row.step): row.values["checksum"] for row in output.rows(kind)}
        assert found == {
            (name, step): checksum_of(x.astype(np.float32))
            for (step, then), each in weights.items()
            if then == when
            for name, x in each.items()
        }
    for kind in CHECKED:
        assert all(len(row.values["checksum"]) == 16 for row in output.rows(kind)), kind
    assert not any("checksum" in row.values for row in output.rows("actv"))


@pytest.mark.parametrize("what", ["weights", "exp_avg", "exp_avg_sq"])
def test_what_changes_between_two_steps_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    output = as_measured(tmp_path, monkeypatch, there=False)
    net = TwoLayers()
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 0.01)
    moments = {"exp_avg": optimizer.moments1, "exp_avg_sq": optimizer.moments2}
    with attached(output, net, optimizer, **RECORDED, replica_check="all"):
        train(net, optimizer, range(2), lambda *_: None)
        target = net.b.weight if what == "weights" else moments[what][2]
        words_of(target)[1, 2] ^= 1
        train(net, optimizer, range(2, 4), lambda *_: None)
    said = [line for line in warnings_in(caplog) if "changed after the optimizer's step" in line]
    assert len(said) == 1
    assert f"1 of 4 {what} changed after the optimizer's step 1 and before step 2: b.weight. " in said[0]
    left = {row.step for row in output.rows("exp_avg_updated")}
    assert left == {0, 1, 2, 3}
