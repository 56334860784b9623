"""Weights that are not what the optimizer left: named, unless so many change that something wrote them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from rule_parts import Measured, Rank

from monitor.anomalies.between_steps import MOST_SAID, WRITTEN
from monitor.anomalies.bit_checks import BitChecks
from monitor.anomalies.corruption import CorruptionAlerts
from monitor.coordinator.manifest_format import WrongBits
from monitor.failures import Failures

NAMES = ("a", "b", "c", "d", "e")


class Checked:
    """A rank whose weights are watched.

    Attributes:
        notes: Of the manifest.
    """

    def __init__(self, directory: Path) -> None:
        self.rank, self.notes = Rank(directory), dict[str, str]()
        alerts = CorruptionAlerts(3, self)
        self._watcher = BitChecks(3, self.rank.series, alerts, Failures(3))

    def note(self, key: str, value: str) -> None:
        self.notes[key] = value

    def found_wrong(self, bits: WrongBits) -> None:
        self.notes[f"{bits.kind} before step {bits.step}"] = bits.said
        assert bits.ranks == (3,)

    def step(self, number: int, began: dict[str, float], left: dict[str, float]) -> None:
        kinds = {"param_origin": _measured(began), "param_updated": _measured(left)}
        self.look(number, {kind: rows for kind, rows in kinds.items() if rows})

    def look(self, number: int, kinds: dict[str, list[Measured]]) -> None:
        self._watcher.look(self.rank.step(number, kinds))

    def drop(self, number: int) -> None:
        self._watcher.dropped(number, "the queue was full")


def _measured(values: dict[str, float]) -> list[Measured]:
    return [Measured(name, [value, 1.0], checked=True) for name, value in values.items()]


@pytest.fixture
def checked(tmp_path: Path) -> Checked:
    return Checked(tmp_path)


def weights(step: float, **others: float) -> dict[str, float]:
    return dict.fromkeys(NAMES, step) | others


def test_weights_that_the_next_step_begins_with_as_they_were_left_are_nothing_to_tell(checked: Checked) -> None:
    for step in range(4):
        checked.step(step, weights(step), weights(step + 1))
    assert checked.notes == {}


def test_a_weight_that_has_changed_is_named_with_rank_step_and_what_it_may_be(
    checked: Checked, caplog: pytest.LogCaptureFixture
) -> None:
    checked.step(4, weights(4), weights(5))
    with caplog.at_level(logging.WARNING, logger="monitor"):
        checked.step(5, weights(5, c=5.0000005), weights(6))
    ((about, text),) = checked.notes.items()
    assert about == "param_origin before step 5"
    assert "1 of 5 weights changed after the optimizer's step 4 and before step 5: c. The memory of this device was" in text
    assert "loaded" in text
    assert [record.getMessage() for record in caplog.records] == [f"[rank 3] {text}"]


def test_the_model_of_a_weight_is_named_if_the_rank_has_several(checked: Checked) -> None:
    def both(value: float, changed: float) -> dict[str, list[Measured]]:
        return {
            kind: [
                Measured("a", [one, 1.0], vpp_stage=chunk, checked=True)
                for chunk in (0, 1)
                for one in [began if chunk else value]
            ]
            for kind, began in (("param_origin", changed), ("param_updated", value))
        }

    for step, (value, changed) in enumerate(((1.0, 0.0), (1.0, 7.0))):
        checked.look(step, both(value, changed))
    (text,) = checked.notes.values()
    assert "1 of 2 weights changed after the optimizer's step 0 and before step 1: a of chunk 1." in text


def test_most_weights_at_once_were_written_which_is_said_once(checked: Checked) -> None:
    for step in range(3):
        checked.step(step, weights(10 * step), weights(10 * step + 1))
    (text,) = checked.notes.values()
    assert "5 of 5 weights changed after the optimizer's step 0 and before step 1. So many" in text


def test_a_loop_that_writes_most_weights_is_accused_of_nothing_where_it_writes_few(checked: Checked) -> None:
    """SAM adds to the weights and subtracts the same. Rounding decides which of them are as before."""
    for step in range(4):
        checked.step(step, weights(10 * step), weights(10 * step + 1))
    checked.step(4, weights(31, b=0.5), weights(32))
    first, then = checked.notes
    assert (first, then) == ("weights before step 1", f"weights {WRITTEN}")
    assert "Most weights were written before 3 steps, the last of them step 3: the loop does so." in checked.notes[then]


def test_a_weight_that_has_changed_is_named_after_two_checkpoints_were_loaded(checked: Checked) -> None:
    for step in range(3):
        checked.step(step, weights(10 * step), weights(10 * step + 1))
    checked.step(3, weights(21, c=0.5), weights(22))
    assert list(checked.notes) == ["weights before step 1", "param_origin before step 3"]


def test_a_weight_that_changes_in_every_step_is_named_once_and_does_not_hide_another(checked: Checked) -> None:
    for step in range(5):
        checked.step(step, weights(step, b=-step, **({"d": 0.5} if step == 3 else {})), weights(step + 1))
    assert {about: text.split(": ")[1].split(".")[0] for about, text in checked.notes.items()} == {
        "param_origin before step 1": "b",
        "param_origin before step 3": "d",
    }


def test_weights_that_the_program_writes_and_no_optimizer_changes_are_accused_of_nothing(checked: Checked) -> None:
    """A momentum encoder, or an average inside the model. What the optimizer steps is compared as before."""
    for step in range(5):
        own = {"d": 0.1 * step, "e": 0.2 * step}
        checked.step(step, weights(step, **own, **({"b": 0.5} if step == 3 else {})), weights(step + 1, **own))
    assert {about: text.split(": ")[1].split(".")[0] for about, text in checked.notes.items()} == {
        f"weights of the program, {WRITTEN}": "d, e",
        "param_origin before step 3": "b",
    }


def test_a_frozen_weight_that_stays_as_it_is_and_then_changes_is_named(checked: Checked) -> None:
    for step in range(4):
        checked.step(step, weights(step, d=7.5 if step > 1 else 7.0), weights(step + 1, d=7.5 if step > 1 else 7.0))
    ((about, text),) = checked.notes.items()
    assert (about, text.split(": ")[1].split(".")[0]) == ("param_origin before step 2", "d")


def test_no_more_is_said_than_a_person_reads(checked: Checked) -> None:
    names = [f"w{number}" for number in range(3 * MOST_SAID)]
    for step, name in enumerate(names):
        checked.step(step, dict.fromkeys(names, float(step)) | {name: -1.0}, dict.fromkeys(names, step + 1.0))
    assert len(checked.notes) == MOST_SAID


@pytest.mark.parametrize("missed", ["a step that was not collected", "a step that was dropped", "no weights after a step"])
def test_what_was_not_seen_is_not_compared(checked: Checked, missed: str) -> None:
    checked.step(0, weights(0), weights(1) if missed != "no weights after a step" else {})
    if missed == "a step that was dropped":
        checked.drop(1)
    checked.step(2 if missed == "a step that was not collected" else 1, weights(7), weights(8))
    assert checked.notes == {}


def test_weights_without_checksums_and_new_weights_are_not_compared(checked: Checked) -> None:
    checked.step(0, {"a": 1.0}, {"a": 2.0})
    checked.step(1, {"b": 5.0, "a": 2.0}, {"b": 6.0, "a": 3.0})
    checked.step(2, {"a": 3.0, "b": 6.0}, {})
    assert checked.notes == {}
    checked.step(3, {"a": 3.0}, {"a": 4.0})
    checked._watcher.look(checked.rank.step(4, {"param_origin": [Measured("a", [9.0])]}))
    assert checked.notes == {}


def test_weights_that_another_optimizer_has_stepped_are_not_compared_and_the_others_are(checked: Checked) -> None:
    checked.step(0, weights(0), weights(1))
    rows = checked.rank.step(1, {"param_origin": _measured(weights(1, b=0.5, c=0.5)), "param_updated": _measured(weights(2))})
    checked._watcher.look(replace(rows, rewritten=frozenset({(0, "b"), (1, "c")})))
    assert {about: text.split(": ")[1].split(".")[0] for about, text in checked.notes.items()} == {
        f"weights of several optimizers, {WRITTEN}": "b, c",
        "param_origin before step 1": "c",
    }


def test_a_replica_that_another_rank_writes_is_compared_too(checked: Checked) -> None:
    for step, began in enumerate((1.0, 2.0, 2.5)):
        replicas = [
            *(Measured(f"param_origin/{name}", [began if name == "c" else step + 1.0], checked=True) for name in NAMES),
            Measured("grad_reduced/c", [7.0 + step], checked=True),
            *(Measured(f"param_updated/{name}", [step + 2.0], checked=True) for name in NAMES),
        ]
        checked._watcher.look(checked.rank.step(step, {"replica": replicas}))
    ((about, text),) = checked.notes.items()
    assert (about, text.split(": ")[1].split(".")[0]) == ("param_origin before step 2", "c")
