"""Of forwards and backwards: which events are origins, and which came from something before."""

from __future__ import annotations

import pytest
from played_job import EDGES, PlayedRank, origins, pipeline, ranked

from monitor.anomalies.ranking.report import advice
from monitor.coordinator.series_file import Pass

TWO_MICRO_STEPS = [Pass(way, 0, m) for m in range(2) for way in (True, False)]


def test_an_output_comes_from_an_input_of_its_module(tmp_path):
    rank = PlayedRank().fire("actv", "b.input").fire("actv", "b.output")
    assert origins(ranked(tmp_path, rank)) == ["actv/b.input"]


def test_an_output_comes_from_what_is_inside_its_module(tmp_path):
    rank = PlayedRank().fire("actv", "a.x.output").fire("actv", "a.output")
    assert origins(ranked(tmp_path, rank)) == ["actv/a.x.output"]


def test_an_output_whose_modules_inputs_are_clean_is_an_origin_whatever_fired_elsewhere(tmp_path):
    rank = PlayedRank().fire("actv", "a.x.output").fire("actv", "b.output")
    assert origins(ranked(tmp_path, rank)) == ["actv/a.x.output", "actv/b.output"]


def test_an_input_that_was_seen_before_comes_from_that_alone(tmp_path):
    rank = PlayedRank().fire("actv", "a.x.input").fire("actv", "a.x.output").fire("actv", "a.y.input")
    assert origins(ranked(tmp_path, rank)) == ["actv/a.x.input"]


def test_an_input_that_was_clean_when_it_was_seen_before_is_an_origin_though_others_fired(tmp_path):
    edges = [*EDGES, ("actv", ".input", "b.input")]
    rank = PlayedRank(edges=edges).fire("actv", "a.x.output").fire("actv", "b.input")
    assert origins(ranked(tmp_path, rank)) == ["actv/a.x.output", "actv/b.input"]


def test_an_input_comes_from_what_fed_the_clean_tensor_that_it_was(tmp_path):
    rank = PlayedRank().fire("actv", "a.x.input").fire("actv", "a.y.input")
    assert origins(ranked(tmp_path, rank)) == ["actv/a.x.input"]


def test_an_input_that_was_never_seen_may_come_from_anything_before_in_the_module_around(tmp_path):
    rank = PlayedRank().fire("actv", "a.x.output").fire("actv", "b.input")
    assert origins(ranked(tmp_path, rank)) == ["actv/a.x.output"]


def test_an_input_that_was_never_seen_does_not_come_from_outside_the_module_around(tmp_path):
    edges = [edge for edge in EDGES if edge[2] != "a.x.input"]
    rank = PlayedRank(edges=edges, without=["actv/a.x.output"]).fire("actv", ".input").fire("actv", "a.x.input")
    assert origins(ranked(tmp_path, rank)) == ["actv/.input", "actv/a.x.input"]


def test_where_the_inputs_of_the_module_around_are_not_measured_all_that_fired_before_counts(tmp_path):
    edges = [edge for edge in EDGES if edge[2] != "a.x.input"]
    rank = PlayedRank(edges=edges, without=["actv/a.input"]).fire("actv", ".input").fire("actv", "a.x.input")
    assert origins(ranked(tmp_path, rank)) == ["actv/.input"]


def test_both_statistics_of_an_origin_are_origins(tmp_path):
    rank = PlayedRank().fire("actv", "b.output", op="norm", value=9.0).fire("actv", "b.output", op="mean", value=8.0)
    assert origins(ranked(tmp_path, rank)) == ["actv/b.output", "actv/b.output"]


def test_what_fed_it_in_an_earlier_micro_step_counts(tmp_path):
    rank = PlayedRank(passes=TWO_MICRO_STEPS).fire("actv", "b.input").fire("actv", "b.output", micro_step=1)
    assert origins(ranked(tmp_path, rank)) == ["actv/b.input"]


def test_what_fed_it_in_a_later_micro_step_does_not_count(tmp_path):
    rank = PlayedRank(passes=TWO_MICRO_STEPS).fire("actv", "b.output").fire("actv", "b.input", micro_step=1)
    assert origins(ranked(tmp_path, rank)) == ["actv/b.output", "actv/b.input"]


def test_combined_micro_steps_are_one_pass(tmp_path):
    rank = PlayedRank(combined=True).fire("actv", "b.output").fire("actv_grad", "a.x.input")
    assert origins(ranked(tmp_path, rank)) == ["actv/b.output"]


@pytest.mark.parametrize("kind", ["param_origin", "param_updated"])
def test_an_output_comes_from_weights_of_its_module(kind, tmp_path):
    rank = PlayedRank().fire(kind, "b.weight", step=1 if kind == "param_origin" else 0).fire("actv", "b.output")
    assert origins(ranked(tmp_path, rank)) == [f"{kind}/b.weight"]


def test_an_output_does_not_come_from_weights_of_another_module(tmp_path):
    rank = PlayedRank().fire("param_origin", "a.x.weight").fire("actv", "b.output")
    assert origins(ranked(tmp_path, rank)) == ["param_origin/a.x.weight", "actv/b.output"]


def test_an_output_of_a_module_without_weights_may_come_from_any_that_it_shares(tmp_path):
    rank = PlayedRank().fire("param_origin", "a.x.weight").fire("actv", "a.y.output")
    assert origins(ranked(tmp_path, rank)) == ["param_origin/a.x.weight"]


def test_weights_that_another_replica_writes_count(tmp_path):
    owner, other = PlayedRank(0, {"dp": (0, 1)}), PlayedRank(1, {"dp": (0, 1)}, without=["param_origin", "param_updated"])
    found = ranked(tmp_path, owner.fire("param_origin", "b.weight"), other.fire("actv", "b.output"))
    assert origins(found) == ["0:param_origin/b.weight"]


def test_weights_of_the_update_before_the_last_judged_step_do_not_count(tmp_path):
    rank = PlayedRank().fire("param_updated", "b.weight", step=0).fire("actv", "b.output", step=2)
    assert origins(ranked(tmp_path, rank)) == ["param_updated/b.weight", "actv/b.output"]


def test_where_no_weights_are_recorded_a_bad_gradient_of_the_step_before_may_have_spoiled_them(tmp_path):
    rank = PlayedRank(without=["param_origin", "param_updated"])
    rank.fire("grad_reduced", "a.x.weight", step=0).fire("actv", "b.output", step=1)
    assert origins(ranked(tmp_path, rank)) == ["grad_reduced/a.x.weight"]


def test_a_step_that_the_optimizer_skipped_spoils_no_weights(tmp_path):
    rank = PlayedRank(without=["param_origin", "param_updated"], skipped=[0])
    rank.fire("grad_reduced", "a.x.weight", step=0).fire("actv", "b.output", step=1)
    assert origins(ranked(tmp_path, rank)) == ["grad_reduced/a.x.weight", "actv/b.output"]


def test_the_batch_does_not_come_from_weights(tmp_path):
    rank = PlayedRank().fire("param_origin", "a.x.weight").fire("actv", ".input")
    assert origins(ranked(tmp_path, rank)) == ["param_origin/a.x.weight", "actv/.input"]


def test_the_input_of_a_stage_comes_from_the_output_of_the_stage_before(tmp_path):
    first, second = pipeline()
    found = ranked(tmp_path, first.fire("actv", ".output"), second.fire("actv", ".input"))
    assert origins(found) == ["0:actv/.output"]


def test_the_input_of_a_stage_is_an_origin_if_the_output_of_the_stage_before_was_clean(tmp_path):
    first, second = pipeline()
    found = ranked(tmp_path, first.fire("actv", "a.x.output"), second.fire("actv", ".input"))
    assert origins(found) == ["0:actv/a.x.output", "1:actv/.input"]
    assert "the communication" in found.ranked[1].location.text


def test_the_output_of_the_stage_before_counts_in_its_own_micro_step_alone(tmp_path):
    first, second = pipeline(micro_steps=2)
    found = ranked(tmp_path, first.fire("actv", ".output", micro_step=0), second.fire("actv", ".input", micro_step=1))
    assert origins(found) == ["0:actv/.output", "1:actv/.input"]


@pytest.mark.parametrize("missing", ["not measured", "not kept", "not judged"])
def test_where_the_output_of_the_stage_before_is_not_known_all_that_fired_there_counts(missing, tmp_path):
    first, second = pipeline()
    if missing == "not measured":
        first.without = ["actv/.output"]
    elif missing == "not kept":
        first.not_kept = {"AnomalyNan": 3}
    else:
        first.steps = [0, 2]
    found = ranked(tmp_path, first.fire("actv", "a.x.output"), second.fire("actv", ".input"))
    assert origins(found) == ["0:actv/a.x.output"]


def test_a_stage_that_kept_no_event_of_the_step_had_none(tmp_path):
    first, second = pipeline()
    first.not_kept = {"AnomalyNan": 3}
    found = ranked(tmp_path, first.fire("actv", "a.x.output", step=0), second.fire("actv", ".input"))
    assert "the communication" in found.ranked[1].location.text


def test_where_the_roots_input_is_not_measured_the_first_tensor_of_a_stage_comes_from_the_stage_before(tmp_path):
    without = ["actv/.input", "actv/.output", "actv/a.input", "actv/a.x.input"]
    first, second = pipeline(without=without)
    found = ranked(tmp_path, first.fire("actv", "b.output"), second.fire("actv", "a.x.output"))
    assert origins(found) == ["0:actv/b.output"]


def test_a_gradient_comes_from_any_forward_of_its_micro_step_in_the_pipeline(tmp_path):
    first, second = pipeline(micro_steps=2)
    found = ranked(tmp_path, first.fire("actv_grad", "b.output", micro_step=1), second.fire("actv", "b.output", micro_step=1))
    assert origins(found) == ["1:actv/b.output"]


def test_a_gradient_does_not_come_from_the_forward_of_another_micro_step_of_another_stage(tmp_path):
    first, second = pipeline(micro_steps=2)
    found = ranked(tmp_path, first.fire("actv_grad", "b.input", micro_step=1), second.fire("actv", "b.output", micro_step=0))
    assert origins(found) == ["1:actv/b.output", "0:actv_grad/b.input"]


def test_the_gradient_of_an_input_comes_from_that_of_the_modules_output(tmp_path):
    rank = PlayedRank().fire("actv_grad", "a.y.output").fire("actv_grad", "a.y.input")
    assert origins(ranked(tmp_path, rank)) == ["actv_grad/a.y.output"]


def test_the_gradient_of_an_input_is_an_origin_if_nothing_fired_in_its_module(tmp_path):
    rank = PlayedRank().fire("actv_grad", "b.input").fire("actv_grad", "a.x.input")
    assert origins(ranked(tmp_path, rank)) == ["actv_grad/b.input", "actv_grad/a.x.input"]


def test_the_gradient_of_an_output_comes_from_the_tensor_that_it_is_and_from_what_fired_around(tmp_path):
    """A residual adds what no edge shows: ``a.x.output`` is known to be fed by ``a.y.input``, and may be by ``a.y.output``."""
    rank = PlayedRank().fire("actv_grad", "a.y.output").fire("actv_grad", "a.x.output")
    assert origins(ranked(tmp_path, rank)) == ["actv_grad/a.y.output"]


def test_the_gradient_of_an_output_comes_from_the_source_of_an_edge_outside_the_module_around(tmp_path):
    rank = PlayedRank(edges=[*EDGES, ("actv_grad", "b.input", "a.x.output")])
    assert origins(ranked(tmp_path, rank.fire("actv_grad", "b.input").fire("actv_grad", "a.x.output"))) == ["actv_grad/b.input"]


def test_a_gradient_comes_from_weights_of_its_module(tmp_path):
    rank = PlayedRank().fire("param_origin", "b.weight").fire("actv_grad", "b.input")
    assert origins(ranked(tmp_path, rank)) == ["param_origin/b.weight"]


def test_the_output_gradient_of_a_stage_comes_from_the_input_gradient_of_the_next(tmp_path):
    """Its row comes after that of the child which gave the same tensor: the child is no origin either."""
    first, second = pipeline()
    first.fire("actv_grad", "b.output").fire("actv_grad", ".output")
    found = ranked(tmp_path, first, second.fire("actv_grad", ".input"))
    assert origins(found) == ["1:actv_grad/.input"]


def test_the_output_gradient_of_a_stage_is_an_origin_if_the_input_gradient_of_the_next_was_clean(tmp_path):
    first, second = pipeline()
    found = ranked(tmp_path, first.fire("actv_grad", "b.output"), second.fire("actv_grad", "a.y.input"))
    assert origins(found) == ["1:actv_grad/a.y.input", "0:actv_grad/b.output"]
    assert "the communication" in found.ranked[1].location.text


def test_where_the_input_gradient_of_the_next_stage_is_not_measured_all_that_fired_there_counts(tmp_path):
    first, second = pipeline(without=["actv_grad/.input"])
    found = ranked(tmp_path, first.fire("actv_grad", "b.output"), second.fire("actv_grad", "a.y.input"))
    assert origins(found) == ["1:actv_grad/a.y.input"]


@pytest.mark.parametrize("role", ["tp", "ep", "cp"])
def test_ranks_that_exchange_activations_may_have_it_from_each_other(role, tmp_path):
    first, second = (PlayedRank(rank, {role: (0, 1)}) for rank in range(2))
    found = ranked(tmp_path, first.fire("actv", "a.x.output"), second.fire("actv", "a.output"))
    assert origins(found) == ["0:actv/a.x.output"]


def test_ranks_that_exchange_gradients_alone_do_not_have_activations_from_each_other(tmp_path):
    first, second = (PlayedRank(rank, {"dp": (0, 1)}) for rank in range(2))
    found = ranked(tmp_path, first.fire("actv", "a.x.output"), second.fire("actv", "a.output"))
    assert origins(found) == ["0:actv/a.x.output", "1:actv/a.output"]


def test_the_same_row_of_ranks_that_exchange_activations_does_not_explain_itself(tmp_path):
    first, second = (PlayedRank(rank, {"tp": (0, 1)}) for rank in range(2))
    found = ranked(tmp_path, first.fire("actv", "a.x.output"), second.fire("actv", "a.x.output"))
    assert origins(found) == ["0:actv/a.x.output", "1:actv/a.x.output"]


def test_chunks_of_a_pipeline_follow_one_another_from_the_last_rank_to_the_first(tmp_path):
    passes = [Pass(way, chunk, 0) for way, chunks in ((True, (0, 1)), (False, (1, 0))) for chunk in chunks]
    first, second = (PlayedRank(rank, {"pp": (0, 1)}, passes, chunks=2) for rank in range(2))
    found = ranked(tmp_path, first.fire("actv", ".input", chunk=1), second.fire("actv", ".output", chunk=0))
    assert origins(found) == ["1:actv/.output"]


GENERATOR_AND_CRITIC = [Pass(True, 0, 0), Pass(True, 1, 0), Pass(True, 1, 1), Pass(False, 1, 1), Pass(False, 0, 0)]
"""A critic sees real data first, then what the generator made."""


def test_a_critic_may_have_its_input_from_a_generator_of_another_micro_step(tmp_path):
    rank = PlayedRank(passes=GENERATOR_AND_CRITIC, chunks=2).fire("actv", ".output")
    found = ranked(tmp_path, rank.fire("actv", ".input", chunk=1, micro_step=1))
    assert [one.is_origin for one in found.ranked] == [True, False]


def test_an_event_before_anything_fired_in_the_other_model_is_an_origin_and_its_model_is_named(tmp_path):
    rank = PlayedRank(passes=GENERATOR_AND_CRITIC, chunks=2).fire("actv", "b.output", chunk=1)
    found = ranked(tmp_path, rank)
    assert origins(found) == ["actv/b.output"]
    assert "First came b.output of chunk 1 on rank 0" in advice(found)


def test_without_a_manifest_the_first_event_after_a_clean_update_is_the_origin(tmp_path):
    rank = PlayedRank(with_manifest=False).fire("actv", "b.output", step=0).fire("actv_grad", "b.output", step=0)
    rank.fire("actv", "a.input", step=2)
    assert origins(ranked(tmp_path, rank)) == ["actv/b.output", "actv/a.input"]


def test_without_a_manifest_an_event_may_come_from_the_update_before(tmp_path):
    rank = PlayedRank(with_manifest=False).fire("actv", "b.output", step=0).fire("actv", "a.input")
    assert origins(ranked(tmp_path, rank)) == ["actv/b.output"]


def test_something_else_comes_from_anything_before_on_its_rank(tmp_path):
    rank = PlayedRank().fire("param_updated", "b.weight").fire("other", "loss")
    assert origins(ranked(tmp_path, rank)) == ["param_updated/b.weight"]


def test_a_gradient_that_was_changed_after_the_inner_module_had_seen_it_is_what_that_module_works_on(tmp_path):
    """``b.output`` and the root's are one tensor; the hook on the former ran first."""
    rank = PlayedRank().fire("actv_grad", ".output").fire("actv_grad", "b.input").fire("grad_unreduced", "b.weight")
    assert origins(ranked(tmp_path, rank)) == ["actv_grad/.output"]
