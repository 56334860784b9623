"""The verdict of a report names the place of a planted fault, and the first picture shows it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from recorded_job import RecordedRank
from reported_job import LAYERS, NAMES, STEPS, WHEN, Fault, cells, modelled, record, reported
from sink_rows import Measured

from monitor.coordinator.manifest_format import MANIFEST_FILE, StepsRecord, ThinnedRecord, WrongBits, read_manifest
from monitor.recording.parameters import NOT_REDUCED
from monitor.report import history
from monitor.report.checks import CHECKS
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT
from monitor.report.model import model_of, verdict_for_programs
from monitor.series import Placement
from monitor.stats.partials import COUNT, MAX, NANS, POSINFS, SUM, SUMSQ


def planted(rank: int | None, kind: str, name: str, change: float, once: bool = False) -> Fault:
    """Multiply a tensor from a step on, or in that step only."""

    def fault(of: int, step: int, this: str, tensor: str, values: np.ndarray) -> np.ndarray:
        here = (rank in (None, of)) and (this, tensor) == (kind, name) and (step == WHEN if once else step >= WHEN)
        return values * change if here else values

    return fault


ROWS = {
    "a NaN": (planted(1, "actv", "layers.2.output", np.nan), 1, "actv", "layers.2.output", "NaN and infinity"),
    "a NaN in one step": (
        planted(0, "grad_unreduced", "layers.1.weight", np.nan, True),
        0,
        "grad_unreduced",
        "layers.1.weight",
        "",
    ),
    "an infinity": (planted(1, "grad_unreduced", "layers.3.weight", np.inf), 1, "grad_unreduced", "layers.3.weight", ""),
    "a spike": (
        planted(0, "grad_unreduced", "layers.0.weight", 1e4, True),
        0,
        "grad_unreduced",
        "layers.0.weight",
        "Sudden changes",
    ),
    "a vanishing gradient": (planted(1, "grad_unreduced", "layers.2.weight", 0.0), 1, "grad_unreduced", "layers.2.weight", ""),
    "a gradient that shrinks": (
        planted(0, "grad_unreduced", "layers.2.weight", 1e-5),
        0,
        "grad_unreduced",
        "layers.2.weight",
        "",
    ),
    "one rank's weight": (
        planted(0, "param_origin", "layers.1.weight", 30.0),
        0,
        "param_origin",
        "layers.1.weight",
        "Replicas agree",
    ),
    "a replica that differs": (planted(1, "param_origin", "layers.3.weight", 1.001), 1, "param_origin", "layers.3.weight", ""),
}


@pytest.mark.parametrize("what", ROWS)
def test_the_verdict_names_the_place_of_a_fault_in_the_rows(what: str, tmp_path: Path) -> None:
    fault, rank, kind, name, check = ROWS[what]
    model, checks, verdict = modelled(record(tmp_path, fault))
    assert verdict.state == BAD
    assert (WHEN, kind, name) == (verdict.place.step, verdict.place.kind, verdict.place.name)
    assert name in verdict.says
    assert f"step {WHEN}" in verdict.says
    if "replica" not in what and "rank's" not in what:  # of two replicas nobody knows which is right
        assert f"rank {rank}" in verdict.says
    assert not check or check in [one.name for one in checks if one.state == BAD]
    assert (model.data["start"]["kind"], model.data["start"]["tensor"], model.data["atStep"]) == (kind, name, WHEN)
    row = cells(model, kind)[NAMES[kind].index(name)]
    assert row[WHEN] == max(row)
    assert row[WHEN] >= history.LEAST + history.SUDDEN
    of = next(one for one in model.data["kinds"] if one["name"] == kind)
    frame = next(one["cells"] for one in of["frames"] if one["at"] == WHEN)
    by_rank = np.frombuffer(bytes(model.arrays), np.uint8, 2 * LAYERS, frame).reshape(2, LAYERS)
    assert np.unravel_index(by_rank.argmax(), by_rank.shape) == (
        rank if rank == 1 or "rank's" not in what else 1,
        NAMES[kind].index(name),
    )


def test_a_bad_moment_comes_before_the_weight_that_the_step_makes_of_it(tmp_path: Path) -> None:
    def fault(_rank: int, step: int, _kind: str, name: str, values: np.ndarray) -> np.ndarray:
        return values * np.nan if (step, name) == (WHEN, "layers.2.weight") else values

    kinds = dict.fromkeys(("param_updated", "exp_avg"), NAMES["param_origin"])
    with reported(record(tmp_path, fault, names=kinds)) as (_, _checks, verdict):
        assert (verdict.place.step, verdict.place.kind, verdict.place.name) == (WHEN, "exp_avg", "layers.2.weight")


def test_gradients_that_become_zero_are_those_of_a_weight_that_was_cut_off(tmp_path: Path) -> None:
    """As MindSpore has them of a weight that is detached in the middle."""

    def fault(_rank: int, step: int, kind: str, name: str, values: np.ndarray) -> np.ndarray:
        return values * (step < WHEN) if (kind, name) == ("grad_unreduced", "layers.2.weight") else values

    with reported(record(tmp_path, fault)) as (_, checks, verdict):
        (found,) = [one.finding for one in checks if one.name == "Sudden changes"]
    assert found.place.name == verdict.place.name == "layers.2.weight"
    assert found.then == "The loss no longer depends on this weight: look at what was frozen or detached before this step."


@pytest.mark.parametrize("reset", [1, LAYERS])
def test_moments_that_are_reset_are_named_and_a_single_zero_is_not(reset: int, tmp_path: Path) -> None:
    """The first moment of an expert without tokens is zero where beta1 is."""
    names = NAMES["param_origin"]

    def fault(_rank: int, step: int, kind: str, name: str, values: np.ndarray) -> np.ndarray:
        return values * ((kind, step) != ("exp_avg", WHEN) or name not in names[:reset])

    with reported(record(tmp_path, fault, names={"exp_avg": names})) as (_, checks, verdict):
        (found,) = [one.finding for one in checks if one.name == "Sudden changes"]
    assert found.state == (BAD if reset == LAYERS else GOOD)
    if reset == LAYERS:
        assert (verdict.place.step, verdict.place.kind) == (WHEN, "exp_avg")
        assert verdict.then.startswith("Look at what resets the optimizer's state")


def test_a_flipped_bit_that_no_number_shows_is_named(tmp_path: Path) -> None:
    fault = planted(1, "param_origin", "layers.3.weight", 1 + 2.0**-22)
    _, checks, verdict = modelled(record(tmp_path / "without", fault))
    assert verdict.state == GOOD
    model, checks, verdict = modelled(record(tmp_path / "with", fault, checked=True))
    assert (verdict.state, verdict.place.step, verdict.place.kind, verdict.place.name) == (
        BAD,
        WHEN,
        "param_origin",
        "layers.3.weight",
    )
    assert f"does not have the same bits on all ranks in step {WHEN}: ranks 0 (" in verdict.says
    assert [one.name for one in checks if one.state == BAD] == ["Replicas agree"]
    row = cells(model, "param_origin")[3]
    assert row[WHEN] == max(row)


@pytest.mark.parametrize("since", [WHEN - 2, WHEN - 1, WHEN, None])
def test_other_bits_of_a_rank_with_another_learning_rate_are_no_fault_of_its_device(tmp_path: Path, since: int | None) -> None:
    """From two steps before on, the copies would differ earlier: it is said all the same."""
    bits = planted(1, "param_origin", "layers.3.weight", 1 + 2.0**-22)

    def fault(rank: int, step: int, kind: str, name: str, values: np.ndarray) -> np.ndarray:
        if kind == "run":
            return np.full(8, 1.5e-3 if rank == 1 and since is not None and step >= since else 1e-3)
        return bits(rank, step, kind, name, values)

    names = {**NAMES, "run": ["learning_rate.0"]}
    with reported(record(tmp_path, fault, names=names, checked=True)) as (_, checks, _):
        (found,) = [one.finding for one in checks if one.name == "Replicas agree"]
    step = WHEN - 1 if since in (WHEN - 2, WHEN - 1) else WHEN
    each = f"learning_rate.0 is 0.001 on rank 0, 0.0015 on rank 1 in step {step}; "
    assert found.then.startswith(f"Look at what sets the learning rate on each rank: {each}") == (since is not None)
    assert "the last step in which all compared copies agree is 19" in found.then


@pytest.mark.parametrize("since", [WHEN - 2, WHEN - 1, WHEN])
def test_copies_that_differ_since_gradients_were_not_reduced_are_no_fault_of_a_device(tmp_path: Path, since: int) -> None:
    """If the copies still agree after that step, something reduced its gradients unseen. It explains no later difference."""
    fault = planted(1, "param_origin", "layers.3.weight", 1 + 2.0**-22)
    note = NOT_REDUCED.format(step=since, count="1 parameter", names="layers.3.weight")
    with reported(record(tmp_path, fault, checked=True, notes={"grad_reduced": f"changed; {note}"})) as (_, checks, _):
        (found,) = [one.finding for one in checks if one.name == "Replicas agree"]
    said = f"In step {since}, for the first time, no reduction of gradients over these ranks was seen."
    assert found.then.startswith(said) == (since != WHEN - 2)
    assert "the last step in which all compared copies agree is 19" in found.then


def test_a_rank_that_alone_did_not_reduce_its_gradients_is_named(tmp_path: Path) -> None:
    record(tmp_path, planted(1, "param_origin", "layers.3.weight", 1 + 2.0**-22), checked=True)
    (path,) = tmp_path.glob(f"*rank1*/{MANIFEST_FILE}")
    noted = {"grad_reduced": NOT_REDUCED.format(step=WHEN - 1, count="21 parameters", names="layers.0.weight, …")}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"notes": noted}))
    with reported(tmp_path) as (_, checks, _):
        (found,) = [one.finding for one in checks if one.name == "Replicas agree"]
    said = f"In step {WHEN - 1}, for the first time, no reduction of gradients over these ranks was seen on rank 1."
    assert found.then.startswith(said)


def test_a_rank_without_learning_rates_has_no_other_one(tmp_path: Path) -> None:
    bits = planted(1, "param_origin", "layers.3.weight", 1 + 2.0**-22)

    def fault(rank: int, step: int, kind: str, name: str, values: np.ndarray) -> np.ndarray:
        return np.full(8, 1e-3) if kind == "run" else bits(rank, step, kind, name, values)

    names = {**NAMES, "run": ["learning_rate.0"]}
    with reported(record(tmp_path, fault, names=names, checked=True, lost={1: range(WHEN - 1, WHEN)})) as (_, checks, _):
        (found,) = [one.finding for one in checks if one.name == "Replicas agree"]
    assert found.then.startswith("the last step in which all compared copies agree")


def test_the_same_bits_on_all_ranks_are_good(tmp_path: Path) -> None:
    _, checks, verdict = modelled(record(tmp_path, checked=True))
    (one,) = [one for one in checks if one.name == "Replicas agree"]
    assert (verdict.state, one.state) == (GOOD, GOOD)
    says = f"{2 * LAYERS * 30} times a tensor of grad_reduced, param_origin had the same bits on all ranks that hold it."
    assert one.finding.says == says


def test_ranks_that_know_of_no_replicas_are_told_how_to_show_them(tmp_path: Path) -> None:
    for rank in range(2):
        one = RecordedRank(tmp_path, rank, 2, "parquet", ops=("norm",), replica_check=True)
        one.write(0, {"param_origin": [Measured("weight", [1.0, 2.0], checked=True)]})
        one.close()
    with reported(tmp_path) as (_, checks, _verdict):
        (one_check,) = [check for check in checks if check.name == "Replicas agree"]
    assert one_check.state == NOT_LOOKED_AT
    says = "No tensor is known to be a replica. If ranks hold the same, pass their group to set_monitor as dp_group."
    assert one_check.finding.says == says


@pytest.mark.parametrize("alike_at_first", [True, False])
def test_ranks_that_train_apart_are_told_from_ranks_that_hold_parts(alike_at_first: bool, tmp_path: Path) -> None:
    for rank in range(2):
        one = RecordedRank(tmp_path, rank, 2, "parquet", ops=("norm",), replica_check=True)
        for name in ("a", "b"):
            one.place("param_origin", name, Placement(unclaimed=(0, 1), assumed=True))
        for step in range(STEPS):
            own = rank if step > 3 or not alike_at_first else 0
            rows = [Measured("a", [1.0, 1.0]), Measured("b", [2.0 + own, step / 1000])]
            one.write(step, {"param_origin": rows})
        one.close()
    with reported(tmp_path) as (_, checks, verdict):
        found = {check.name: check for check in checks if check.state == BAD}
    if alike_at_first:
        assert verdict.says == "The ranks began with the same weights, and have different ones from step 4 on: param_origin b."
        assert verdict.then.startswith("If they train one model, nothing averages their gradients: wrap it")
        assert (verdict.place.step, verdict.place.kind, verdict.place.name) == (4, "param_origin", "b")
    assert set(found) == ({"Replicas agree"} if alike_at_first else set()) | {"Tensors whole"}
    assert found["Tensors whole"].finding.says.startswith(
        "No number of the whole tensor is known of param_origin b: several ranks have a tensor of this name"
    )


@pytest.mark.parametrize("together", [True, False])
def test_no_device_is_suspected_of_replicas_that_most_differ_from_the_first_step_on(together: bool, tmp_path: Path) -> None:
    for rank in range(2):
        one = RecordedRank(tmp_path, rank, 2, "parquet", {"dp": (0, 1)}, ops=("norm",), replica_check=True)
        names = [f"layers.{layer}.weight" for layer in range(16)]
        for name in names:
            one.place("param_updated", name, Placement(replicas=(0, 1)))
            one.place("replica", f"param_updated/{name}", Placement(replicas=(0, 1)))
        for step in range(STEPS):
            values = [2.0 + step / 1000 + rank * (together or layer == 3) for layer in range(16)]
            kind, before = ("replica", "param_updated/") if rank else ("param_updated", "")
            rows = [Measured(before + name, [1.0, value], checked=True) for name, value in zip(names, values, strict=True)]
            one.write(step, {kind: rows})
        one.close()
    with reported(tmp_path) as (_, _, verdict):
        assert ("nothing averages their gradients" in verdict.then) is together


def test_what_a_rank_has_found_while_it_trained_is_bad_although_no_row_shows_it(tmp_path: Path) -> None:
    said = "1 of 9 exp_avg_sq changed after the optimizer's step 11 and before step 12: layers.2.weight."
    found = WrongBits(check="between steps", step=12, kind="exp_avg_sq", names=("layers.2.weight",), ranks=(1,), said=said)
    base = record(tmp_path, checked=True)
    (directory,) = (path for path in base.glob("*-rank1-*") if path.is_dir())
    manifest = directory / "manifest.json"
    manifest.write_bytes(read_manifest(manifest).model_copy(update={"wrong_bits": (found,)}).to_json())
    _, checks, verdict = modelled(base)
    assert (verdict.state, verdict.place.rank, verdict.place.step) == (BAD, 1, 12)
    assert verdict.says.endswith(said)
    assert {one.name for one in checks if one.state == BAD} == {"Unchanged between steps"}


def test_a_rank_that_stopped_is_named_with_its_last_step(tmp_path: Path) -> None:
    model, _, verdict = modelled(record(tmp_path, open_after={1: 19}))
    assert (verdict.state, verdict.place.rank, verdict.place.step) == (BAD, 1, 20)
    assert "Rank 1 stopped after step 19" in verdict.says
    assert (cells(model, "actv")[:, 20:] == history.PARTLY).all()
    assert (cells(model, "actv")[:, 8:20] != history.PARTLY).all()


def test_a_dropped_record_of_one_rank_is_named(tmp_path: Path) -> None:
    model, _, verdict = modelled(record(tmp_path, lost={1: range(10, 20)}))
    assert (verdict.state, verdict.place.rank, verdict.place.step) == (BAD, 1, 10)
    assert "rank 1 has no actv at steps 10 to 19" in verdict.says
    assert (cells(model, "actv")[:, 10:20] == history.PARTLY).all()


def test_steps_that_were_thinned_were_not_looked_at_and_are_not_lost(tmp_path: Path) -> None:
    record(tmp_path)
    (directory,) = tmp_path.glob("*-rank1-*")
    manifest = read_manifest(directory / "manifest.json")
    thinned = ThinnedRecord(steps={"2": StepsRecord(count=3, ranges=((1, 5, 2),))})
    (directory / "manifest.json").write_bytes(manifest.model_copy(update={"thinned": thinned}).to_json())
    with reported(tmp_path) as (_, checks, verdict):
        (steps,) = [one for one in checks if one.name == "No step missing"]
        assert (steps.state, verdict.state) == (NOT_LOOKED_AT, NOT_LOOKED_AT)
        assert steps.finding.says == "Steps were thinned to stay within max_output_bytes: rank 1, 3 of steps 1 to 5."


def test_a_rank_without_a_directory_is_named(tmp_path: Path) -> None:
    record(tmp_path)
    (gone,) = tmp_path.glob("*-rank1-*")
    for path in sorted(gone.rglob("*"), reverse=True):
        path.unlink()
    gone.rmdir()
    model, _, verdict = modelled(tmp_path)
    assert (verdict.state, verdict.place.rank) == (BAD, 1)
    assert verdict.says == "Rank 1 recorded nothing."
    assert model.data["ranks"] == [0, 1]
    frame = next(one for one in model.data["kinds"] if one["name"] == "actv")["frames"][WHEN]["cells"]
    by_rank = np.frombuffer(bytes(model.arrays), np.uint8, 2 * LAYERS, frame).reshape(2, LAYERS)
    assert (by_rank[0] > history.NOT_RECORDED).all()
    assert (by_rank[1] == history.NOT_RECORDED).all()


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    record(tmp_path)
    path = sorted(tmp_path.glob("*-rank0-*/*_10-19.parquet"))[0]
    path.write_bytes(path.read_bytes()[:1000])
    with reported(tmp_path) as (_, checks, verdict):
        assert verdict.state == BAD
        torn = next(one for one in checks if one.name == "Files readable")
        assert path.name in torn.finding.says
    assert (cells(modelled(tmp_path)[0], "actv")[:, 10:20] == history.PARTLY).all()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_healthy_run_has_nothing_bad_and_says_what_was_not_looked_at(seed: int, tmp_path: Path) -> None:
    model, checks, verdict = modelled(record(tmp_path, seed=seed))
    assert verdict.state == GOOD
    assert verdict.says.startswith("Healthy: ")
    assert [one.name for one in checks if one.state == BAD] == []
    unseen = [one.name for one in checks if one.state == NOT_LOOKED_AT]
    assert unseen == [
        "Alert rules",
        "Data of steps",
        "Unchanged between steps",
        "Loss",
        "Low precision",
        "Attention",
        "Experts",
        "Activations",
        "Optimizer",
        "Size of updates",
        "Load of experts",
        "Clipping",
        "Updates of layers",
    ]
    assert all(name in verdict.then for name in unseen)
    for kind in NAMES:
        assert cells(model, kind).max() < history.INFINITE
    assert model.data["events"] == []


def masked(name: str) -> Fault:
    """Every fourth step has a mask of attention in place of a tensor."""
    mask = np.array([0.0, -np.inf] * 4)
    return lambda _rank, step, _kind, tensor, values: mask if tensor == name and step % 4 == 0 else values


OF_MASKS = ("norm", "min", "max", "nans")


@pytest.mark.parametrize(("form", "ops"), [("parquet", ("norm",)), ("hdf5", ("norm",)), ("csv", OF_MASKS)])
def test_masks_that_modules_are_given_are_no_fault_and_hide_none(form: str, ops: tuple[str, ...], tmp_path: Path) -> None:
    names = {**NAMES, "actv": ["layers.0.input_1", *NAMES["actv"]]}
    mask = masked("layers.0.input_1")
    _, checks, verdict = modelled(record(tmp_path / "healthy", mask, names=names, ops=ops, form=form))
    assert verdict.state == GOOD
    finite = next(one for one in checks if one.name == "NaN and infinity")
    assert finite.state == GOOD
    assert finite.finding.says.endswith("but for 16 rows of inputs that are masks of 0 and -Inf.")
    nan = planted(1, "actv", "layers.2.output", np.nan)
    _, _, verdict = modelled(record(tmp_path / "bad", lambda *of: nan(*of[:4], mask(*of)), names=names, ops=ops, form=form))
    assert (verdict.state, verdict.place.name, verdict.place.step) == (BAD, "layers.2.output", WHEN)


def test_what_may_be_a_mask_is_a_fault_where_no_row_shows_it(tmp_path: Path) -> None:
    names = {**NAMES, "actv": ["layers.0.input_1", *NAMES["actv"]]}
    unseen = record(tmp_path / "no extremes", masked("layers.0.input_1"), names=names, form="csv")
    output = record(tmp_path / "an output", masked("layers.0.output"), ops=OF_MASKS)
    assert [modelled(one)[2].state for one in (unseen, output)] == [BAD, BAD]


def test_too_few_steps_are_not_called_healthy(tmp_path: Path) -> None:
    with reported(record(tmp_path, steps=4)) as (_, checks, verdict):
        assert verdict.state == NOT_LOOKED_AT
        assert next(one for one in checks if one.name == "Sudden changes").state == NOT_LOOKED_AT


def test_programs_can_tell_unhealthy_from_not_looked_at(tmp_path: Path) -> None:
    with reported(record(tmp_path, ROWS["a spike"][0])) as found:
        printed = verdict_for_programs(*found)
    assert (printed["schema_version"], printed["state"], printed["next"] != "") == (1, "unhealthy", True)
    assert printed["place"] == {"step": WHEN, "rank": 0, "kind": "grad_unreduced", "name": "layers.0.weight"}
    assert printed["first_events"][0]["tensor"] == printed["unusual_tensors"][0]["tensor"] == "layers.0.weight"
    assert {one["state"] for one in printed["checks"]} == {GOOD, BAD, NOT_LOOKED_AT}
    assert [one["name"] for one in printed["checks"]] == [one.name for one in CHECKS]


def test_collapsed_attention_is_named_and_healthy_attention_is_good(tmp_path: Path) -> None:
    for name, entropy, greatest in (("bad", 0.0, 4.0), ("good", 6.0, 2.0)):
        one = RecordedRank(tmp_path / name, micro_step_kinds=["attention_hook"])
        for step in range(3):
            numbers = {COUNT: 4, SUM: entropy if step else 6.0, SUMSQ: greatest}
            one.write(step, {"attention_hook": [Measured("h.0.attention", micro_step=0, numbers=numbers)]})
        one.close()
        with reported(tmp_path / name) as (_, checks, verdict):
            found = next(one for one in checks if one.name == "Attention")
            assert found.state == (BAD if name == "bad" else GOOD)
            if name == "bad":
                assert (verdict.place.kind, verdict.place.name) == ("attention_hook", "h.0.attention")
                assert "attention has collapsed onto single tokens" in verdict.says


@pytest.mark.parametrize(
    ("head", "entropy", "logit", "says"),
    [
        ("", 6.0, 120.0, "its max_logit is 120"),
        (".3", 6.0, 120.0, "its max_logit is 120"),
        ("", 0.0, 20.0, "its entropy is 0: all heads"),
        (".3", 0.0, 20.0, ""),  # one head may attend to the first token alone
        ("", 6.0, 20.0, ""),
    ],
)
def test_large_scores_and_collapsed_modules_are_named_and_a_single_sure_head_is_not(
    tmp_path: Path, head: str, entropy: float, logit: float, says: str
) -> None:
    one = RecordedRank(tmp_path, micro_step_kinds=["attention_head_hook"])
    for step in range(3):
        numbers = {COUNT: 4, SUM: entropy if step else 6.0, MAX: logit if step else 20.0, NANS: 1, POSINFS: 0}
        one.write(step, {"attention_head_hook": [Measured(f"h.0.heads{head}", micro_step=0, numbers=numbers)]})
    one.close()
    with reported(tmp_path) as (_, checks, verdict):
        assert [one.name for one in checks if one.state == BAD] == (["Attention"] if says else [])
        if says:
            assert (verdict.place.name, verdict.place.step) == (f"h.0.heads{head}", 1)
            assert says in verdict.says


def test_numbers_that_overflow_a_format_are_named(tmp_path: Path) -> None:
    for name, value in (("bad", 1e6), ("good", 1.0)):
        one = RecordedRank(tmp_path / name, format="csv", ops=("norm", "magnitude_histogram", "overflow_fp16"))
        for step in range(3):
            one.write(step, {"grad_unreduced": [Measured("w", [1.0, value if step == 2 else 1.0], magnitudes=True)]})
        one.close()
        with reported(tmp_path / name) as (facts, checks, verdict):
            found = next(one for one in checks if one.name == "Low precision")
            assert found.state == (BAD if name == "bad" else GOOD)
            model = model_of(facts, checks, verdict)
            (histogram,) = model.data["histograms"]
            assert (histogram["tensor"], histogram["steps"]) == ("w", [0, 1, 2])
            assert sum(histogram["counts"]) == 6
            if name == "bad":
                assert (verdict.place.step, verdict.place.name) == (2, "w")
                assert "its overflow_fp16 is 0.5" in verdict.says


def test_moments_are_not_judged_as_numbers_of_low_precision(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, format="csv", ops=("norm", "overflow_fp16"))
    for step in range(3):
        one.write(step, {"grad_unreduced": [Measured("w", [1.0])], "exp_avg_sq": [Measured("w", [1e6], magnitudes=True)]})
    one.close()
    with reported(tmp_path) as (_, checks, _verdict):
        assert next(one.state for one in checks if one.name == "Low precision") != BAD


@pytest.mark.parametrize("format", ["csv", "hdf5"])
def test_tensors_are_in_order_of_execution(format: str, tmp_path: Path) -> None:  # noqa: A002
    names = ["z.output", "h.10.output", "h.2.output", "a.output"]
    one = RecordedRank(tmp_path, format=format)
    for step in range(3):
        one.write(step, {"actv": [Measured(name, micro_step=0) for name in names]})
    one.close()
    with reported(tmp_path) as (facts, _, _):
        assert facts.kinds["actv"].names == names
