"""The files in ``configs/``, and what ``docs/configuration.md`` says about them and about every field."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from monitor.config import MonitorConfig, load_config
from monitor.stats.ops import OPS

ROOT = Path(__file__).resolve().parents[1]
READY = sorted((ROOT / "configs").glob("*.json"))
DOCUMENT = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```json\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)

ASKED_FOR = {
    "activations": {"xy_distribution", "all_xy"},
    "alerts": {"xy_distribution", "all_xy", "wg_distribution"},
    "api": {"xy_distribution", "all_xy", "wg_distribution"},
    "communication": set(),
    "everything": {"xy_distribution", "all_xy", "wg_distribution", "mv_distribution", "param_distribution"},
    "features": {"recording_l2_features"},
    "first_fault": {"xy_distribution", "all_xy", "wg_distribution", "mv_distribution", "param_distribution"},
    "gradients": {"wg_distribution", "wg_reduced_only", "update_ratio"},
    "health": {"wg_distribution", "wg_reduced_only", "param_distribution", "xy_distribution", "replica_check"},
    "hdf5": {"wg_distribution", "mv_distribution", "param_distribution"},
    "low_precision": {"xy_distribution", "all_xy", "wg_distribution", "param_distribution", "update_ratio"},
    "micro_batch_gradients": {"wg_distribution", "monitor_mbs_grad"},
    "optimizer_moments": {"mv_distribution"},
    "print_structure": {"print_struct"},
    "stack_info": {"stack_info"},
    "tensorboard": {"wg_distribution", "param_distribution"},
    "updates": {"update_ratio", "mg_direction", "ur_distribution"},
    "weight_gradients": {"wg_distribution"},
}


@pytest.fixture(autouse=True)
def _static_monitoring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMIC_MONITOR", raising=False)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_configuration_doc", ROOT / "tools" / "make_configuration_doc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_a_ready_file_switches_on_what_its_name_says(path: Path) -> None:
    config = load_config(path)
    assert ASKED_FOR[path.stem] == {name for name, value in config if value is True}


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_a_ready_file_asks_for_statistics_that_exist(path: Path) -> None:
    assert set(load_config(path).ops) <= set(OPS)


def test_there_is_a_ready_file_for_each_purpose_and_the_document_names_it() -> None:
    assert sorted(ASKED_FOR) == [path.stem for path in READY]
    assert sorted(ASKED_FOR) == sorted(re.findall(r"^\| `configs/(\w+)\.json`", DOCUMENT, re.MULTILINE))


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_of_the_document_loads(tmp_path: Path, example: str) -> None:
    (tmp_path / "config.json").write_text(example, encoding="utf-8")
    assert load_config(tmp_path / "config.json").model_fields_set


def test_the_document_has_its_examples() -> None:
    assert len(EXAMPLES) == 4


def test_the_document_says_what_the_model_says(generator: ModuleType) -> None:
    assert generator.with_fields(DOCUMENT) == DOCUMENT, "run tools/make_configuration_doc.py"


def test_every_field_has_a_row_with_a_meaning_and_a_capability(generator: ModuleType) -> None:
    rows = [line.strip("| \n").split(" | ") for line in generator.table().splitlines()[2:]]
    assert set(MonitorConfig.model_fields) == {row[0].strip("`") for row in rows} & set(MonitorConfig.model_fields)
    assert all(len(row) == 6 and all(row) for row in rows)


def test_the_document_names_every_statistic(generator: ModuleType) -> None:
    meaning = next(line for line in generator.table().splitlines() if line.startswith("| `ops`"))
    assert all(f"`{op}`" in meaning for op in OPS)
