"""What is said of an origin: where it lies, whether one replica alone has it, and what to look at next."""

from __future__ import annotations

import pytest
from played_job import PlayedRank, pipeline, ranked, replicas

from monitor.anomalies.advice import advice
from monitor.anomalies.report import counts

ALONE = "only on rank 1 of its 3 data-parallel replicas"


@pytest.mark.parametrize(
    ("kind", "name", "span"),
    [
        ("actv", ".input", "in what the model was given: the batch"),
        ("actv", "a.x.output", "inside a.x, between its input and its output"),
        ("actv", "a.output", "inside a, between a.y.output and its output"),
        ("actv", "b.input", "in the model, between a.output and b.input"),
        ("actv_grad", "b.output", "between the loss and the gradient of b.output"),
        ("actv_grad", "b.input", "inside b, between the gradients of its output and its input"),
        ("actv_grad", "a.y.output", "in a, between the gradients of its output and a.y.output"),
        ("grad_unreduced", "b.weight", "in the backward of b, between the gradient of its output and that of its parameter"),
        ("grad_reduced", "b.weight", "between the backward and the optimizer's step"),
        ("exp_avg", "b.weight", "in the optimizer's state, before step 1"),
        ("param_updated", "b.weight", "in the optimizer's step 1"),
        ("param_origin", "b.weight", "in the weights before step 1, after the last update that was judged"),
    ],
)
def test_the_span_of_an_origin(kind, name, span, tmp_path):
    assert ranked(tmp_path, PlayedRank().fire(kind, name)).ranked[0].span.told == span


def test_a_module_without_a_clean_series_in_it_is_spanned_by_its_inputs(tmp_path):
    rank = PlayedRank(without=["actv/a.x.output", "actv/a.y.output", "actv/a.y.input", "actv/a.x.input"])
    found = ranked(tmp_path, rank.fire("actv", "a.output"))
    assert found.ranked[0].span.told == "inside a, between its input and its output"


def test_the_span_between_two_stages(tmp_path):
    first, second = pipeline()
    assert ranked(tmp_path, first, second.fire("actv", ".input")).ranked[0].span.told == (
        "between stage 0's output (rank 0) and stage 1's input (rank 1): the communication between the stages"
    )


def test_a_stage_of_which_the_one_before_is_missing_says_so(tmp_path):
    first, second = pipeline()
    first.judged = False
    span = ranked(tmp_path, first, second.fire("actv", ".input")).ranked[0].span
    assert span.told == "the first to show it on stage 1; what the stage before it handed over is not known"


def test_an_event_of_one_replica_is_marked(tmp_path):
    ranks = replicas(3)
    ranks[1].fire("actv", "b.output").fire("actv_grad", "b.output")
    ranks[2].fire("actv_grad", "b.output")
    assert [str(one.alone) for one in ranked(tmp_path, *ranks).ranked] == [ALONE, "None", "None"]


@pytest.mark.parametrize("difference", ["step", "micro-step", "name"])
def test_an_event_of_another_row_is_not_the_same(difference, tmp_path):
    ranks = replicas(3, passes=None)
    ranks[1].fire("actv", "b.output")
    ranks[2].fire("actv", "b.input" if difference == "name" else "b.output", step=2)
    assert str(next(one for one in ranked(tmp_path, *ranks).ranked if one.member.rank == 1).alone) == ALONE


@pytest.mark.parametrize("reason", ["not judged", "not measured", "not kept", "no group"])
def test_where_no_other_replica_can_tell_nothing_is_marked(reason, tmp_path):
    one, other = replicas(2)
    if reason == "not judged":
        other.steps = [0]
    elif reason == "not measured":
        other.without = ["actv/b.output"]
    elif reason == "not kept":
        other.not_kept = {"AnomalyNan": 1}
        other.fire("actv", "a.output")
    else:
        one.groups, other.groups = {}, {}
    found = ranked(tmp_path, one.fire("actv", "b.output"), other)
    assert [found.ranked[at].alone for at in range(len(found.ranked)) if found.ranked[at].member.rank == 0] == [None]


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("actv", "b.output", "Dump what goes into b there, and run it again on another device"),
        ("actv", ".input", "Look at the batch that rank 0 loaded for step 1."),
        ("actv", "b.input", "Look at the code between these two"),
        ("actv_grad", "b.output", "Look at the loss function"),
        ("grad_unreduced", "b.weight", "run its backward on another device"),
        ("grad_reduced", "b.weight", "look at the communication library"),
        ("exp_avg", "b.weight", "Look at the checkpoint that the optimizer's state came from"),
        ("param_updated", "b.weight", "look at the learning rate"),
        ("param_origin", "b.weight", "Look at what changed weights since"),
    ],
)
def test_what_to_look_at_next(kind, name, said, tmp_path):
    assert said in advice(ranked(tmp_path, PlayedRank().fire(kind, name)))


def test_the_last_line_tells_what_was_found_first(tmp_path):
    rank = PlayedRank(host="gpu7").fire("actv", "b.output", value=3.0).fire("actv_grad", "b.output")
    assert advice(ranked(tmp_path, rank)).startswith(
        "First came b.output on rank 0 (gpu7) in step 1, micro-step 0: 3 elements are NaN, inside b, between its input "
        "and its output. "
    )


def test_of_one_replica_alone_the_device_is_suspect(tmp_path):
    one, other = replicas(2)
    assert "suspect the device of rank 0 on node0" in advice(ranked(tmp_path, one.fire("actv", "b.output"), other))


def test_an_overflow_of_the_loss_scale_is_told_from_a_fault(tmp_path):
    rank = PlayedRank(skipped=[1]).fire("grad_reduced", "b.weight", op="infs", value=4.0)
    assert "The optimizer skipped step 1, as it does where the loss scale is too high" in advice(ranked(tmp_path, rank))


def test_events_ranks_and_origins_are_counted(tmp_path):
    one, other = replicas(2)
    one.not_kept = {"AnomalyNan": 1200}
    one.fire("actv", "b.output").fire("actv_grad", "b.output")
    assert counts(ranked(tmp_path, one, other)) == "2 events of 1 of 2 ranks; 1 origins; 1,200 more were not kept"
