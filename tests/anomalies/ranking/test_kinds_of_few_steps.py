"""Of kinds that are recorded in some of the steps only, nothing is claimed in the other steps."""

from __future__ import annotations

import pytest
from played_job import PlayedRank, origins, pipeline, ranked, replicas

from monitor.anomalies.ranking.report import advice, notes

ACTIVATIONS = {"actv": (0, 2), "actv_grad": (0, 2)}
WEIGHTS = {"param_origin": (0, 2), "param_updated": (0, 2)}
NOT_SEEN = "in the forward or backward of the model. Activations were not recorded in this step"


@pytest.mark.parametrize(
    ("kinds", "place"),
    [({}, "in the backward of b, between the gradient of its output and that of its parameter"), (ACTIVATIONS, NOT_SEEN)],
)
def test_a_gradient_is_not_placed_by_activations_that_the_step_does_not_have(kinds, place, tmp_path):
    found = ranked(tmp_path, PlayedRank(kinds=kinds).fire("grad_unreduced", "b.weight"))
    assert found.ranked[0].location.text.startswith(place)


def test_in_a_step_with_activations_they_place_a_gradient(tmp_path):
    found = ranked(tmp_path, PlayedRank(kinds=ACTIVATIONS).fire("grad_unreduced", "b.weight", step=2))
    assert found.ranked[0].location.text.startswith("in the backward of b")


def test_without_activations_gradients_of_several_modules_have_one_origin(tmp_path):
    rank = PlayedRank(kinds=ACTIVATIONS).fire("grad_unreduced", "b.weight").fire("grad_unreduced", "a.x.weight")
    assert origins(ranked(tmp_path, rank)) == ["grad_unreduced/b.weight"]


@pytest.mark.parametrize(("kinds", "found"), [({}, ["grad_reduced/b.weight"]), ({"grad_unreduced": (0, 2)}, [])])
def test_an_aggregated_gradient_is_not_called_an_origin_for_local_ones_that_nobody_read(kinds, found, tmp_path):
    rank = PlayedRank(kinds=kinds).fire("actv_grad", "b.output").fire("grad_reduced", "b.weight")
    assert origins(ranked(tmp_path, rank)) == ["actv_grad/b.output", *found]


def test_a_gradient_of_a_rank_that_did_not_read_its_own_may_come_from_it(tmp_path):
    one, other = replicas(2)
    other.kinds = {"grad_unreduced": (0, 2)}
    found = ranked(tmp_path, one.fire("grad_reduced", "b.weight"), other)
    assert "in the backward of rank 1, whose own gradient is not known" in found.ranked[0].location.text


@pytest.mark.parametrize("kinds", [{}, WEIGHTS])
def test_weights_that_were_not_looked_at_are_not_called_clean(kinds, tmp_path):
    told = advice(ranked(tmp_path, PlayedRank(kinds=kinds).fire("actv", "a.x.output")))
    assert ("weights were not recorded" in told) == bool(kinds)


@pytest.mark.parametrize(("kinds", "found"), [({}, True), (WEIGHTS, False)])
def test_a_weight_may_come_from_an_update_whose_weights_were_not_looked_at(kinds, found, tmp_path):
    rank = PlayedRank(kinds=kinds).fire("grad_reduced", "b.weight").fire("param_origin", "b.weight", step=2)
    assert ("param_origin/b.weight" in origins(ranked(tmp_path, rank))) == found


@pytest.mark.parametrize(("kinds", "found"), [({}, True), ({"param_origin": (0, 1), "param_updated": (0,)}, False)])
def test_a_forward_may_come_from_weights_that_were_not_looked_at(kinds, found, tmp_path):
    rank = PlayedRank(kinds=kinds).fire("grad_reduced", "b.weight").fire("actv", "b.output", step=2)
    assert ("actv/b.output" in origins(ranked(tmp_path, rank))) == found


def test_a_weight_changed_since_the_last_step_that_looked_at_weights(tmp_path):
    told = advice(ranked(tmp_path, PlayedRank(kinds=WEIGHTS).fire("param_origin", "b.weight", step=2)))
    assert "between the update of step 0 and step 2: a loaded checkpoint, a broadcast, a step whose weights were not" in told


def followed(kinds, *fired, steps=range(6), without=()):
    """A rank with these kinds in some of its steps. Activations and weights are not recorded unless ``kinds`` has them."""
    never = {"actv", "actv_grad", "param_origin", "param_updated", "exp_avg"} - kinds.keys()
    rank = PlayedRank(steps=steps, kinds=kinds, without=[*never, *without])
    for kind, name, step in fired:
        rank.fire(kind, name, step=step)
    return rank


def test_a_step_that_shows_nothing_of_an_update_does_not_clear_the_one_before(tmp_path):
    gradients = dict.fromkeys(("grad_unreduced", "grad_reduced"), (0, 3))
    weights = dict.fromkeys(("param_origin", "param_updated"), (0, 5))
    fired = [("grad_reduced", "b.weight", 3), ("param_origin", "a.x.weight", 5), ("param_origin", "b.weight", 5)]
    assert origins(ranked(tmp_path / "weights", followed(gradients | weights, *fired))) == ["grad_reduced/b.weight"]
    activations = dict.fromkeys(("actv", "actv_grad"), (0, 5))
    fired = [("grad_reduced", "b.weight", 3), ("actv", "b.output", 5)]
    assert origins(ranked(tmp_path / "activations", followed(gradients | activations, *fired))) == ["grad_reduced/b.weight"]


def test_moments_show_the_gradients_that_nobody_read_and_what_follows_is_no_origin(tmp_path):
    gradients = dict.fromkeys(("grad_unreduced", "grad_reduced"), (0, 2, 4))
    fired = [("exp_avg", name, step) for step in range(2, 6) for name in ("a.x.weight", "b.weight")]
    fired += [(kind, "b.weight", step) for step in (2, 4) for kind in ("grad_unreduced", "grad_reduced")]
    found = ranked(tmp_path, followed(gradients | {"exp_avg": range(6)}, *fired))
    assert origins(found) == ["exp_avg/a.x.weight"]
    assert found.first_origin.location.text.startswith("in gradients of earlier steps, which were not recorded, or in the opt")
    assert advice(found).endswith("Record gradients in every step (wg_distribution, intervals), and go through step 1 again.")


def test_weights_spoiled_by_gradients_that_nobody_read_have_one_origin_and_the_advice_is_to_read_them(tmp_path):
    gradients = dict.fromkeys(("grad_unreduced", "grad_reduced"), (0, 2))
    kinds = gradients | dict.fromkeys(("param_origin", "param_updated", "exp_avg"), range(3))
    fired = [("param_updated", name, 1) for name in ("a.x.weight", "b.weight")]
    fired += [(kind, name, 2) for kind in ("param_origin", "exp_avg") for name in ("a.x.weight", "b.weight")]
    found = ranked(tmp_path, followed(kinds, *fired, steps=range(3)))
    assert origins(found) == ["param_updated/a.x.weight"]
    assert "record them in every step (wg_distribution, intervals)" in advice(found)


@pytest.mark.parametrize(
    ("skipped", "why"), [((), " (intervals, or the step did not reach its optimizer)"), ((1,), ", which the optimizer skipped")]
)
def test_a_module_has_weights_also_in_a_step_without_any_kind_of_them(skipped, why, tmp_path):
    few = dict.fromkeys(("grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg"), (0,))
    told = advice(ranked(tmp_path, PlayedRank(kinds=few, skipped=skipped).fire("actv", "a.x.output")))
    assert f"weights were not recorded in this step{why}. If the weights are bad" in told


CLIPPED = {"grad_reduced": "changed in place between backward and the optimizer's step"}


@pytest.mark.parametrize("notes", [{}, CLIPPED])
def test_reduced_gradients_of_steps_that_show_no_pass_follow_from_bad_weights_or_from_one_another(notes, tmp_path):
    names = ("a.x.weight", "b.weight")
    fired = [("grad_reduced", name, step) for step in (1, 2, 3) for name in names]
    bad_weights = [("param_updated", name, step) for step in (1, 2) for name in names]
    bad_weights += [("param_origin", name, step) for step in (2, 3) for name in names]
    every = dict.fromkeys(("param_origin", "param_updated"), range(6))
    rare = {"actv": (0, 5), "actv_grad": (0, 5)}
    for kinds, events in ((rare, fired), (rare | every, [*fired, *bad_weights]), ({}, fired)):
        rank = followed(kinds, *events, without=["grad_unreduced"])
        rank.notes = notes
        assert origins(ranked(tmp_path / str(len(kinds)), rank)) == ["grad_reduced/a.x.weight"]


def test_a_reduced_gradient_is_an_origin_where_the_passes_of_its_step_were_clean(tmp_path):
    fired = [("param_origin", "a.x.weight", 0), ("grad_reduced", "b.weight", 1)]
    kinds = dict.fromkeys(("actv", "actv_grad", "param_origin"), range(6))
    assert origins(ranked(tmp_path, followed(kinds, *fired))) == ["param_origin/a.x.weight", "grad_reduced/b.weight"]


def test_a_kind_whose_rows_no_rule_has_judged_is_not_clean(tmp_path):
    rank = PlayedRank(kinds={"actv": (), "actv_grad": ()}).fire("grad_unreduced", "b.weight")
    assert ranked(tmp_path, rank).ranked[0].location.text.startswith("in the forward or backward of the model")


def test_a_stage_whose_boundary_was_not_recorded_in_the_step_is_not_called_clean(tmp_path):
    first, second = pipeline(2)
    first.kinds = ACTIVATIONS
    found = ranked(tmp_path, first, second.fire("actv", ".input"))
    assert "what the stage before it sent is not known" in found.ranked[0].location.text


def test_the_kinds_are_listed_with_the_number_of_their_steps(tmp_path):
    steps = range(9)
    moments = {"exp_avg": range(1, 9)}  # begin with the second step, as always
    one, other = replicas(2, steps=steps, kinds={"actv": (0, 4, 8), **moments})
    said = "Recorded in some of the steps only{}: actv (3 of 9). In the others these kinds were not judged."
    assert list(notes(ranked(tmp_path / "both", one, other))) == [said.format("")]
    other.kinds = moments
    assert list(notes(ranked(tmp_path / "one", one, other))) == [said.format(" by rank 0")]
