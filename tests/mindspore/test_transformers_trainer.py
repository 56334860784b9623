"""The trainer of MindSpore Transformers itself, where it is installed: its own metrics are the expected ones.

It is not among the tests' dependencies, since it pins other versions of MindSpore. ``CONTRIBUTING.md`` says how to install
it beside them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

from shown import Points, scalars

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mindformers") is None, reason="MindSpore Transformers is not installed"
)

HERE = Path(__file__).resolve().parent
GRAPH, DYNAMIC = 0, 1
STEPS = [1, 2, 3]
SHARED = ("loss", "learning-rate", "batch-size", "loss-scale", "grad-norm")
"""Metrics that do not depend on time."""

FORMATS = ("local_loss", "device_local_loss", "local_norm", "device_local_norm", "optimizer_state", "weight_state")
STATE = {
    "local_loss",
    "device_accum_local_loss",
    "local_norm",
    "device_local_norm",
    "adam_m_norm",
    "adam_v_norm",
    "weight_norm",
}


def theirs(base: Path, mode: int) -> dict[str, Any]:
    """The trainer's configuration. Its own recording of the state needs an operation that a CPU lacks, and is off."""
    return {
        "seed": 0,
        "output_dir": str(base / "output"),
        "run_mode": "train",
        "use_parallel": False,
        "use_legacy": True,
        "auto_trans_ckpt": False,
        "resume_training": False,
        "load_checkpoint": "",
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "tiny"},
        "runner_config": {"epochs": 1, "batch_size": 2, "sink_mode": False, "sink_size": 1},
        "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8, "learning_rate": 1e-3},
        "lr_schedule": {
            "type": "CosineWithWarmUpLR",
            "learning_rate": 1e-3,
            "lr_end": 0,
            "warmup_ratio": 0.03,
            "total_steps": -1,
        },
        "runner_wrapper": {"type": "OnCpu", "scale_sense": 64.0, "use_clip_grad": True},
        "train_dataset": {"input_columns": ["input_ids"], "batch_size": 2},
        "train_dataset_task": {"type": "CausalLanguageModelDataset", "dataset_config": {"input_columns": ["input_ids"]}},
        "context": {"mode": mode, "device_target": "CPU"},
        "parallel_config": {"data_parallel": 1, "model_parallel": 1, "pipeline_stage": 1, "micro_batch_num": 1},
        "parallel": {"parallel_mode": 0},
        "micro_batch_interleave_num": 1,
        "monitor_config": {"monitor_on": False},
        "recompute_config": {"recompute": False},
        "model": {"model_config": {"type": "LlamaConfig", "seq_length": 8}, "arch": {"type": "LlamaForCausalLM"}},
        "tensorboard": board(base / "theirs"),
        "callbacks": [{"type": "MFLossMonitor", "per_print_times": 1}],
    }


def board(directory: Path) -> dict[str, Any]:
    switches = dict.fromkeys(("log_loss_scale_to_tensorboard", "log_timers_to_tensorboard"), True)
    return {"tensorboard_dir": str(directory), "tensorboard_queue_size": 10, **switches}


def ours(base: Path, *, state: bool) -> dict[str, Any]:
    formats = {f"{name}_format": ["log", "tensorboard"] for name in FORMATS}
    section = {"monitor_on": state, "dump_path": str(base / "dump"), "target": ["layers.0"], **formats}
    return {"monitor_config": section, "tensorboard": board(base / "ours"), "callbacks": [{"type": "MFLossMonitor"}]}


class Trained(NamedTuple):
    """A run that has ended."""

    result: dict[str, Any]
    theirs: dict[str, Points]
    ours: dict[str, Points]
    said: str


def train(base: Path, mode: int, *, monitored: bool = True) -> Trained:
    base.mkdir()
    (base / "theirs.yaml").write_text(yaml.safe_dump(theirs(base, mode)))
    (base / "ours.yaml").write_text(yaml.safe_dump(ours(base, state=mode == DYNAMIC)))
    script = [sys.executable, str(HERE / "scripts" / "transformers_trainer.py")]
    arguments = [str(base / "theirs.yaml"), str(base / "ours.yaml") if monitored else "", str(base / "result.json")]
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [*script, *arguments], cwd=base, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    boards = [scalars(base / whose / "rank_0") if (base / whose).exists() else {} for whose in ("theirs", "ours")]
    return Trained(json.loads((base / "result.json").read_text()), *boards, ran.stdout + ran.stderr)


@pytest.fixture(scope="module", params=[DYNAMIC, GRAPH], ids=["dynamic", "graph"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("job") / "run", request.param)


def test_metrics_of_the_run_are_theirs(trained: Trained) -> None:
    for tag in SHARED:
        assert [x for x, _ in trained.ours[tag]] == STEPS
        assert trained.ours[tag] == [(x, pytest.approx(value, rel=1e-5)) for x, value in trained.theirs[tag]], tag


def test_every_metric_of_the_run_that_they_show_has_ours_beside_it(trained: Trained) -> None:
    """They count floating point operations in graph mode; ours has to be told how many there are."""
    shown = {tag.replace("_vs_samples", "-vs-samples") for tag in trained.theirs if "flops" not in tag}
    assert shown <= set(trained.ours)
    for tag in shown:
        theirs = trained.theirs[tag.replace("-vs-samples", "_vs_samples")]
        assert [x for x, _ in trained.ours[tag]] == [x for x, _ in theirs]


def test_the_log_has_a_line_for_each_step(trained: Trained) -> None:
    for step, (_, norm) in zip(STEPS, trained.theirs["grad-norm"], strict=True):
        assert f"[rank 0] step {step} of 3: loss " in trained.said
        assert f"grad-norm {norm:.5g}"[:-1] in trained.said


def test_metrics_of_the_state_are_those_of_the_model(tmp_path: Path) -> None:
    trained = train(tmp_path / "run", DYNAMIC)
    assert {tag.partition("/")[0] for tag in trained.ours} >= STATE
    assert [value for _, value in trained.ours["weight_norm"]] == pytest.approx(trained.result["norms"], rel=1e-5)
    # There is one rank, so its gradients are the whole ones.
    assert trained.ours["device_local_norm"] == [(x, pytest.approx(one, rel=1e-5)) for x, one in trained.theirs["grad-norm"]]
    names = {tag.partition("/")[2] for tag in trained.ours if tag.startswith("local_norm/")}
    assert names == {"layers.0.feed.weight", "layers.0.feed.bias"} <= set(trained.result["weights"])


def test_the_trainer_computes_the_same_bits(tmp_path: Path) -> None:
    with_metrics, without = (train(tmp_path / name, DYNAMIC, monitored=name == "with") for name in ("with", "without"))
    assert with_metrics.result == without.result
