"""The training YAML: what is read of it, what is refused, and how that is said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from monitor.config import ConfigError
from monitor.training import load_training_config
from monitor.training.config import (
    OF_SECTIONS,
    UNUSED,
    LossMonitor,
    MonitorSection,
    TensorBoardSection,
    TrainingConfig,
    training_config_in,
)

REFERENCE = """
seed: 0
output_dir: './output'

monitor_config:
    monitor_on: True
    dump_path: './dump'
    target: ['layers.0', 'layers.1'] # the first two layers
    invert: False
    step_interval: 1
    local_loss_format: ['log', 'tensorboard']
    device_local_loss_format: ['log', 'tensorboard']
    local_norm_format: ['log', 'tensorboard']
    device_local_norm_format: ['log', 'tensorboard']
    optimizer_state_format: null
    weight_state_format: null
    throughput_baseline: null
    print_struct: False

tensorboard:
    tensorboard_dir: 'worker/tensorboard'
    tensorboard_queue_size: 10
    log_loss_scale_to_tensorboard: True
    log_timers_to_tensorboard: True

callbacks:
    - type: MFLossMonitor
      per_print_times: 1
"""


def read(text: str) -> TrainingConfig:
    return training_config_in("train.yaml", text)


def problem(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        read(text)
    return str(error.value).removeprefix("train.yaml: ")


def test_a_whole_configuration_is_read() -> None:
    config = read(REFERENCE)
    both = ("log", "tensorboard")
    assert config.monitor_config == MonitorSection(
        monitor_on=True,
        target=("layers.0", "layers.1"),
        local_loss_format=both,
        device_local_loss_format=both,
        local_norm_format=both,
        device_local_norm_format=both,
    )
    assert config.tensorboard == TensorBoardSection(
        tensorboard_dir="worker/tensorboard", log_loss_scale_to_tensorboard=True, log_timers_to_tensorboard=True
    )
    assert config.callbacks.MFLossMonitor == LossMonitor(per_print_times=1)


def test_an_empty_file_gives_every_default() -> None:
    assert read("# nothing\n").model_dump(mode="json") == {
        "monitor_config": {
            "monitor_on": False,
            "dump_path": "./dump",
            "target": [".*"],
            "invert": False,
            "step_interval": 1,
            "local_loss_format": [],
            "device_local_loss_format": [],
            "local_norm_format": [],
            "device_local_norm_format": [],
            "optimizer_state_format": [],
            "weight_state_format": [],
            "throughput_baseline": None,
            "print_struct": False,
        },
        "tensorboard": None,
        "callbacks": {"MFLossMonitor": {"per_print_times": 1}, "TrainingStateMonitor": None, "TopkBiasBalanceCallback": None},
    }


def test_tensorboard_has_its_defaults() -> None:
    assert read("tensorboard: {tensorboard_dir: tb}").model_dump()["tensorboard"] == {
        "tensorboard_dir": "tb",
        "tensorboard_queue_size": 10,
        "log_loss_scale_to_tensorboard": False,
        "log_timers_to_tensorboard": False,
        "log_expert_load_to_tensorboard": False,
    }


@pytest.mark.parametrize("field", ["dump_path", "target"])
def test_null_means_the_default(field: str) -> None:
    assert read(f"monitor_config: {{{field}: null}}").monitor_config == read("").monitor_config


@pytest.mark.parametrize(
    ("spelled", "shown"),
    [("log", {"log"}), ("[tensorboard]", {"tensorboard"}), ("[log, tensorboard]", {"log", "tensorboard"}), ("null", set())],
)
def test_a_format_is_one_a_list_or_null(spelled: str, shown: set[str]) -> None:
    config = read(f"monitor_config: {{monitor_on: true, local_norm_format: {spelled}}}\ntensorboard: {{tensorboard_dir: tb}}")
    assert config.wants("local_norm_format") == shown


def test_without_tensorboard_the_log_takes_its_place() -> None:
    assert read("monitor_config: {monitor_on: true, local_norm_format: tensorboard}").wants("local_norm_format") == {"log"}


def test_nothing_of_the_section_has_an_effect_while_the_monitor_is_off() -> None:
    config = read("monitor_config: {local_norm_format: log, throughput_baseline: 3}")
    assert config.wants("local_norm_format") == set()
    assert math.isnan(config.baseline)


def test_callbacks_of_others_are_left_alone() -> None:
    config = read("callbacks:\n  - {type: CheckpointMonitor, prefix: x}\n  - {type: MFLossMonitor, per_print_times: 5}\n")
    assert config.callbacks.MFLossMonitor == LossMonitor(per_print_times=5)


def test_a_list_without_the_loss_monitor_has_none() -> None:
    assert read("callbacks: []").callbacks.MFLossMonitor is None


def test_the_whole_document_is_kept() -> None:
    assert read(REFERENCE).document["output_dir"] == "./output"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "monitor_config:\n  step_interva: 1\n",
            "line 2: monitor_config.step_interva: unknown field, did you mean `step_interval`?",
        ),
        (
            "monitor_config:\n  colour: 1\n",
            "line 2: monitor_config.colour: unknown field, docs/training-metrics.md lists all fields",
        ),
        (
            "monitor_config:\n  monitor_on: 1\n",
            "line 2: monitor_config.monitor_on: 1 is not allowed: expected true or false",
        ),
        (
            "monitor_config:\n\n  step_interval: 0\n",
            "line 3: monitor_config.step_interval: 0 is not allowed: expected an integer from 1 to 2^63 - 1",
        ),
        (
            "monitor_config:\n  local_norm_format: [log, csv]\n",
            'line 2: monitor_config.local_norm_format: ["log", "csv"] is not allowed: expected "log", "tensorboard", '
            "a list of these, or null",
        ),
        (
            "monitor_config:\n  throughput_baseline: 0\n",
            "line 2: monitor_config.throughput_baseline: 0 is not allowed: expected a number above 0, or null",
        ),
        ("tensorboard:\n  tensorboard_queue_size: 3\n", "line 1: tensorboard.tensorboard_dir is missing: expected a path"),
        (
            "callbacks:\n  - type: MFLossMonitor\n    per_print_times: '1'\n",
            'line 3: callbacks.MFLossMonitor.per_print_times: "1" is not allowed: expected an integer from 1 to 2^63 - 1',
        ),
        ("callbacks:\n  - type: MFLosMonitor\n", "line 2: callbacks: MFLosMonitor: did you mean `MFLossMonitor`?"),
        ("callbacks:\n  - per_print_times: 1\n", "line 2: callbacks: each item needs a `type`, such as `MFLossMonitor`"),
        ("callbacks: 3\n", "callbacks: 3 is not allowed: expected a list, each item with a `type`"),
        (
            "callbacks:\n  - type: MFLossMonitor\n  - type: MFLossMonitor\n",
            "line 3: callbacks: MFLossMonitor appears twice",
        ),
        ("seed: 1\nmonitor_confg: {}\n", "line 2: monitor_confg: did you mean `monitor_config`?"),
        ("seed: 1\nseed: 2\n", 'line 2: "seed" appears twice in the same mapping'),
        ("seed: [1\n", "line 2, column 1: expected ',' or ']', but got '<stream end>'"),
        ("- 1\n", "expected a mapping of sections, found [1]"),
        (
            "seed: !!python/object:os.system x\n",
            "line 1, column 7: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, said: str) -> None:
    assert problem(text) == said


def test_fields_of_the_original_that_have_no_effect_are_accepted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    sections: dict[str, Any] = {"monitor_config": {}, "callbacks": []}
    for (section, *kind), names in OF_SECTIONS.items():
        fields = dict.fromkeys(names, 3)
        if kind:
            sections[section].append({"type": kind[0], **fields})
        else:
            sections[section].update(fields)
    config = read(json.dumps(sections))
    assert config.monitor_config == MonitorSection()
    assert config.callbacks.MFLossMonitor == LossMonitor()
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.endswith(": the monitor does not use these fields, and ignores them.")
    assert all(".".join(path) in said for path in UNUSED)


def test_a_target_that_is_no_regular_expression_is_refused() -> None:
    assert problem("monitor_config:\n  target: ['a', '(']\n").startswith(
        'line 2: monitor_config.target[1]: "(" is not allowed: it is not a regular expression: '
    )


def test_several_problems_are_listed_below_the_name_of_the_file() -> None:
    said = problem("monitor_config:\n  invert: 1\n  print_struct: 2\n")
    assert [line.split(": ")[0].strip() for line in said.splitlines()] == ["several problems", "line 2", "line 3"]


def test_a_mapping_within_itself_is_refused() -> None:
    assert "within itself" in problem("a: &a\n  b: *a\n")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: there is no such file"):
        load_training_config(tmp_path / "missing.yaml")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(REFERENCE)
    assert load_training_config(path) == read(REFERENCE)


def test_the_document_has_the_defaults_of_our_sections() -> None:
    assert read("monitor_config: {invert: true}").document["monitor_config"]["dump_path"] == "./dump"


def test_what_a_merge_key_has_brought_is_named_without_a_line() -> None:
    assert problem("<<: {monitor_confi: {}}\n") == "monitor_confi: did you mean `monitor_config`?"
