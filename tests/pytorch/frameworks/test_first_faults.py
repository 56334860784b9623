"""What goes wrong in real runs, gone wrong in real runs: what the ranking puts first, and what its last line says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import Job

from monitor.anomalies.events import EVENTS_FOLDER
from monitor.anomalies.ranking.ranking import Ranked, Ranking, ranking_of
from monitor.anomalies.ranking.report import advice
from monitor.series import NO_MICRO_STEP

WATCHED = {
    **dict.fromkeys(("xy_distribution", "all_xy", "wg_distribution", "param_distribution", "mv_distribution"), True),
    "format": "hdf5",
    "alert": {
        "rules": [{"rule_name": "AnomalyNan"}, {"rule_name": "AnomalyTurbulence", "args": {"threshold": 20.0}}],
        "dump": True,
    },
}
LINEAR = "h.1.mlp.0"
ATTENTION = "inside h.1.attn, between h.1.attn.proj.output and its output"

ALONE = {
    "attention": ("3.1 actv h.1.attn.output", ATTENTION),
    "residual": ("3.1 actv h.1.mlp_norm.input", "in h.1, between h.1.attn.output and h.1.mlp_norm.input"),
    "parameter": (f"3 grad_unreduced {LINEAR}.weight", f"in the backward of {LINEAR}, between the gradient of its output"),
    "parameter, clipped": (f"3 grad_unreduced {LINEAR}.weight", f"in the backward of {LINEAR}"),
    "aggregate, clipped": ("3 grad_reduced tokens.weight", "of them may be the cause"),
    "loss": ("3.1 actv_grad head.output", "Look at the loss function"),
    "in place": ("3.1 actv h.1.mlp.1.output", "inside h.1.mlp.1"),
    "before in place": (f"3.1 actv {LINEAR}.output", f"inside {LINEAR}"),
    "twice": ("3.1 actv linear.output#1", "inside linear, between its input#1 and its output#1"),
    "checkpoint": ("3.1 actv h.1.block.attn.proj.output", "inside h.1.block.attn.proj"),
    "reentrant": ("3.1 actv h.1.block.attn.proj.output", "inside h.1.block.attn.proj"),
    "checkpoint, back": ("3.1 actv_grad h.1.block.mlp.0.output", "between the gradients of h.1.block.mlp.1.input and"),
    "reentrant, back": ("3.1 actv_grad h.1.block.mlp.0.output", "between the gradients of h.1.block.mlp.1.input and"),
    "tied": ("3 param_origin tokens.weight", "in the weights before step 3"),
    "container, back": ("3.1 actv_grad h.1.attn.output", "between the gradients of h.1.attn.proj.output and h.1.attn.output"),
    "weight": (f"3 param_origin {LINEAR}.weight", "Look at what changed the weights of rank 0"),
    "weight 1e6": (f"3 param_origin {LINEAR}.weight", "Look at what changed the weights of rank 0"),
    "weight, unseen": (f"3.0 actv {LINEAR}.output", "Rank 0's weights were not recorded"),
    "weight, alone": (f"3 param_origin {LINEAR}.weight", "Look at what changed the weights of rank 0"),
    "moment": (f"3 exp_avg_sq {LINEAR}.weight", "in the optimizer's state, before step 3"),
    "moment 1e6": (f"3 exp_avg {LINEAR}.weight", "in the optimizer's state, before step 3"),
    "moment, unseen": (f"3 param_updated {LINEAR}.weight", "in the optimizer's step 3 (not recorded: moments)"),
    "gradients": ("3 grad_unreduced head.weight", "Record activations and their gradients as well"),
    "forward": ("3.1 actv h.1.attn.output", ATTENTION),
    "backward": ("3.1 actv_grad head.output", "after the watched"),
    "two targets": ("3.1 actv h.0.mlp.input", "Nothing before it is watched"),
    "combined": ("3 actv h.1.attn.output", ATTENTION),
    "each": (f"3.1 grad_unreduced {LINEAR}.weight", f"in the backward of {LINEAR}"),
    "late": ("4 param_origin tokens.weight", "in the weights before step 4"),
    "interval": ("3.1 actv h.1.attn.output", ATTENTION),
    "long": ("3.1 actv h.1.attn.output", ATTENTION),
}
ALL_AT_ONCE = {"aggregate, clipped", "late"}
"""Of which nothing tells what of many tensors was first."""

BOTH = "in the aggregation of gradients over ranks 0, 1"
ALONE_OF_TWO = "No other replica has it"
ON_A_REPLICA = {"weight": "param_origin", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "aggregate": "grad_reduced"}
"""Of a rank that leaves its parameters to the other one."""

OF_RANKS = {
    "ddp": {
        "attention": ("1: 3.1 actv module.h.1.attn.output", ALONE_OF_TWO),
        **{
            f"{fault} {value}": (f"1: 3 replica {kind}/module.{LINEAR}.weight", ALONE_OF_TWO)
            for fault, kind in ON_A_REPLICA.items()
            for value in ("nan", "inf", "1e+06")
        },
        "clipped": ("1: 3.1 actv module.h.1.attn.output", ALONE_OF_TWO),
        "gradients": ("1: 3 grad_unreduced module.head.weight", ALONE_OF_TWO),
        "other rank": (
            "0: 3 grad_reduced module.tokens.weight",
            f"in the backward of rank 1, whose own gradient is not known, or {BOTH}",
        ),
        "weight, unseen": (f"1: 3.0 actv module.{LINEAR}.output", "Rank 1's weights were not recorded"),
    },
    "fsdp2": {
        "attention": ("1: 3.1 actv h.1.attn.output", ALONE_OF_TWO),
        "weight": (f"1: 3 param_origin {LINEAR}.weight", "in the weights before step 3"),
        "weight 1e6": (f"1: 3 param_origin {LINEAR}.weight", "in the weights before step 3"),
        "replica": (f"1: 3 replica param_origin/{LINEAR}.weight", "in the weights before step 3"),
        "moment of a replica": (f"1: 3 replica exp_avg_sq/{LINEAR}.weight", "in the optimizer's state, before step 3"),
    },
    "tp": {
        "before all-reduce": ("1: 3.1 actv act.output", "inside act, between its input and its output"),
        "before all-reduce, back": (
            "1: 3.1 actv_grad act.output",
            "in the model, between the gradients of down.input and act.output",
        ),
        "weight": ("1: 3 param_origin down.weight", "in the weights before step 3"),
        "replica": ("1: 3 replica param_origin/head.weight", "in the weights before step 3"),
        "moment of a replica": ("1: 3 replica exp_avg/head.weight", "in the optimizer's state, before step 3"),
    },
}


@pytest.fixture(scope="module")
def ranked(run_job: Callable[..., Job]) -> Callable[[str, str], Ranking]:
    """The ranking of a case; the job that trains all cases of its kind runs when the first of them is asked for."""
    jobs: dict[str, Job] = {}

    def of(how: str, case: str) -> Ranking:
        if how not in jobs:
            jobs[how] = run_job("first_faults.py", 1 if how == "alone" else 2, how, **WATCHED)
        return ranking_of(Path(jobs[how].monitored[0][case]) / EVENTS_FOLDER, 20_000)

    return of


def told(one: Ranked) -> str:
    series = one.subject.recorded_as
    micro_step = "" if one.micro_step == NO_MICRO_STEP else f".{one.micro_step}"
    return f"{one.step}{micro_step} {series.kind} {series.name}"


def places(ranking: Ranking) -> set[tuple[int, str, str]]:
    """Ranks, kinds and names of all origins."""
    found = [one for one in ranking.ranked if one.is_origin]
    return {(one.member.rank, one.subject.recorded_as.kind, one.subject.recorded_as.name) for one in found}


@pytest.mark.parametrize("case", ALONE)
def test_what_goes_wrong_in_a_process_is_the_first_line_and_the_only_origin(
    case: str, ranked: Callable[[str, str], Ranking]
) -> None:
    place, said = ALONE[case]
    ranking = ranked("alone", case)
    first = ranking.ranked[0]
    assert (told(first), first.is_origin) == (place, True)
    assert said in advice(ranking)
    assert case in ALL_AT_ONCE or len(places(ranking)) == 1


@pytest.mark.parametrize(("how", "case"), [(how, case) for how, cases in OF_RANKS.items() for case in cases])
def test_what_goes_wrong_on_one_of_two_ranks_is_the_first_line_and_the_only_origin(
    how: str, case: str, ranked: Callable[[str, str], Ranking]
) -> None:
    place, said = OF_RANKS[how][case]
    ranking = ranked(how, case)
    first = ranking.ranked[0]
    assert (f"{first.member.rank}: {told(first)}", first.is_origin) == (place, True)
    assert said in advice(ranking)
    assert case == "other rank" or len(places(ranking)) == 1
