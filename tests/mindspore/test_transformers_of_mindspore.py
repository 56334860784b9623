"""Every metric that MindSpore Transformers documents, in TensorBoard and in the log, and every field of its configuration.

``transformers_cells.py`` rebuilds how its trainer calls callbacks. ``test_transformers_trainer.py`` runs the trainer itself.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from reference_examples import METRICS, WITHOUT, fenced, text_of
from transformers_cells import BASELINE, FLOPS, ROWS, SCALE, STEPS, Observed, by_hand, train

from monitor.failures import LOGGER
from monitor.mindspore.training import RunEnded, TrainingMetricsCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

from shown import Points, scalars, texts

BOTH = ["log", "tensorboard"]
FORMATS = (
    *("local_loss_format", "device_local_loss_format", "local_norm_format"),
    *("device_local_norm_format", "optimizer_state_format", "weight_state_format"),
)
RUN = ("loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "iteration-time", "throughput")
ALONE = ("model-flops-throughput-per-npu", "B-samples-per-day")
STATE = {
    "local_loss_format": {"local_loss"},
    "device_local_loss_format": {"device_accum_local_loss"},
    "local_norm_format": {"local_norm"},
    "device_local_norm_format": {"device_local_norm"},
    "optimizer_state_format": {"adam_m_norm", "adam_v_norm"},
    "weight_state_format": {"weight_norm"},
    "throughput_baseline": {"throughput_linearity"},
}


class Shown(NamedTuple):
    """What a run has shown, by tag, and what was observed of it."""

    board: dict[str, Points]
    log: dict[str, dict[int, float]]
    observed: Observed


Runs = Callable[..., Shown]


def whole(base: Path) -> dict[str, Any]:
    """A configuration that shows everything."""
    monitor: dict[str, Any] = {"monitor_on": True, "dump_path": str(base / "dump"), "throughput_baseline": BASELINE}
    board: dict[str, Any] = {"tensorboard_dir": str(base / "board"), "tensorboard_queue_size": 10}
    board |= dict.fromkeys(
        ("log_loss_scale_to_tensorboard", "log_timers_to_tensorboard", "log_expert_load_to_tensorboard"), True
    )
    callbacks = [{"type": "MFLossMonitor", "per_print_times": 1}, {"type": "TopkBiasBalanceCallback"}]
    sections = {"monitor_config": {**monitor, **dict.fromkeys(FORMATS, BOTH)}, "tensorboard": board, "callbacks": callbacks}
    return {"seed": 0, "output_dir": "./output", **sections}


@pytest.fixture
def run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Runs:
    """Trains with the whole configuration, changed by fields of its sections; None removes a section."""

    def shown(callbacks: Any = None, *, clips: bool = True, **changes: Any) -> Shown:
        config = whole(tmp_path)
        for section, fields in changes.items():
            config = {key: one for key, one in config.items() if key != section or fields is not None}
            if fields is not None:
                config[section] |= fields
        config |= {} if callbacks is None else {"callbacks": callbacks}
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
        metrics = TrainingMetricsCallback(tmp_path / "train.yaml", routers=["gate"], model_flops=FLOPS)
        caplog.clear()
        with caplog.at_level(logging.INFO, LOGGER.name):
            observed = train([metrics], use_clip_grad=clips)
        board = tmp_path / "board" / "rank_0"
        return Shown(scalars(board) if board.exists() else {}, logged(caplog.messages), observed)

    return shown


def logged(lines: list[str]) -> dict[str, dict[int, float]]:
    """The numbers of the log, by the tags that TensorBoard has."""
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        if not (match := re.match(r"\[rank 0\] step (\d+)(?: of \d+)?: (.*?)(?:; .*)?$", line)):
            continue
        of_run = "iteration-time" in line
        for tag, value in _numbers(match[2], of_run=of_run):
            found.setdefault(tag, {})[int(match[1])] = value
    return found


def _numbers(text: str, *, of_run: bool) -> list[tuple[str, float]]:
    """``loss 1, grad-norm 2``, ``local_norm a 1, b 2``, ``weight_norm 1`` or ``expert_load gate 0.5 0.5``."""
    if text.startswith("expert_load "):
        _, router, *shares = text.split()
        return [(f"expert_load/{router}/expert_{i}", float(share)) for i, share in enumerate(shares)]
    items = [item.split() for item in text.split(", ")]
    if of_run or (len(items[0]) == 2 and len(items) == 1):
        return [(item[0], float(item[1])) for item in items]
    metric, items[0] = items[0][0], items[0][1:]
    return [(f"{metric}/{name}", float(value)) for name, value in items]


def metrics_of(tags: Any) -> set[str]:
    """The metrics, without their objects."""
    return {tag.partition("/")[0] for tag in tags}


def test_every_metric_is_on_the_board_and_in_the_log_with_the_value_that_numpy_computes(run: Runs) -> None:
    shown = run()
    expected = by_hand(shown.observed)
    timed = {"iteration-time", "throughput", *ALONE, "throughput_linearity"}
    against = {f"{tag}-vs-samples" for tag in RUN}
    assert set(shown.board) == {*expected, *timed, *against}
    assert set(shown.log) == {*expected, *timed}
    for tag, values in expected.items():
        # 1 - 0.999 in single precision is off by more than the norm is.
        close = 2e-4 if tag.startswith("adam_v") else 2e-5
        assert dict(shown.board[tag]) == pytest.approx(values, rel=close), tag
        assert shown.log[tag] == pytest.approx(values, rel=close), tag
    for tag in timed:
        assert shown.log[tag] == pytest.approx(dict(shown.board[tag]), rel=1e-5), tag


def test_timers_are_those_of_the_clock_and_agree_with_each_other(run: Runs) -> None:
    shown = run()
    ends = [shown.observed.began, *shown.observed.ends]
    for step in range(1, STEPS + 1):
        told = {tag: dict(shown.board[tag])[step] for tag in ("iteration-time", "throughput", *ALONE, "throughput_linearity")}
        assert told["iteration-time"] == pytest.approx(ends[step] - ends[step - 1], abs=0.1)
        assert told["throughput"] == pytest.approx(ROWS / told["iteration-time"], rel=1e-5)
        assert told["B-samples-per-day"] == pytest.approx(told["throughput"] * 86_400 / 1e9, rel=1e-5)
        assert told["model-flops-throughput-per-npu"] == pytest.approx(FLOPS / told["iteration-time"] / 1e12, rel=1e-5)
        assert told["throughput_linearity"] == pytest.approx(told["throughput"] / BASELINE, rel=1e-5)


def test_the_axis_against_samples_counts_samples(run: Runs) -> None:
    shown = run()
    for tag in RUN:
        steps, samples = shown.board[tag], shown.board[f"{tag}-vs-samples"]
        assert [x for x, _ in samples] == [ROWS * x for x, _ in steps]
        assert [value for _, value in samples] == [value for _, value in steps]


def test_a_cell_that_does_not_clip_has_the_norm_of_its_gradients(run: Runs) -> None:
    shown = run(clips=False)
    assert dict(shown.board["grad-norm"]) == pytest.approx(by_hand(shown.observed)["grad-norm"], rel=2e-5)


def test_the_norm_before_clipping_needs_no_recording(run: Runs, tmp_path: Path) -> None:
    shown = run(monitor_config={"monitor_on": False})
    assert dict(shown.board["grad-norm"]) == pytest.approx(by_hand(shown.observed)["grad-norm"], rel=2e-5)
    assert not list((tmp_path / "dump").glob("*-rank0-*"))


# --- Fields of ``monitor_config``.


def test_a_section_that_is_off_shows_nothing(run: Runs) -> None:
    shown = run(monitor_config={"monitor_on": False})
    assert not metrics_of([*shown.board, *shown.log]) & set.union(*STATE.values())


@pytest.mark.parametrize("where", ["log", "tensorboard", BOTH])
def test_a_format_says_where_its_metrics_are(where: Any, run: Runs) -> None:
    shown = run(monitor_config=dict.fromkeys(FORMATS, where))
    asked = set.union(*(STATE[field] for field in FORMATS))
    assert metrics_of(shown.board) & asked == (asked if "tensorboard" in where else set())
    assert metrics_of(shown.log) & asked == (asked if "log" in where else set())


@pytest.mark.parametrize("field", STATE)
def test_a_metric_without_its_field_is_not_shown_and_all_others_are(field: str, run: Runs) -> None:
    shown = run(monitor_config={field: None})
    others = set.union(*(tags for name, tags in STATE.items() if name != field))
    for tags in (shown.board, shown.log):
        assert metrics_of(tags) & {*others, *STATE[field]} == others


@pytest.mark.parametrize("invert", [False, True])
def test_target_selects_parameters_by_their_names(invert: bool, run: Runs) -> None:
    shown = run(monitor_config={"target": ["^layers.0"], "invert": invert})
    layer = "layers.1" if invert else "layers.0"
    for metric in ("local_norm", "adam_m_norm", "adam_v_norm"):
        expected = {f"{metric}/{layer}.{name}" for name in ("weight", "bias")}
        assert {tag for tag in shown.board if tag.startswith(metric)} == expected
        assert {tag for tag in shown.log if tag.startswith(metric)} == expected
    assert dict(shown.board["device_local_norm"]) == pytest.approx(by_hand(shown.observed)["device_local_norm"], rel=2e-5)


def test_an_interval_shows_every_second_step(run: Runs) -> None:
    shown = run(monitor_config={"step_interval": 2})
    for tag in set.union(*STATE.values()) - {"local_norm", "adam_m_norm", "adam_v_norm"}:
        assert list(dict(shown.board[tag])) == list(shown.log[tag]) == [2]
    assert list(dict(shown.board["loss"])) == [1, 2, 3]


def test_the_dump_path_has_the_recording(run: Runs, tmp_path: Path) -> None:
    run(monitor_config={"dump_path": str(tmp_path / "elsewhere")})
    assert list((tmp_path / "elsewhere").glob("*-rank0-*/*.h5"))


def test_the_names_of_parameters_are_printed_and_end_the_run(run: Runs, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunEnded):
        run(monitor_config={"print_struct": True})
    names = ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")
    assert "4 trainable parameters:\n" + "\n".join(names) in caplog.text


# --- Fields of ``tensorboard`` and ``callbacks``.


def test_without_a_board_all_is_in_the_log(run: Runs, tmp_path: Path) -> None:
    shown = run(tensorboard=None, callbacks=[{"type": "MFLossMonitor", "per_print_times": 1}])
    assert not (tmp_path / "board").exists()
    assert metrics_of(shown.log) == {*RUN, *ALONE, *set.union(*STATE.values())}


@pytest.mark.parametrize(
    ("field", "tags"),
    [
        ("log_loss_scale_to_tensorboard", {"loss-scale"}),
        ("log_timers_to_tensorboard", {"iteration-time", "throughput", "B-samples-per-day"}),
        ("log_expert_load_to_tensorboard", {"expert_load"}),
    ],
)
def test_a_switch_of_the_board_is_off_by_default(field: str, tags: set[str], run: Runs) -> None:
    shown = run(tensorboard={field: False})
    assert not metrics_of(shown.board) & tags
    assert (tags <= metrics_of(shown.log)) is (field != "log_expert_load_to_tensorboard")


def test_a_queue_is_written_when_it_is_full(run: Runs) -> None:
    assert set(run(tensorboard={"tensorboard_queue_size": 1}).board) == set(run().board)


def test_metrics_of_the_run_have_an_interval_of_their_own(run: Runs) -> None:
    shown = run(callbacks=[{"type": "MFLossMonitor", "per_print_times": 2}])
    for tag in (*RUN, *ALONE):
        assert list(dict(shown.board[tag])) == list(shown.log[tag]) == [2], tag
    assert list(dict(shown.board["local_loss"])) == [1, 2, 3]


def test_the_configuration_is_on_the_page_of_texts(run: Runs, tmp_path: Path) -> None:
    run()
    shown = texts(tmp_path / "board" / "rank_0")
    assert set(shown) == {"seed", "output_dir", "monitor_config", "tensorboard", "callbacks"}
    assert shown["seed"] == "0"
    assert "throughput_baseline: 8.0" in shown["monitor_config"]


# --- The examples of the document.

EXAMPLES = {"yaml": ["the whole configuration", "experts, added to it"], "bash": ["start TensorBoard"], "shell": ["its answer"]}
DOCUMENT = text_of(METRICS)
needs_the_document = pytest.mark.skipif(not DOCUMENT, reason=WITHOUT)


@needs_the_document
def test_the_table_has_every_example_of_the_document() -> None:
    assert {language: len(fenced(DOCUMENT, language)) for language in EXAMPLES} == {
        key: len(one) for key, one in EXAMPLES.items()
    }
    assert DOCUMENT.count("```") == 2 * sum(map(len, EXAMPLES.values()))


@needs_the_document
def test_the_document_names_no_metric_that_is_not_shown(run: Runs) -> None:
    """Each row of its tables of metrics; ``expert_load`` and norms have a tag for each object."""
    tables = DOCUMENT.split("### 指标可视化说明")[1].split("#### 指标可视化样例")[0]
    named = re.findall(r"^\| *([a-zA-Z_-]*[a-zA-Z]) *\|", tables, flags=re.MULTILINE)
    assert len(named) == len(RUN) + len(ALONE) + 8 + 1
    assert set(named) <= metrics_of(run().board)


@needs_the_document
@pytest.mark.parametrize("experts", [False, True])
def test_its_configuration_shows_what_it_asks_for(experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole, added = fenced(DOCUMENT, "yaml")
    Path("train.yaml").write_text(whole if not experts else _merged(whole, added))
    train([TrainingMetricsCallback("train.yaml", routers=["gate"])])
    shown = metrics_of(scalars(tmp_path / "worker" / "tensorboard" / "rank_0"))
    state = {"local_loss", "device_accum_local_loss", "local_norm", "device_local_norm"}
    against = {f"{tag}-vs-samples" for tag in RUN}
    assert shown == {*RUN, *against, "B-samples-per-day", *state, *({"expert_load"} if experts else ())}


def _merged(whole: str, added: str) -> str:
    """The added fields in their sections, and the added callback behind the others."""
    one, other = yaml.safe_load(whole), yaml.safe_load(added)
    one["tensorboard"] |= other.pop("tensorboard")
    one["callbacks"] += other.pop("callbacks")
    return str(yaml.safe_dump(one | other))


def test_a_loss_scale_does_not_change_norms(run: Runs) -> None:
    shown = run()
    assert np.unique([value for _, value in shown.board["loss-scale"]]).tolist() == [SCALE]
