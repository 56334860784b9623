"""``config.json`` of a precision dump, and the arguments that win over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from monitor.config import ConfigError
from monitor.dump.config import LEVELS, OF_SECTIONS, OTHER_TASKS, SWITCHES, DumpConfig, Level, load
from monitor.dump.levels import SOURCES


def written(tmp_path: Path, **fields: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return path


def test_the_defaults_are_those_of_the_documentation() -> None:
    defaults = load(None, {}).model_dump(by_alias=True, mode="json", exclude={"api_list"})
    assert defaults == {
        "task": "statistics",
        "dump_path": "./dump_path",
        "rank": [],
        "step": [],
        "level": "L1",
        "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
        "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
    }


def test_a_file_of_defaults_is_the_defaults(tmp_path: Path) -> None:
    fields = DumpConfig().model_dump(by_alias=True, mode="json", exclude={"api_list"})
    assert load(written(tmp_path, **fields), {}) == DumpConfig()


def test_an_argument_wins_over_the_file(tmp_path: Path) -> None:
    config = load(written(tmp_path, level="L0", task="tensor"), {"level": "mix", "task": None})
    assert (config.level, config.task) == ("mix", "tensor")


def test_steps_may_be_numbers_and_ranges(tmp_path: Path) -> None:
    assert load(written(tmp_path, step=[0, "3-5", 4]), {}).step == [0, 3, 4, 5]


def test_a_lone_number_is_a_list_of_itself() -> None:
    assert load(None, {"step": 3}).step == [3]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"level": "L3"}, 'level: "L3" is not allowed: expected "L0", "L1", "mix", "L2" or "debug"'),
        ({"task": "overflow"}, 'task: "overflow" is not allowed'),
        ({"levle": "L1"}, "levle: unknown field, did you mean `level`?"),
        ({"step": [-1]}, '-1 is neither a number from 0 on nor a range like "4-6"'),
        ({"step": ["6-4"]}, '"6-4" is neither a number from 0 on nor a range like "4-6"'),
        ({"statistics": {"scope": ["a"]}}, "expected [] or two names: where to begin and where to end, both included"),
        ({"statistics": {"data_mode": ["gradients"]}}, '"gradients" is not allowed'),
        ({"statistics": {"summary_mod": "md5"}}, "statistics.summary_mod: unknown field, did you mean `summary_mode`?"),
        ({"async_dmp": False}, "async_dmp: unknown field"),
        ({"tensor": {"lst": []}}, "tensor.lst: unknown field, did you mean `list`?"),
    ],
)
def test_what_is_not_allowed_is_said_with_the_field_and_the_value(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path, **fields), {})
    assert said in str(error.value)
    assert "line 1" in str(error.value)


def test_what_is_wrong_with_an_argument_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"level: \"L3\"") as error:
        load(written(tmp_path, level="L1"), {"level": "L3"})
    assert "line" not in str(error.value)


def test_the_level_of_kernels_is_a_configuration_that_records_nothing(tmp_path: Path) -> None:
    records = load(written(tmp_path, level="L2"), {}).records
    assert not any((records.apis, records.sources, records.values))
    assert "Ascend" in records.refused


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load(tmp_path / "config.json", {})


def test_a_dictionary_in_place_of_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="config_path is a dict: expected the path of a file"):
        load({"task": "tensor"}, {})  # type: ignore[arg-type]


def test_checksums_belong_to_statistics_alone(tmp_path: Path) -> None:
    path = written(tmp_path, statistics={"summary_mode": "md5"})
    assert load(path, {}).checksums
    assert not load(path, {"task": "tensor"}).checksums


DEFAULTS_OF_THE_ORIGINAL: dict[str, Any] = {
    "task": "statistics",
    "dump_path": "./dump_path",
    "rank": [],
    "step": [],
    "level": "L1",
    "extra_info": True,
    "async_dump": False,
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
    "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
}


def test_the_default_file_of_the_original_is_accepted_and_what_is_not_used_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, **DEFAULTS_OF_THE_ORIGINAL)
    assert load(path, {}) == DumpConfig()
    assert [one.getMessage() for one in caplog.records] == [
        f"{path}: extra_info, async_dump, acc_check: the monitor does not use these fields, and ignores them."
    ]


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_so_are_the_fields_that_its_other_versions_have(tmp_path: Path, caplog: pytest.LogCaptureFixture, task: str) -> None:
    others = {name: {"anything": [1]} for name in OTHER_TASKS} | dict.fromkeys(SWITCHES, False)
    sections = {section: dict.fromkeys(names, False) for section, names in OF_SECTIONS.items()}
    assert load(written(tmp_path, task=task, **others, **sections), {}) == DumpConfig(task=task)  # type: ignore[arg-type]
    (said,) = [one.getMessage() for one in caplog.records]
    assert all(name in said for name in (*OTHER_TASKS, *SWITCHES, "statistics.tensor_list", "tensor.summary_mode"))


def test_null_is_not_set_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, step=None, tensor=None, statistics={"scope": None, "list": ["relu"]})
    assert load(path, {}).statistics.names == ["relu"]
    (said,) = [one.getMessage() for one in caplog.records]
    assert "step, tensor, statistics.scope: null is taken as not set" in said


def test_every_level_has_an_entry_and_its_sources_exist() -> None:
    assert set(LEVELS) == set(get_args(Level))
    assert {source for level in LEVELS.values() for source in level.sources} == set(SOURCES)
