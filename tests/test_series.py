"""The table of kinds names fields, partials, formulas, watchers and roles that exist."""

from __future__ import annotations

from importlib import import_module

import pytest

from monitor.anomalies.ranking.graph import Role
from monitor.config import L2Targets, MonitorConfig
from monitor.series import KIND_TABLE, KINDS, WATCHED_KINDS, Kind, shown_kind
from monitor.stats.features import FEATURES, FORMULAS, own_columns
from monitor.stats.partials import COLUMNS

every_kind = pytest.mark.parametrize("kind", KIND_TABLE, ids=lambda kind: kind.name)


@every_kind
def test_a_kind_is_asked_for_by_a_field_of_the_configuration(kind: Kind) -> None:
    assert not kind.field or kind.field in MonitorConfig.model_fields
    assert kind.field or kind.of == "rank"  # communication and replicas


@every_kind
def test_a_kind_names_kinds_roles_and_partials_that_exist(kind: Kind) -> None:
    assert set(kind.fed_by) <= set(KINDS)
    assert not kind.role or kind.role in Role.__members__
    assert shown_kind(kind.name) in KINDS


@every_kind
def test_a_kind_has_its_own_columns_or_ops(kind: Kind) -> None:
    assert own_columns(kind.name) == tuple(column.name for column in kind.columns)
    for column in kind.columns:
        assert column.formula in FORMULAS
        assert not column.partial or column.partial in COLUMNS


def test_a_name_of_columns_has_one_meaning() -> None:
    """Sinks and the merge look formulas up by the name of the column."""
    columns = {column for kind in KIND_TABLE for column in kind.columns}
    assert len({column.name for column in columns}) == len(columns)


@every_kind
def test_columns_are_in_one_order_over_all_kinds(kind: Kind) -> None:
    """A merge reads the files of a kind with the columns in the order of all features."""
    assert [FEATURES.index(column.name) for column in kind.columns] == sorted(FEATURES.index(one.name) for one in kind.columns)


def test_every_hook_of_the_configuration_has_a_watcher_of_its_kind() -> None:
    assert set(WATCHED_KINDS) == set(L2Targets.model_fields)
    for name, kind in WATCHED_KINDS.items():
        module, _, watcher = kind.watcher.partition(":")
        assert getattr(import_module(module), watcher).kind == name
