"""Of gradients, weights and moments: which events are origins, and which came from something before."""

from __future__ import annotations

import pytest
from played_job import PlayedRank, origins, pipeline, ranked, replicas

from monitor.coordinator.series_file import Pass

TWO_MICRO_STEPS = [Pass(way, 0, m) for m in range(2) for way in (True, False)]


@pytest.mark.parametrize(("kind", "name"), [("actv", "b.input"), ("actv", "b.output"), ("actv_grad", "b.output")])
def test_a_local_gradient_comes_from_what_fired_in_its_module(kind, name, tmp_path):
    rank = PlayedRank(passes=TWO_MICRO_STEPS).fire(kind, name, micro_step=1).fire("grad_unreduced", "b.weight")
    assert origins(ranked(tmp_path, rank)) == [f"{kind}/{name}"]


def test_a_local_gradient_does_not_come_from_what_fired_in_another_module(tmp_path):
    rank = PlayedRank().fire("actv_grad", "a.x.input").fire("grad_unreduced", "b.weight")
    assert origins(ranked(tmp_path, rank)) == ["actv_grad/a.x.input", "grad_unreduced/b.weight"]


def test_a_local_gradient_of_a_module_that_is_not_watched_comes_from_any_gradient_of_the_rank(tmp_path):
    rank = PlayedRank(without=["actv_grad/b.output", "actv_grad/.output"])
    rank.fire("actv_grad", "b.input").fire("grad_unreduced", "b.weight")
    assert origins(ranked(tmp_path, rank)) == ["actv_grad/b.input"]


def test_a_local_gradient_of_a_module_that_is_not_watched_comes_from_forwards_of_other_stages(tmp_path):
    first, second = pipeline(without=["actv_grad"])
    found = ranked(tmp_path, first.fire("grad_unreduced", "b.weight"), second.fire("actv", "b.output"))
    assert origins(found) == ["1:actv/b.output"]


def test_a_gradient_that_is_read_each_micro_step_comes_from_the_one_before(tmp_path):
    rank = PlayedRank(passes=TWO_MICRO_STEPS, each_micro_step=True)
    rank.fire("grad_unreduced", "b.weight", micro_step=0).fire("grad_unreduced", "b.weight", micro_step=1)
    assert origins(ranked(tmp_path, rank)) == ["grad_unreduced/b.weight"]


def test_an_aggregated_gradient_comes_from_the_local_one_of_any_rank(tmp_path):
    owner, other = replicas()
    other.without = ["grad_reduced"]
    found = ranked(tmp_path, owner.fire("grad_reduced", "b.weight"), other.fire("grad_unreduced", "b.weight"))
    assert origins(found) == ["1:grad_unreduced/b.weight"]


def test_an_aggregated_gradient_that_was_clean_on_every_rank_is_an_origin(tmp_path):
    owner, other = replicas()
    found = ranked(tmp_path, owner.fire("grad_reduced", "b.weight"), other.fire("grad_unreduced", "a.x.weight"))
    assert origins(found) == ["1:grad_unreduced/a.x.weight", "0:grad_reduced/b.weight"]
    assert found.ranked[1].location.text == "in the aggregation of gradients over ranks 0, 1"


def test_where_local_gradients_are_not_recorded_an_aggregated_one_comes_from_what_these_would(tmp_path):
    owner, other = replicas(without=["grad_unreduced"])
    owner.fire("grad_reduced", "a.x.weight").fire("grad_reduced", "b.weight")
    found = ranked(tmp_path, owner, other.fire("actv_grad", "b.output"))
    assert origins(found) == ["1:actv_grad/b.output", "0:grad_reduced/a.x.weight"]


def test_where_gradients_were_clipped_before_they_were_read_one_may_have_spoiled_all(tmp_path):
    rank = PlayedRank(notes={"grad_reduced": "changed in place between backward and the optimizer's step"})
    rank.fire("grad_unreduced", "b.weight").fire("grad_reduced", "a.x.weight")
    assert origins(ranked(tmp_path, rank)) == ["grad_unreduced/b.weight"]


def test_a_bad_local_gradient_that_is_in_all_aggregated_ones_has_spread_by_a_clipping_that_nothing_noted(tmp_path):
    rank = PlayedRank().fire("grad_unreduced", "b.weight")
    rank.fire("grad_reduced", "a.x.weight").fire("grad_reduced", "b.weight")
    assert origins(ranked(tmp_path, rank)) == ["grad_unreduced/b.weight"]


def test_aggregated_gradients_that_are_all_bad_without_a_bad_local_one_are_origins(tmp_path):
    rank = PlayedRank().fire("grad_reduced", "a.x.weight").fire("grad_reduced", "b.weight")
    assert origins(ranked(tmp_path, rank)) == ["grad_reduced/a.x.weight", "grad_reduced/b.weight"]


def test_a_local_gradient_that_deviates_does_not_explain_a_nan_in_all_aggregated_ones(tmp_path):
    rank = PlayedRank().fire("grad_unreduced", "b.weight", op="norm", value=9.0, rule="AnomalyTurbulence", mean=1.0)
    rank.fire("grad_reduced", "a.x.weight").fire("grad_reduced", "b.weight")
    assert origins(ranked(tmp_path, rank)) == ["grad_unreduced/b.weight", "grad_reduced/a.x.weight"]


def test_where_events_of_the_step_were_not_kept_an_aggregated_gradient_may_come_from_any(tmp_path):
    owner, other = replicas()
    other.not_kept = {"AnomalyNan": 1000}
    found = ranked(tmp_path, owner.fire("grad_reduced", "b.weight"), other.fire("actv", "a.x.output"))
    assert origins(found) == ["1:actv/a.x.output"]


@pytest.mark.parametrize("name", ["b.weight", "a.x.weight"])
def test_moments_come_from_any_gradient_of_an_earlier_step(name, tmp_path):
    rank = PlayedRank().fire("grad_reduced", name, step=0).fire("exp_avg", "b.weight", step=2)
    assert origins(ranked(tmp_path, rank)) == [f"grad_reduced/{name}"]


def test_moments_do_not_come_from_the_gradient_of_their_own_step(tmp_path):
    rank = PlayedRank().fire("grad_reduced", "b.weight").fire("exp_avg", "b.weight")
    assert origins(ranked(tmp_path, rank)) == ["grad_reduced/b.weight", "exp_avg/b.weight"]


def test_moments_do_not_come_from_a_step_that_was_skipped(tmp_path):
    rank = PlayedRank(skipped=[0]).fire("grad_reduced", "b.weight", step=0).fire("exp_avg", "b.weight")
    assert origins(ranked(tmp_path, rank)) == ["grad_reduced/b.weight", "exp_avg/b.weight"]


def test_moments_come_from_themselves(tmp_path):
    rank = PlayedRank().fire("exp_avg", "b.weight", step=0).fire("exp_avg", "b.weight", step=2)
    assert [one.is_origin for one in ranked(tmp_path, rank).ranked] == [True, False]


def test_a_weight_comes_from_any_aggregated_gradient_of_the_job(tmp_path):
    first, second = pipeline()
    found = ranked(tmp_path, first.fire("param_updated", "a.x.weight"), second.fire("grad_reduced", "b.weight"))
    assert origins(found) == ["1:grad_reduced/b.weight"]


def test_a_weight_whose_gradients_and_moments_were_clean_is_an_origin(tmp_path):
    rank = PlayedRank().fire("actv", "b.output").fire("param_updated", "a.x.weight")
    assert origins(ranked(tmp_path, rank)) == ["actv/b.output", "param_updated/a.x.weight"]


def test_where_no_aggregated_gradients_are_recorded_a_weight_comes_from_a_local_one(tmp_path):
    rank = PlayedRank(without=["grad_reduced"]).fire("grad_unreduced", "b.weight").fire("param_updated", "a.x.weight")
    assert origins(ranked(tmp_path, rank)) == ["grad_unreduced/b.weight"]


@pytest.mark.parametrize("kind", ["exp_avg", "param_origin"])
def test_a_weight_comes_from_its_own_moments_and_from_what_it_was(kind, tmp_path):
    rank = PlayedRank().fire(kind, "b.weight").fire("param_updated", "b.weight").fire("param_updated", "a.x.weight")
    assert origins(ranked(tmp_path, rank)) == [f"{kind}/b.weight", "param_updated/a.x.weight"]


def test_the_weight_of_a_step_comes_from_the_update_before(tmp_path):
    rank = PlayedRank().fire("param_updated", "b.weight", step=0).fire("param_origin", "b.weight", step=1)
    assert origins(ranked(tmp_path, rank)) == ["param_updated/b.weight"]


def test_the_weight_of_a_step_is_an_origin_if_the_update_before_left_it_clean(tmp_path):
    rank = PlayedRank().fire("param_updated", "a.x.weight", step=0).fire("param_origin", "b.weight", step=1)
    assert origins(ranked(tmp_path, rank)) == ["param_updated/a.x.weight", "param_origin/b.weight"]


def test_where_updated_weights_are_not_recorded_the_next_steps_come_from_its_gradients(tmp_path):
    rank = PlayedRank(without=["param_updated"]).fire("grad_reduced", "b.weight", step=0).fire("param_origin", "a.x.weight")
    assert origins(ranked(tmp_path, rank)) == ["grad_reduced/b.weight"]


def test_a_weight_that_was_bad_before_a_skipped_step_is_no_origin_after_it(tmp_path):
    rank = PlayedRank(skipped=[1])
    for step in range(3):
        rank.fire("param_origin", "b.weight", step=step)
    assert [one.is_origin for one in ranked(tmp_path, rank).ranked] == [True, False, False]


def test_a_replica_counts_as_what_it_represents(tmp_path):
    owner, other = replicas()
    other.without = ["grad_reduced"]
    other.replicas = [f"grad_reduced/{name}.weight" for name in ("a.x", "b", "clean")]  # not all are bad, so none has spread
    owner.fire("grad_unreduced", "b.weight")
    other.fire("replica", "grad_reduced/b.weight").fire("replica", "grad_reduced/a.x.weight")
    assert origins(ranked(tmp_path, owner, other)) == ["0:grad_unreduced/b.weight", "1:replica/grad_reduced/a.x.weight"]


NO_ACTIVATIONS = ["actv", "actv_grad"]


def test_where_no_activation_is_recorded_the_first_local_gradient_of_the_backward_is_the_origin(tmp_path):
    rank = PlayedRank(without=NO_ACTIVATIONS).fire("grad_unreduced", "b.weight").fire("grad_unreduced", "a.x.weight")
    assert origins(ranked(tmp_path, rank)) == ["grad_unreduced/b.weight"]


def test_where_no_activation_is_recorded_local_gradients_come_from_the_update_before(tmp_path):
    rank = PlayedRank(without=[*NO_ACTIVATIONS, "param_origin", "param_updated"])
    rank.fire("grad_reduced", "b.weight", step=0).fire("grad_unreduced", "a.x.weight", step=1)
    assert origins(ranked(tmp_path, rank)) == ["grad_reduced/b.weight"]


def test_where_no_gradient_is_recorded_a_weight_comes_from_any_that_was_bad(tmp_path):
    rank = PlayedRank(without=[*NO_ACTIVATIONS, "grad_unreduced", "grad_reduced"])
    rank.fire("param_origin", "b.weight").fire("param_updated", "a.x.weight")
    assert origins(ranked(tmp_path, rank)) == ["param_origin/b.weight"]


@pytest.mark.parametrize("kind", ["grad_unreduced", "grad_reduced"])
def test_a_gradient_that_deviates_may_come_from_a_deviation_in_any_pass(kind, tmp_path):
    """It came through tensors that deviated less."""
    rank = PlayedRank().fire("actv", "a.x.output", op="norm", value=9.0).fire(kind, "b.weight", op="mean", value=9.0)
    assert origins(ranked(tmp_path, rank)) == ["actv/a.x.output"]


@pytest.mark.parametrize(("kind", "name"), [("actv", "b.output"), ("param_origin", "b.weight")])
def test_what_follows_a_step_of_which_not_all_events_were_kept_may_come_from_any_of_its_updates(kind, name, tmp_path):
    rank = PlayedRank(not_kept={"AnomalyNan": 1000}).fire("actv", "a.x.output", step=0).fire(kind, name, step=1)
    assert origins(ranked(tmp_path, rank)) == ["actv/a.x.output"]


def test_while_the_rank_that_records_weights_lags_behind_the_others_events_may_come_from_its_own(tmp_path):
    owner, other = replicas()
    owner.steps, other.without = [0], ["grad_reduced", "param_origin", "param_updated"]
    other.fire("grad_unreduced", "b.weight", step=1).fire("actv", "a.x.output", step=2)
    assert origins(ranked(tmp_path, owner, other)) == ["grad_unreduced/b.weight"]


def test_a_moment_that_deviates_may_come_from_a_deviation_of_the_step_before_that_no_gradient_has_shown(tmp_path):
    """A second moment takes in the square of the gradient."""
    rank = PlayedRank().fire("param_origin", "a.x.weight", step=0, op="norm", value=9.0)
    rank.fire("exp_avg", "b.weight", step=1, op="norm", value=9.0)
    assert origins(ranked(tmp_path, rank)) == ["param_origin/a.x.weight"]
