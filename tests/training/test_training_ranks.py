"""Training metrics of two ranks: a plain loop, the Trainer of transformers, Lightning's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import Launcher, Nursery
from shown import EVERYTHING, Points, TrainRanks, scalars

from monitor.training.expert_load import combined

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = [1, 2, 3]
YAML = f"""{EVERYTHING}callbacks:
    - {{{{type: MFLossMonitor, per_print_times: 1}}}}
    - {{{{type: TopkBiasBalanceCallback}}}}
"""
RUN = {"loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "iteration-time", "throughput"}
OF_RUN = {"model-flops-throughput-per-npu", "B-samples-per-day"}
ALONE = {*OF_RUN, "device_accum_local_loss", "device_local_norm", "weight_norm", "throughput_linearity"}
MOMENTS = {"adam_m_norm": "first_moments", "adam_v_norm": "second_moments"}
BY_NAME = {"local_norm", *MOMENTS, "expert_load"}


class Job(NamedTuple):
    """A job that has ended.

    Attributes:
        told: What each rank knows of its steps.
        shown: What each rank has in TensorBoard, by tag.
        said: Standard error of each rank.
    """

    base: Path
    told: list[dict[str, Any]]
    shown: list[dict[str, Points]]
    said: list[str]

    def values(self, rank: int, tag: str) -> list[float]:
        points = self.shown[rank][tag]
        assert [x for x, _ in points] == STEPS
        return [value for _, value in points]


Run = Callable[[str], Job]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, train_ranks: TrainRanks) -> Run:
    @cache
    def run(how: str) -> Job:
        base = tmp_path_factory.mktemp(how)
        (base / "train.yaml").write_text(YAML.format(base=base))
        (base / "board" / "rank_0").mkdir(parents=True)
        (base / "board" / "rank_0" / "mine.txt").write_text("kept")
        told, said = train_ranks(base, "metrics_of_ranks.py", how, base / "train.yaml", base, preload=PRELOADED.get(how, ""))
        return Job(base, told, [scalars(base / "board" / f"rank_{rank}") for rank in range(2)], said)

    return run


PRELOADED = {"huggingface": "transformers", "lightning": "lightning"}


@pytest.fixture(scope="module", params=["loop", *PRELOADED])
def job(request: pytest.FixtureRequest, run: Run) -> Job:
    return run(request.param)


class TestEveryWay:
    def test_all_metrics_of_every_rank_are_in_tensorboard(self, job: Job) -> None:
        expected = {*RUN, *(f"{one}-vs-samples" for one in RUN), *ALONE, *BY_NAME, "local_loss"}
        for shown in job.shown:
            assert {tag.partition("/")[0] for tag in shown} == expected

    def test_all_metrics_of_every_rank_are_in_the_log(self, job: Job) -> None:
        for rank, said in enumerate(job.said):
            lines = said.splitlines()
            (whole,) = (line for line in lines if f"[rank {rank}] step 3 of" in line or f"[rank {rank}] step 3: loss" in line)
            assert "; " in whole
            assert whole.endswith(" s since the last step")
            for metric in RUN | OF_RUN:
                assert f" {metric} " in whole, metric
            for metric in {*ALONE - OF_RUN, *BY_NAME, "local_loss"}:
                step = 2 if metric in MOMENTS else 3
                assert sum(f"[rank {rank}] step {step}: {metric} " in line for line in lines) == 1, metric

    def test_norms_of_gradients_are_those_of_each_rank_before_they_are_aggregated(self, job: Job) -> None:
        for rank, told in enumerate(job.told):
            for name in told["local_norms"][0]:
                expected = [step[name] for step in told["local_norms"]]
                assert job.values(rank, f"local_norm/{name}") == pytest.approx(expected, rel=1e-4, abs=1e-9), name
            totals = [math.hypot(*step.values()) for step in told["local_norms"]]
            assert job.values(rank, "device_local_norm") == pytest.approx(totals, rel=1e-4)
        assert job.values(0, "device_local_norm") != job.values(1, "device_local_norm")

    def test_the_gradient_norm_of_both_ranks_is_that_of_the_aggregated_gradient(self, job: Job) -> None:
        for rank in range(2):
            assert job.values(rank, "grad-norm") == pytest.approx(job.told[0]["grad_norms"], rel=1e-4)

    def test_the_norm_of_weights_is_that_after_the_step(self, job: Job) -> None:
        for rank, told in enumerate(job.told):
            assert job.values(rank, "weight_norm") == pytest.approx(told["weights"], rel=1e-6)

    def test_norms_of_moments_stand_at_the_step_that_left_them(self, job: Job) -> None:
        for metric, expected in MOMENTS.items():
            for name in job.told[0]["local_norms"][0]:
                points = job.shown[0][f"{metric}/{name}"]
                assert [x for x, _ in points] == [1, 2]
                assert [value for _, value in points] == pytest.approx(
                    [step[name] for step in job.told[0][expected][:2]], rel=1e-6
                )

    def test_the_loss_scale_is_that_of_the_scaler(self, job: Job) -> None:
        assert job.values(0, "loss-scale") == [1024.0] * 3

    def test_samples_are_those_of_all_ranks(self, job: Job) -> None:
        assert job.values(0, "batch-size") == [8.0] * 3
        assert [x for x, _ in job.shown[0]["loss-vs-samples"]] == [8, 16, 24]

    def test_experts_have_the_shares_that_their_counts_make(self, job: Job) -> None:
        (router,) = {tag.split("/")[1] for tag in job.shown[0] if tag.startswith("expert_load")}
        for rank, told in enumerate(job.told):
            shares = [job.values(rank, f"expert_load/{router}/expert_{expert}") for expert in range(4)]
            for step, tokens in enumerate(told["tokens"]):
                assert [share[step] for share in shares] == pytest.approx([count / sum(tokens) for count in tokens], rel=1e-6)
                assert sum(share[step] for share in shares) == pytest.approx(1.0, rel=1e-6)

    def test_counts_of_the_ranks_add_up(self, job: Job) -> None:
        by_rank = [told["tokens"] for told in job.told]
        assert by_rank[0] != by_rank[1]
        assert [list(routers.values()) for routers in combined(job.base / "dump").values()] == [
            [[a + b for a, b in zip(by_rank[0][step], by_rank[1][step], strict=True)]] for step in range(3)
        ]

    def test_nothing_is_warned_of(self, job: Job) -> None:
        assert [line for said in job.said for line in said.splitlines() if line.startswith("[monitor] WARNING")] == []

    def test_what_was_there_before_is_kept(self, job: Job) -> None:
        assert (job.base / "board" / "rank_0" / "mine.txt").read_text() == "kept"


def test_a_loop_tells_of_its_losses(run: Run) -> None:
    job = run("loop")
    for rank, told in enumerate(job.told):
        assert job.values(rank, "loss") == pytest.approx(told["loss"], rel=1e-6)
        for micro_step in range(2):
            expected = [losses[micro_step] for losses in told["local_losses"]]
            assert job.values(rank, f"local_loss/micro_step_{micro_step}") == pytest.approx(expected, rel=1e-6)


def test_the_trainer_of_transformers_tells_of_loss_and_norm(run: Run) -> None:
    job = run("huggingface")
    told = job.told[0]
    assert job.values(0, "grad-norm") == pytest.approx(told["grad_norm"], rel=1e-6)
    assert job.values(0, "loss") == pytest.approx(told["loss"], rel=1e-6)
    assert job.values(0, "learning-rate") == pytest.approx(told["learning_rate"], rel=1e-6)
    means = [sum(pair) / 2 for pair in zip(*(job.values(rank, "device_accum_local_loss") for rank in range(2)), strict=True)]
    assert means == pytest.approx(told["loss"], rel=1e-4)


def test_the_loss_of_lightning_is_the_sum_of_micro_batches(run: Run) -> None:
    job = run("lightning")
    for rank, told in enumerate(job.told):
        expected = [sum(told["local_losses"][2 * step : 2 * step + 2]) for step in range(3)]
        for tag in ("loss", "device_accum_local_loss"):
            assert job.values(rank, tag) == pytest.approx(expected, rel=1e-6)


def test_what_is_left_at_the_end_is_written_when_the_interpreter_exits(tmp_path: Path, nursery: Nursery) -> None:
    (tmp_path / "train.yaml").write_text(YAML.format(base=tmp_path))
    launcher = Launcher(tmp_path, nursery)
    ended = launcher.run(str(SCRIPTS / "metrics_left_open.py"), tmp_path / "train.yaml")
    assert launcher.clean_up() == ([], [])
    assert ended.status == 0, ended.err
    shown = scalars(tmp_path / "board" / "rank_0")
    for tag in ("loss", "grad-norm", "weight_norm"):
        assert [x for x, _ in shown[tag]] == STEPS, tag
