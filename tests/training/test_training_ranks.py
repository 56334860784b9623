"""Training metrics of two ranks: a plain loop, the Trainer of transformers, Lightning's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import Launcher, Nursery
from shown import EVERYTHING, Points, scalars

from monitor.training.expert_load import combined

SCRIPT = Path(__file__).parent / "scripts" / "metrics_of_ranks.py"
STEPS = [1, 2, 3]
YAML = f"""{EVERYTHING}callbacks:
    - {{{{type: MFLossMonitor, per_print_times: 1}}}}
    - {{{{type: TopkBiasBalanceCallback}}}}
"""
RUN = {"loss", "learning-rate", "batch-size", "grad-norm", "iteration-time", "throughput"}
ALONE = {
    "model-flops-throughput-per-npu",
    "B-samples-per-day",
    "device_accum_local_loss",
    "device_local_norm",
    "weight_norm",
    "throughput_linearity",
}


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
def run(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Run]:
    launchers: list[Launcher] = []

    @cache
    def run(how: str) -> Job:
        base = tmp_path_factory.mktemp(how)
        (base / "train.yaml").write_text(YAML.format(base=base))
        (base / "board" / "rank_0").mkdir(parents=True)
        (base / "board" / "rank_0" / "mine.txt").write_text("kept")
        launchers.append(Launcher(base, nursery))
        ranks = launchers[-1].start_ranks(2, str(SCRIPT), how, base / "train.yaml", base)
        ended = [one.end() for one in ranks]
        assert [one.status for one in ended] == [0, 0], ended
        told = [json.loads((base / f"rank{rank}.json").read_text()) for rank in range(2)]
        return Job(base, told, [scalars(base / "board" / f"rank_{rank}") for rank in range(2)], [one.err for one in ended])

    yield run
    for launcher in launchers:
        assert launcher.clean_up() == ([], [])


@pytest.fixture(scope="module", params=["loop", "huggingface", "lightning"])
def job(request: pytest.FixtureRequest, run: Run) -> Job:
    return run(request.param)


@pytest.fixture(scope="module")
def loop(run: Run) -> Job:
    return run("loop")


class TestEveryWay:
    def test_all_metrics_of_every_rank_are_in_tensorboard(self, job: Job) -> None:
        for shown in job.shown:
            assert {*RUN, *(f"{one}-vs-samples" for one in RUN), *ALONE} <= set(shown)
            metrics = {tag.partition("/")[0] for tag in shown}
            assert {"local_loss", "local_norm", "adam_m_norm", "adam_v_norm"} <= metrics

    def test_all_metrics_of_every_rank_are_in_the_log(self, job: Job) -> None:
        for rank, said in enumerate(job.said):
            lines = [line for line in said.splitlines() if f"[rank {rank}] step 3" in line]
            assert sum("; " in line and " s since the last step" in line for line in lines) == 1
            for metric in {*RUN, *ALONE, "local_loss", "local_norm"}:
                assert any(f" {metric} " in line for line in lines), metric

    def test_the_gradient_norm_is_the_same_on_both_ranks(self, job: Job) -> None:
        assert job.values(0, "grad-norm") == job.values(1, "grad-norm")

    def test_local_norms_differ_and_are_those_of_the_device(self, job: Job) -> None:
        norms = [job.values(rank, "device_local_norm") for rank in range(2)]
        assert norms[0] != norms[1]
        for rank in range(2):
            squares = [
                value**2 for tag, points in job.shown[rank].items() if tag.startswith("local_norm/") for _, value in points
            ]
            assert sum(squares) == pytest.approx(sum(norm**2 for norm in norms[rank]), rel=1e-5)

    def test_nothing_is_warned_of(self, job: Job) -> None:
        assert [line for said in job.said for line in said.splitlines() if line.startswith("[monitor] WARNING")] == []

    def test_what_was_there_before_is_kept(self, job: Job) -> None:
        assert (job.base / "board" / "rank_0" / "mine.txt").read_text() == "kept"


class TestLoop:
    def test_norms_and_losses_are_those_of_each_rank(self, loop: Job) -> None:
        for rank, told in enumerate(loop.told):
            for name in told["local_norms"][0]:
                expected = [step[name] for step in told["local_norms"]]
                assert loop.values(rank, f"local_norm/{name}") == pytest.approx(expected, rel=1e-5), name
            for micro_step in range(2):
                expected = [step[micro_step] for step in told["local_losses"]]
                assert loop.values(rank, f"local_loss/micro_step_{micro_step}") == pytest.approx(expected, rel=1e-5)
            assert loop.values(rank, "weight_norm") == pytest.approx(told["weights"], rel=1e-6)

    def test_the_gradient_norm_is_that_of_the_aggregated_gradient(self, loop: Job) -> None:
        assert loop.values(0, "grad-norm") == pytest.approx(loop.told[0]["grad_norms"], rel=1e-5)

    def test_experts_have_the_shares_that_their_counts_make(self, loop: Job) -> None:
        for rank, told in enumerate(loop.told):
            shares = [loop.values(rank, f"expert_load/gate/expert_{expert}") for expert in range(4)]
            for step, tokens in enumerate(told["tokens"]):
                assert [share[step] for share in shares] == pytest.approx([count / sum(tokens) for count in tokens], rel=1e-6)
                assert sum(share[step] for share in shares) == pytest.approx(1.0, rel=1e-6)

    def test_counts_of_the_ranks_add_up(self, loop: Job) -> None:
        by_rank = [told["tokens"] for told in loop.told]
        assert by_rank[0] != by_rank[1]
        assert combined(loop.base / "dump") == {
            step: {"gate": [a + b for a, b in zip(by_rank[0][step - 1], by_rank[1][step - 1], strict=True)]} for step in STEPS
        }


def test_the_trainer_of_transformers_tells_of_loss_and_norm(run: Run) -> None:
    job = run("huggingface")
    told = job.told[0]
    assert job.values(0, "grad-norm") == pytest.approx(told["grad_norm"], rel=1e-6)
    assert job.values(0, "loss") == pytest.approx(told["loss"], rel=1e-6)
    assert job.values(0, "learning-rate") == pytest.approx(told["learning_rate"], rel=1e-6)
    means = [sum(pair) / 2 for pair in zip(*(job.values(rank, "device_accum_local_loss") for rank in range(2)), strict=True)]
    assert means == pytest.approx(told["loss"], rel=1e-4)


def test_lightning_is_clipped_after_its_norm_was_read(run: Run) -> None:
    job = run("lightning")
    assert job.values(0, "grad-norm") == pytest.approx(job.told[0]["grad_norms"], rel=1e-3)
    for rank, told in enumerate(job.told):
        expected = [sum(told["local_losses"][2 * step : 2 * step + 2]) for step in range(3)]
        assert job.values(rank, "loss") == pytest.approx(expected, rel=1e-6)
        assert sum(
            value for tag, points in job.shown[rank].items() if "expert_" in tag for _, value in points
        ) == pytest.approx(3)


def test_what_is_left_at_the_end_is_written_when_the_interpreter_exits(tmp_path: Path, nursery: Nursery) -> None:
    (tmp_path / "train.yaml").write_text(YAML.format(base=tmp_path))
    launcher = Launcher(tmp_path, nursery)
    ended = launcher.start_interpreter(str(SCRIPT.with_name("metrics_left_open.py")), tmp_path / "train.yaml").end()
    assert launcher.clean_up() == ([], [])
    assert ended.status == 0, ended.err
    shown = scalars(tmp_path / "board" / "rank_0")
    for tag in ("loss", "grad-norm", "weight_norm"):
        assert [x for x, _ in shown[tag]] == STEPS, tag
