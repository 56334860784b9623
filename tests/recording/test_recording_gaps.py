"""A configuration that leaves out what its user may expect to be watched says so, with the field to change."""

from __future__ import annotations

from typing import Any

import pytest

from monitor.config import MonitorConfig
from monitor.recording.startup_estimate import gaps_of
from monitor.series import Placement, Series, SeriesTable

RULES = {"alert": {"rules": [{"rule_name": "AnomalyNan"}]}}
KINDS = ("xy_distribution", "wg_distribution", "param_distribution", "mv_distribution")


def gaps(series: SeriesTable | None = None, monitored: tuple[int, ...] = (0, 1), **fields: Any) -> list[str]:
    config = MonitorConfig.model_validate({"format": "tensorboard", **fields})
    return list(gaps_of(config, SeriesTable() if series is None else series, monitored))


@pytest.mark.parametrize("fields", [{}, RULES, {"all_xy": True}, {"targets": {"h.0": {}}, "monitor_mbs_grad": True}])
def test_a_configuration_with_no_kind_switched_on_is_said_to_record_nothing_with_the_fields_to_set(fields: Any) -> None:
    (said,) = gaps(**fields)
    assert said.startswith("This configuration records nothing: no kind of tensor is switched on.")
    assert all(f'"{kind}"' in said for kind in KINDS)


def test_rules_without_a_kind_are_said_to_judge_nothing() -> None:
    assert gaps(**RULES)[0].endswith(" The alert rules have nothing to judge.")


def test_collecting_no_step_is_said_to_record_nothing() -> None:
    assert gaps(wg_distribution=True, collect_times=0) == [
        "This configuration records nothing: collect_times is 0. Set it to the number of steps to collect."
    ]


def test_activations_that_exclude_each_other_are_said_to_record_nothing() -> None:
    (said,) = gaps(xy_distribution=True, forward_only=True, backward_only=True)
    assert said.endswith("forward_only and backward_only are both true. Set one of them to false.")


@pytest.mark.parametrize("feature", ["update_ratio", "mg_direction", "recording_l2_features", "stack_info"])
def test_rules_beside_what_they_do_not_judge_are_said_to_have_nothing_to_judge(feature: str) -> None:
    assert gaps(**{feature: True}) == []
    (said,) = gaps(**{feature: True}, **RULES)
    assert said.startswith("The alert rules have nothing to judge")
    assert '"wg_distribution": true' in said


@pytest.mark.parametrize("feature", ["update_ratio", "optimizer_health", "recording_l2_features"])
def test_features_are_something_to_judge_for_the_rule_that_has_bounds_of_them(feature: str) -> None:
    assert gaps(**{feature: True}, alert={"rules": [{"rule_name": "AnomalyNan"}, {"rule_name": "AnomalyBounds"}]}) == []


def test_a_feature_without_a_bound_is_nothing_to_judge() -> None:
    (said,) = gaps(mg_direction=True, alert={"rules": [{"rule_name": "AnomalyBounds"}]})
    assert said.startswith("The alert rules have nothing to judge")


@pytest.mark.parametrize("kind", [*KINDS, "ur_distribution"])
@pytest.mark.parametrize("rules", [{}, RULES])
def test_of_a_configuration_that_records_tensors_nothing_is_said(kind: str, rules: Any) -> None:
    assert gaps(**{kind: True}, **rules) == []


@pytest.mark.parametrize("field", [{"print_struct": True}, {"cc_distribution": {"enable": True, "cc_log_only": True}}])
def test_nor_of_one_that_ends_the_run_after_its_first_step(field: Any) -> None:
    assert gaps(**field, **RULES) == []


def shared() -> SeriesTable:
    table = SeriesTable()
    for name in ("w", "b"):
        table.place(Series("param_origin", 0, name), Placement(replicas=(0, 1)))
    return table


def test_replicas_that_the_user_left_out_are_counted_where_there_are_rules() -> None:
    (said,) = gaps(shared(), param_distribution=True, replica_check=False, **RULES)
    assert said.startswith("replica_check is false: 2 series are measured on one rank for all ranks that hold the tensor.")
    assert "The alert rules do not check the replicas of the other ranks" in said


@pytest.mark.parametrize("fields", [RULES, {**RULES, "replica_check": True}, {"replica_check": False}])
def test_where_replicas_are_judged_or_no_rule_is_on_nothing_is_said_of_them(fields: Any) -> None:
    assert gaps(shared(), param_distribution=True, **fields) == []


def test_replicas_of_ranks_that_are_not_monitored_are_not_counted() -> None:
    assert gaps(shared(), monitored=(0,), param_distribution=True, replica_check=False, **RULES) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"xy_distribution": True}, "replica_check has nothing to compare"),
        ({"wg_distribution": True}, "replica_check does not see a wrong weight"),
        ({"param_distribution": True, "step_interval": 10}, "replica_check does not see what changes between two steps"),
        ({"param_distribution": True, "wg_distribution": True}, ""),
    ],
)
def test_what_an_explicit_check_of_replicas_does_not_see_is_said(fields: Any, said: str) -> None:
    assert [one.startswith(said) for one in gaps(**fields, replica_check=True)] == [True] * bool(said)
    assert gaps(**fields) == gaps(**fields, **RULES) == []
