"""What is said of an origin: where it lies, whether one replica alone has it, and what to look at next."""

from __future__ import annotations

from io import StringIO

import pytest
from played_job import PlayedRank, pipeline, ranked, replicas
from rich.console import Console

from monitor.anomalies.ranking import report
from monitor.anomalies.ranking.report import advice, counts, listing, notes

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
    assert ranked(tmp_path, PlayedRank().fire(kind, name)).ranked[0].location.text == span


@pytest.mark.parametrize("without", [["grad_unreduced"], ["grad_unreduced", "grad_reduced"]])
def test_a_moment_may_show_gradients_if_none_were_recorded_in_the_whole_run(without, tmp_path):
    found = ranked(tmp_path, PlayedRank(without=without).fire("exp_avg", "b.weight"))
    expected = "in gradients of earlier steps, which were not recorded, or " if len(without) == 2 else ""
    assert found.ranked[0].location.text == f"{expected}in the optimizer's state, before step 1"


def test_a_module_without_a_clean_series_in_it_is_spanned_by_its_inputs(tmp_path):
    rank = PlayedRank(without=["actv/a.x.output", "actv/a.y.output", "actv/a.y.input", "actv/a.x.input"])
    found = ranked(tmp_path, rank.fire("actv", "a.output"))
    assert found.ranked[0].location.text == "inside a, between its input and its output"


def test_the_span_between_two_stages(tmp_path):
    first, second = pipeline()
    assert ranked(tmp_path, first, second.fire("actv", ".input")).ranked[0].location.text == (
        "between stage 0's output (rank 0) and stage 1's input (rank 1): the communication between the stages"
    )


SENT = ("send.pre_0", "recv.post_0")


@pytest.mark.parametrize(("forward", "given"), [(True, "output"), (False, "input gradient")], ids=["forward", "backward"])
def test_a_rank_that_sent_bad_numbers_to_the_next_stage_is_named_in_place_of_the_communication(forward, given, tmp_path):
    stages = pipeline(collectives=SENT)
    sender, receiver = stages if forward else reversed(stages)
    sender.fire("other", "send.pre_0")
    receiver.fire("other", "recv.post_0").fire(*(("actv", ".input") if forward else ("actv_grad", ".output")))
    found = ranked(tmp_path, *stages)
    at = sender.rank
    assert found.first_origin.location.text == (
        f"between stage {at}'s {given} (rank {at}) and send, to which this rank gave bad numbers"
    )
    assert advice(found).endswith("look at its code between there and the sending, and at its device.")


@pytest.mark.parametrize("fired", [("send.pre_0", 0), ("all_reduce.pre_0", 1), ("recv.post_0", 1)], ids=str)
def test_bad_numbers_elsewhere_do_not_clear_the_communication(fired, tmp_path):
    first, second = pipeline(collectives=("all_reduce.pre_0", *SENT))
    name, step = fired
    first.fire("other", name, step=step)
    found = ranked(tmp_path, first, second.fire("actv", ".input"))
    assert next(one for one in found.ranked if one.subject.series.kind == "actv").location.text.endswith(
        "(rank 1): the communication between the stages"
    )


@pytest.mark.parametrize(("sender", "chunks"), [(1, 1), (0, 2)], ids=["middle", "virtual pipeline"])
def test_a_stage_that_sends_in_both_directions_is_not_known_to_have_sent_what_is_bad(sender, chunks, tmp_path):
    stages = pipeline(3, collectives=SENT, chunks=chunks)
    stages[sender].fire("other", "send.pre_0")
    stages[sender + 1].fire("actv", ".input")
    assert ranked(tmp_path, *stages).first_origin.location.text.endswith(": the communication between the stages")


def test_a_rank_that_received_bad_numbers_is_not_suspected(tmp_path):
    groups = {0: {"pp": (0, 2), "dp": (0, 1)}, 1: {"pp": (1, 3), "dp": (0, 1)}}
    groups |= {2: {"pp": (0, 2), "dp": (2, 3)}, 3: {"pp": (1, 3), "dp": (2, 3)}}
    ranks = [PlayedRank(rank, of) for rank, of in groups.items()]
    ranks[3].fire("actv", ".input")
    found = ranked(tmp_path, *ranks)
    assert str(found.first_origin.alone) == "only on rank 3 of its 2 data-parallel replicas"
    assert "suspect the device of rank 3" not in advice(found)


def test_a_stage_of_which_the_one_before_is_missing_says_so(tmp_path):
    first, second = pipeline()
    first.judged = False
    span = ranked(tmp_path, first, second.fire("actv", ".input")).ranked[0].location
    assert span.text == "the first to show it on stage 1; what the stage before it sent is not known"


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
        ("grad_reduced", "b.weight", "Look at what scales, clips or changes gradients before the optimizer's step."),
        ("exp_avg", "b.weight", "Look at what changed it since the last step that was judged"),
        ("param_updated", "b.weight", "look at the learning rate"),
        ("param_origin", "b.weight", "Look at what changed the weights of rank 0 between the update of step 0 and step 1: a"),
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


SCALED = {"loss_scale": "grad_unreduced and actv_grad are multiplied by the loss scale"}


def test_a_step_that_was_skipped_without_a_loss_scale_is_what_broke_first(tmp_path):
    rank = PlayedRank(steps=range(40), skipped=[0]).fire("grad_reduced", "a.x.weight", step=0)
    found = ranked(tmp_path, rank.fire("actv", "b.output", step=30))
    assert advice(found).startswith("First came grad_reduced a.x.weight on rank 0 (node0) in step 0")
    assert "If the loop scales its loss, call `log(loss_scale=scale)` before the optimizer" in advice(found)


def test_an_overflow_of_the_loss_scale_is_not_what_broke_first(tmp_path):
    rank = PlayedRank(steps=range(40), skipped=[0], notes=SCALED).fire("grad_reduced", "a.x.weight", step=0)
    said = advice(ranked(tmp_path / "alone", rank))
    assert "The optimizer skipped step 0, as it does where the loss scale is too high: harmless unless it repeats." in said
    assert "log(loss_scale" not in said
    found = ranked(tmp_path / "then", rank.fire("actv", "b.output", step=30))
    assert advice(found).startswith("First came b.output on rank 0 (node0) in step 30")
    assert "1 event of gradients came from a loss scale that was too high" in " ".join(notes(found))
    assert [one.step for one in found.ranked] == [0, 30]


def test_a_loss_scale_that_never_fits_is_what_broke_first(tmp_path):
    rank = PlayedRank(steps=range(40), skipped=range(20, 40), notes=SCALED).fire("grad_reduced", "a.x.weight", step=20)
    found = ranked(tmp_path, rank.fire("actv", "b.output", step=30))
    assert advice(found).startswith("First came grad_reduced a.x.weight on rank 0 (node0) in step 20")
    assert found.overflows == 0


def test_of_one_replica_alone_the_device_is_suspect(tmp_path):
    one, other = replicas(2)
    assert "suspect the device of rank 0 on node0" in advice(ranked(tmp_path, one.fire("actv", "b.output"), other))


@pytest.mark.parametrize(
    ("kind", "name", "suspect"),
    [
        ("actv", "b.output", "the device of rank 0 on node0, or its data."),
        ("param_origin", "b.weight", "the device of rank 0 on node0. Look at what changed the weights of rank 0"),
        ("exp_avg", "b.weight", "the device of rank 0 on node0. Look at what changed it"),
    ],
)
def test_data_of_a_step_cannot_spoil_weights_and_moments_of_one_replica(kind, name, suspect, tmp_path):
    one, other = replicas(2)
    assert f"suspect {suspect}" in advice(ranked(tmp_path, one.fire(kind, name), other))


@pytest.mark.parametrize(
    ("steps", "skipped", "said"),
    [
        ((0, 1, 2), (), "between the update of step 1 and step 2: a loaded checkpoint, a broadcast, or"),
        ((0, 1, 2), (1,), "between step 1 and step 2: a loaded checkpoint, a broadcast, or"),
        (
            (0, 2),
            (),
            "between the update of step 0 and step 2: a loaded checkpoint, a broadcast, a step that was not",
        ),
        ((2,), (), "before step 2: a loaded checkpoint"),
    ],
)
def test_of_a_weight_that_changed_it_is_said_between_which_steps(steps, skipped, said, tmp_path):
    rank = PlayedRank(steps=steps, skipped=skipped).fire("param_origin", "b.weight", step=2)
    assert f"Look at what changed the weights of rank 0 {said}" in advice(ranked(tmp_path, rank))


@pytest.mark.parametrize(
    ("step", "said"),
    [(1, "The update of step 0 was the first to be judged"), (2, "Look at what changed the weights of rank 0 between the upd")],
)
def test_a_first_update_that_no_running_mean_judged_is_suspect(step, said, tmp_path):
    event = {"op": "norm", "value": 27.0, "rule": "AnomalyTurbulence", "mean": 1.0}
    told = advice(ranked(tmp_path, PlayedRank().fire("param_origin", "b.weight", step=step, **event)))
    assert said in told
    assert ("a loaded checkpoint" in told) is (step == 2)


def test_a_replica_of_a_weight_is_called_a_weight(tmp_path):
    ranks = replicas(2)
    ranks[1].replicas = ["param_origin/b.weight"]
    told = advice(ranked(tmp_path, ranks[0], ranks[1].fire("replica", "param_origin/b.weight")))
    assert told.startswith("First came the weight b.weight (rank 1's replica) on rank 1 (node1) in step 1: ")


def test_an_overflow_of_the_loss_scale_is_distinguished_from_a_fault(tmp_path):
    rank = PlayedRank(skipped=[1]).fire("grad_reduced", "b.weight", op="infs", value=4.0)
    assert "The optimizer skipped step 1, as it does where the loss scale is too high" in advice(ranked(tmp_path, rank))


def test_events_ranks_and_origins_are_counted(tmp_path):
    one, other = replicas(2)
    one.not_kept = {"AnomalyNan": 1200}
    one.fire("actv", "b.output").fire("actv_grad", "b.output")
    assert counts(ranked(tmp_path, one, other)) == "2 events of 1 of 2 ranks; 1 origin; 1,200 more were not kept"


@pytest.mark.parametrize(
    ("without", "kind", "name", "span", "said"),
    [
        (["actv/.input"], "actv", "a.input", "between the batch and a.input", "Nothing before it is watched"),
        (
            ["actv"],
            *("actv_grad", "b.output"),
            "after the watched part of the forward, in the loss, or before the gradient of b.output",
            "Watch the forward up to the model's output",
        ),
        (
            ["actv", "actv_grad"],
            *("grad_unreduced", "b.weight"),
            "in the forward or backward of the model. Activations were not recorded, so the place is not known more precisely",
            "Record activations and their gradients",
        ),
        (
            ["actv_grad"],
            *("grad_unreduced", "b.weight"),
            "between the last recorded activation and the end of the backward of the model. Gradients of activations around it "
            "were not recorded, so the place is not known more precisely",
            "Record activations and their gradients",
        ),
        (
            ["grad_unreduced"],
            *("grad_reduced", "b.weight"),
            "between the last recorded activation and the end of the backward of rank 0, or between the backward and the "
            "optimizer's step. Gradients before that were not recorded, so the place is not known more precisely",
            "Record gradients before aggregation (wg_distribution, and wg_reduced_only false)",
        ),
        (
            ["grad_unreduced", "actv", "actv_grad"],
            *("grad_reduced", "b.weight"),
            "in the forward or backward of rank 0, or between the backward and the optimizer's step. Gradients before that "
            "were not recorded, so the place is not known more precisely",
            "and go through step 1 again",
        ),
        (
            ["exp_avg", "param_origin"],
            *("param_updated", "b.weight"),
            "in the optimizer's step 1 (not recorded: moments, the weight before)",
            "Its recorded inputs were clean",
        ),
        (
            ["grad_unreduced", "grad_reduced"],
            *("param_updated", "b.weight"),
            "in the optimizer's step 1 (not recorded: gradients)",
            "Its gradients were not recorded: record them in every step (wg_distribution, intervals), and repeat step 1.",
        ),
    ],
)
def test_nothing_that_is_not_recorded_is_called_clean(without, kind, name, span, said, tmp_path):
    found = ranked(tmp_path, PlayedRank(without=without).fire(kind, name))
    assert found.ranked[0].location.text == span
    assert said in advice(found)


def test_a_gradient_that_a_rank_without_a_recording_may_have_brought_in_is_not_blamed_on_the_aggregation(tmp_path):
    one, other = replicas()
    other.judged = False
    found = ranked(tmp_path, one.fire("grad_reduced", "b.weight"), other)
    assert found.ranked[0].location.text == (
        "in the backward of rank 1, whose own gradient is not known, or in the aggregation of gradients over ranks 0, 1"
    )
    assert "No rank's own gradient was bad" not in advice(found)


REDUCED = ("all_reduce.pre_0", "all_reduce.post_0")


def test_a_rank_that_alone_gave_a_bad_gradient_to_the_collective_is_named_in_place_of_the_aggregation(tmp_path):
    ranks = replicas(3, collectives=REDUCED)
    ranks[1].fire("other", "all_reduce.pre_0")
    found = ranked(tmp_path, *(one.fire("other", "all_reduce.post_0").fire("grad_reduced", "b.weight") for one in ranks))
    origin = found.first_origin
    assert origin.location.text == "between the backward of rank 1 and all_reduce, to which no other rank gave bad numbers"
    assert advice(found).endswith("look at what changes gradients there before they are reduced.")


@pytest.mark.parametrize("received", [True, False], ids=["received", "not received"])
def test_a_stage_that_alone_gave_a_bad_gradient_of_a_shared_weight_is_named(received, tmp_path):
    first, second = pipeline(collectives=REDUCED)
    second.fire("other", "all_reduce.pre_0")
    for one in (first, second) if received else ():
        one.fire("other", "all_reduce.post_0")
    found = ranked(tmp_path, first.fire("grad_reduced", "b.weight"), second)
    (origin,) = [one for one in found.ranked if one.subject.series.kind == "grad_reduced"]
    assert origin.location.text == (
        "between the backward of rank 1 and all_reduce, to which no other rank gave bad numbers"
        if received
        else "between the backward and the optimizer's step"
    )


def test_a_rank_that_passed_on_what_another_stage_gave_it_is_not_named(tmp_path):
    """A tied embedding of two stages, each with two replicas: first the stages add their gradients, then the replicas."""
    groups = {rank: {"pp": (rank % 2, rank % 2 + 2), "dp": (rank // 2 * 2, rank // 2 * 2 + 1)} for rank in range(4)}
    names = [f"all_reduce@{group}.{what}" for group in ("pp", "dp") for what in ("pre_0", "post_0")]
    ranks = [PlayedRank(rank, of, collectives=names) for rank, of in groups.items()]
    ranks[3].fire("other", names[0])
    for rank in (1, 3):
        ranks[rank].fire("other", names[1]).fire("other", names[2])
    found = ranked(tmp_path, *(one.fire("other", names[3]).fire("grad_reduced", "b.weight") for one in ranks))
    gradients = [one for one in found.ranked if one.subject.series.kind == "grad_reduced" and one.is_origin]
    assert {one.location.text for one in gradients} == {
        "between the backward of rank 3 and all_reduce@pp, to which no other rank gave bad numbers"
    }


def test_bad_numbers_that_all_ranks_gave_to_a_collective_name_none_of_them(tmp_path):
    ranks = [one.fire("other", "all_reduce.pre_0") for one in replicas(3, collectives=REDUCED)]
    found = ranked(tmp_path, *(one.fire("grad_reduced", "b.weight") for one in ranks))
    assert found.first_origin.location.text == "in the aggregation of gradients over ranks 0, 1, 2"


def test_of_ranks_without_local_gradients_only_those_that_gave_bad_numbers_are_suspects(tmp_path):
    ranks = replicas(3, collectives=REDUCED, without=["grad_unreduced"])
    ranks[1].fire("other", "all_reduce.pre_0")
    found = ranked(tmp_path, *(one.fire("grad_reduced", "b.weight") for one in ranks))
    assert found.first_origin.location.text == (
        "in the backward of rank 1, whose own gradient is not known, or in the aggregation of gradients over ranks 0, 1, 2"
    )


def test_of_very_many_ranks_that_aggregate_only_the_first_are_named(tmp_path):
    ranks = replicas(40)
    found = ranked(tmp_path, ranks[0].fire("grad_reduced", "b.weight"), *ranks[1:])
    assert found.ranked[0].location.text == (
        "in the aggregation of gradients over ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 30 more"
    )


CLIPPED = {"grad_reduced": "changed in place between backward and the optimizer's step"}


def test_gradients_that_were_clipped_together_are_said_to_be_so(tmp_path):
    rank = PlayedRank(notes=CLIPPED)
    found = ranked(tmp_path, rank.fire("grad_reduced", "a.x.weight").fire("grad_reduced", "b.weight"))
    assert "where all were changed together, as by clipping: any of them may be the cause" in advice(found)


def test_a_clipping_of_gradients_that_nobody_read_before_is_one_possible_place_of_several(tmp_path):
    rank = PlayedRank(notes=CLIPPED, without=["grad_unreduced", "actv", "actv_grad"])
    told = advice(ranked(tmp_path, rank.fire("grad_reduced", "b.weight")))
    assert "in the forward or backward of rank 0, or between the backward and the optimizer's step, where all were" in told
    assert "Look at what scales, clips or changes gradients" not in told


@pytest.mark.parametrize(
    ("without", "name", "said"),
    [
        ([], "b.output", "run it again on another device: its inputs were clean."),
        (["actv/b.input"], "b.output", "Look at the code between these two, b among it"),
        (["actv/a.input"], "a.output", "run it again on another device."),
        (
            ["param_origin", "param_updated"],
            "b.output",
            "clean. Rank 0's weights were not recorded (set param_distribution and replica_check",
        ),
    ],
)
def test_of_a_module_it_is_said_which_of_its_inputs_and_weights_were_seen_to_be_clean(without, name, said, tmp_path):
    assert said in advice(ranked(tmp_path, PlayedRank(without=without).fire("actv", name)))


def test_a_part_of_a_tensor_is_not_compared_with_the_parts_that_others_hold(tmp_path):
    one, other = replicas(shards=["param_origin/b.weight"])
    one.fire("param_origin", "b.weight").fire("param_origin", "a.x.weight")
    found = ranked(tmp_path, one, other).ranked
    assert [(one.subject.series.name, str(one.alone)) for one in found] == [
        ("a.x.weight", "only on rank 0 of its 2 data-parallel replicas"),
        ("b.weight", "None"),
    ]


def test_copies_that_differ_are_no_sign_that_all_of_them_have_the_nan(tmp_path):
    one, other = replicas()
    other.fire("param_origin", "b.weight")
    for rank in (one, other):
        rank.fire("param_origin", "b.weight", op="checksum", rule="UnlikeCopies")
    (found,) = [event for event in ranked(tmp_path, one, other).ranked if event.op == "nans"]
    assert (str(found.alone), found.shared) == ("only on rank 1 of its 2 data-parallel replicas", None)


def test_after_a_deviation_the_first_nan_is_reported_as_well(tmp_path):
    rank = PlayedRank().fire("param_updated", "a.x.weight", step=0, op="norm", value=2.0, rule="AnomalyTurbulence")
    told = advice(ranked(tmp_path, rank.fire("actv", "b.output", step=2, value=1.0), most=1))
    assert told.startswith(
        "First came the updated weight a.x.weight on rank 0 (node0) in step 0: norm is 2, in the optimizer's step 0"
    )
    assert told.endswith(
        "The first NaN or Inf: b.output on rank 0 (node0) in step 2, micro-step 0: an element is NaN, inside b, between its "
        "input and its output."
    )


def test_other_bits_after_a_deviation_are_no_nan(tmp_path):
    rank = PlayedRank().fire("param_origin", "b.weight", step=0, op="norm", value=2.0, rule="AnomalyTurbulence")
    rank.fire("param_origin", "b.weight", step=0, op="checksum", rule="ChangedBetweenSteps")
    assert "NaN" not in advice(ranked(tmp_path, rank))


def test_a_nan_that_may_follow_from_a_deviation_is_named_too(tmp_path):
    rank = PlayedRank().fire("actv", "a.x.output", op="norm", value=2.0).fire("actv", "b.output", value=1.0)
    told = advice(ranked(tmp_path, rank.fire("actv", "b.input", op="norm", value=2.0)))
    assert told.endswith(
        "b.output on rank 0 (node0) in step 1, micro-step 0: an element is NaN, which may follow from something before."
    )


def test_a_nan_of_the_forward_in_a_step_that_was_skipped_is_not_blamed_on_the_loss_scale(tmp_path):
    told = advice(ranked(tmp_path, PlayedRank(skipped=[1]).fire("actv", "b.output")))
    assert "The optimizer skipped step 1: the weights are unaffected." in told


def deviating(ranks, *names, step=1, kind="actv"):
    for rank in ranks:
        for name in names:
            rank.fire(kind, name, step=step, op="norm", value=36.5, rule="AnomalyTurbulence", mean=2.25)
    return ranks


def test_turbulence_of_many_tensors_on_all_ranks_is_no_matter_of_one_device(tmp_path):
    """By the table of the docs: the data of this step, or a threshold that is too low. Look at the loss."""
    ranks = deviating(replicas(), "b.weight", "a.x.weight", kind="grad_unreduced")
    told = advice(ranked(tmp_path, *ranks))
    assert "2 tensors of forward and backward deviate in step 1 on all 2 ranks: look at the loss" in told
    assert "the threshold of the rule is too low" in told
    assert "device" not in told


def test_where_weights_are_not_recorded_the_update_before_may_have_been_too_large(tmp_path):
    told = []
    for without in ([], ["param_origin", "param_updated"]):
        ranks = deviating(replicas(without=without), "a.x.output", "b.output")
        told.append(advice(ranked(tmp_path / str(len(told)), *ranks)))
    assert ["Weights are not recorded (param_distribution)" in one for one in told] == [False, True]


def test_so_it_is_where_the_first_tensor_deviates_on_one_rank_alone_and_others_on_all(tmp_path):
    ranks = deviating(replicas(), "b.output", kind="actv_grad")
    told = advice(ranked(tmp_path, *deviating(ranks[:1], "a.x.output"), ranks[1]))
    assert told.startswith("First came a.x.output on rank 0")
    assert "2 tensors of forward and backward deviate in step 1 on all 2 ranks" in told
    assert "device" not in told


def test_turbulence_of_one_rank_that_the_others_do_not_have_is_its_device_or_its_data(tmp_path):
    one, other = replicas()
    told = advice(ranked(tmp_path, *deviating([one], "b.output"), other))
    assert "No other replica has it: suspect the device of rank 0 on node0, or its data." in told


def test_of_one_tensor_that_deviates_over_many_steps_its_history_is_asked_for(tmp_path):
    rank = PlayedRank(steps=range(9))
    for step in range(2, 7):
        deviating([rank], "b.output", step=step)
    told = advice(ranked(tmp_path, rank))
    assert "No other tensor of forward and backward deviates in step 2. It deviates in 5 steps." in told
    assert "growth over many steps is an instability" in told
    assert "device" not in told


def test_moments_that_deviate_in_the_step_do_not_contradict_what_is_said_of_other_tensors(tmp_path):
    rank = deviating([PlayedRank()], "b.weight", kind="grad_unreduced")
    told = advice(ranked(tmp_path, *deviating(rank, "a.x.weight", kind="exp_avg")))
    assert "No other tensor of forward and backward deviates in step 1." in told


def test_a_moment_that_deviates_may_have_grown_with_gradients_that_no_rule_found(tmp_path):
    """A learning rate makes gradients grow eightfold, and the second moment with their squares."""
    told = advice(ranked(tmp_path, *deviating([PlayedRank()], "b.weight", kind="exp_avg")))
    assert "Look at the gradients of step 0: a second moment grows with their squares." in told


def test_a_deviation_is_reported_with_the_running_mean_in_the_advice_and_in_the_table(tmp_path):
    """As a spike of the learning rate: without it a reader cannot see how large the step was."""
    found = ranked(tmp_path, *deviating(replicas(), "a.x.weight", "b.weight", kind="param_updated"))
    assert "norm is 36.5, running mean 2.25, in the optimizer's step 1" in advice(found)
    assert "look at the learning rate" in advice(found)
    console = Console(file=StringIO(), width=400)
    console.print(listing(found, console))
    assert "36.5, running mean 2.25" in console.file.getvalue()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("actv", "b.output"), ("grad_unreduced", "b.weight"), ("param_updated", "b.weight"), ("exp_avg", "b.weight")],
)
def test_a_nan_that_all_replicas_have_is_not_blamed_on_a_device(kind, name, tmp_path):
    """By the table of the docs: software, the learning rate, the weights they share."""
    told = advice(ranked(tmp_path, *(rank.fire(kind, name) for rank in replicas(3))))
    sent = "" if kind in ("param_updated", "exp_avg") else ", or what one rank sends to the others there"
    assert f"All 3 replicas have it: suspect what they share: the software, the learning rate, the weights{sent}" in told
    assert ("context parallelism" in told) == bool(sent)
    assert "on another device" not in told


def test_an_aggregated_gradient_that_all_replicas_have_tells_nothing_of_where_it_began(tmp_path):
    told = advice(ranked(tmp_path, *(rank.fire("grad_reduced", "b.weight") for rank in replicas(3))))
    assert "replicas have it" not in told


def test_a_rule_with_advice_of_its_own_is_quoted_in_place_of_the_location(tmp_path, monkeypatch):
    class Stuck:
        advice = "See whether it is to train."

    found = ranked(tmp_path, PlayedRank().fire("param_origin", "b.weight"))
    [event] = found.ranked
    assert "before step 1" in advice(found)
    monkeypatch.setattr(report, "RULES", {event.rule: Stuck})
    assert advice(found).endswith(f". {Stuck.advice}")
    assert "before step 1" not in advice(found)
