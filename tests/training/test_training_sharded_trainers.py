"""The Trainers of transformers and of Lightning with a model that FSDP2 or DeepSpeed cuts over two ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
from shown import EVERYTHING, Points, TrainRanks, scalars

from monitor.training.norms import NOT_WHOLE
from monitor.training.reporting import NO_LOCAL_NORMS


class Job(NamedTuple):
    """What each rank knows of its training, what it has in TensorBoard, and what the monitor has warned of."""

    told: list[dict[str, Any]]
    shown: list[dict[str, Points]]
    warnings: list[list[str]]


Run = Callable[[str], Job]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, train_ranks: TrainRanks) -> Run:
    @cache
    def run(how: str) -> Job:
        base = tmp_path_factory.mktemp(how)
        (base / "train.yaml").write_text(EVERYTHING.format(base=base))
        script = f"metrics_of_sharded_{'lightning' if how == 'lightning' else 'trainer'}.py"
        preload = "lightning" if how == "lightning" else "transformers"
        told, errors = train_ranks(base, script, how, base / "train.yaml", base, preload=preload)
        said = [[line for line in error.splitlines() if line.startswith("[monitor] WARNING")] for error in errors]
        return Job(told, [scalars(base / "board" / f"rank_{rank}") for rank in range(2)], said)

    return run


every_way = pytest.mark.parametrize("how", ["fsdp2", "zero2", "lightning"])
of_transformers = pytest.mark.parametrize("how", ["fsdp2", "zero2"])


@of_transformers
@pytest.mark.parametrize(("tag", "name"), [("loss", "loss"), ("grad-norm", "grad_norm")])
def test_what_the_trainer_logs_is_shown(run: Run, how: str, tag: str, name: str) -> None:
    for told, shown in zip(run(how).told, run(how).shown, strict=True):
        assert shown[tag] == [(step, pytest.approx(value)) for step, value in zip(told["step"], told[name], strict=True)]


@every_way
def test_parts_of_weights_are_no_weight_norm(run: Run, how: str) -> None:
    for shown, said in zip(run(how).shown, run(how).warnings, strict=True):
        assert "weight_norm" not in shown
        assert sum(NOT_WHOLE in line for line in said) == 1


@of_transformers
def test_every_step_has_its_moments_learning_rate_and_samples(run: Run, how: str) -> None:
    shown = run(how).shown
    tags = {tag for of_rank in shown for tag in of_rank if tag.startswith("adam_m_norm")}
    assert len(tags) == 16
    assert all([x for x, _ in of_rank[tag]] == [1, 2] for of_rank in shown for tag in tags if tag in of_rank)
    for of_rank in shown:
        assert [value for _, value in of_rank["learning-rate"]] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
        assert len({value for _, value in of_rank["batch-size"]}) == 1


def test_local_norms_are_those_of_gradients_before_they_are_aggregated(run: Run) -> None:
    for told, shown in zip(run("zero2").told, run("zero2").shown, strict=True):
        for name in told["local"][0]:
            expected = [step[name] for step in told["local"]]
            assert [value for _, value in shown[f"local_norm/{name}"]] == pytest.approx(expected, rel=1e-5)
        totals = [math.hypot(*step.values()) for step in told["local"]]
        assert [value for _, value in shown["device_local_norm"]] == pytest.approx(totals, rel=1e-5)


def test_of_several_micro_batches_they_are_not_shown(run: Run) -> None:
    job = run("fsdp2")
    assert not [tag for shown in job.shown for tag in shown if "local_norm" in tag]
    assert [sum(NO_LOCAL_NORMS in line for line in said) for said in job.warnings] == [1, 1]


def test_a_norm_that_ranks_have_to_meet_for_is_said_to_be_missing_where_nothing_is_logged(run: Run) -> None:
    from monitor.pytorch.training.huggingface import OF_LOGGED_STEPS  # importing it takes a second of each worker

    assert [sum(OF_LOGGED_STEPS in line for line in said) for said in run("fsdp2").warnings] == [1, 1]
    assert not [line for said in run("fsdp2").warnings for line in said if "failed" in line]


def test_lightning_has_local_norms_and_says_that_it_has_no_gradient_norm(run: Run) -> None:
    from monitor.pytorch.training.lightning import OF_PARTS

    job = run("lightning")
    for told, shown, said in zip(job.told, job.shown, job.warnings, strict=True):
        assert {name: shown[f"local_norm/{name}"][0] for name in told["first"]} == {
            name: (1, pytest.approx(expected, rel=1e-5)) for name, expected in told["first"].items()
        }
        assert [x for x, _ in shown["device_local_norm"]] == [1, 2, 3]
        assert "grad-norm" not in shown
        assert sum(OF_PARTS in line for line in said) == 1
        assert not [line for line in said if "failed" in line]
