"""Training metrics of models that are cut over two ranks: those of the model in one piece, or none, which is said."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
from shown import EVERYTHING, Points, TrainRanks, scalars

from monitor.recording.parameters import AGGREGATED_EARLY, NOT_ACCUMULATED
from monitor.training.norms import NOT_WHOLE
from monitor.training.reporting import NO_LOCAL_NORMS, NOT_HERE

STEPS = [1, 2, 3]
WHOLE = ["early", "zero0"]
CUT = ["fsdp1", "fsdp2", "zero1", "zero2", "zero3"]
TOLD = ["fsdp1+told", "fsdp2+told", "zero1+told", "zero3+told"]
OF_LAST_MICRO_BATCH = {
    "early": AGGREGATED_EARLY,
    "zero2": NOT_ACCUMULATED,
    "zero3": NOT_ACCUMULATED,
    "zero3+told": NOT_ACCUMULATED,
}
UNSCALED = [*WHOLE, *CUT, *TOLD]
FLOPS = 5520.0
"""Forward, and as many again for the weights and, of the second layer, for the inputs; two micro-batches of four rows."""


class Case(NamedTuple):
    """What each rank knows of a training in one piece, and what it has in TensorBoard of the one that is cut."""

    told: list[dict[str, Any]]
    shown: list[dict[str, Points]]

    def values(self, rank: int, tag: str, steps: list[int] = STEPS) -> list[float]:
        points = self.shown[rank][tag]
        assert [x for x, _ in points] == steps
        return [value for _, value in points]

    def warnings(self, rank: int) -> list[str]:
        return [line.removeprefix(f"[rank {rank}] ") for line in self.told[rank]["said"]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, train_ranks: TrainRanks) -> dict[str, Case]:
    base = tmp_path_factory.mktemp("job")
    (base / "template.yaml").write_text(EVERYTHING)
    names = [*UNSCALED, "zero1-fp16"]
    told, _ = train_ranks(base, "metrics_of_shards.py", base, *names, preload="deepspeed")
    return {
        name: Case(
            [one[name] for one in told],
            [scalars(base / f"{name}-{rank}" / "board" / f"rank_{rank}") for rank in range(2)],
        )
        for name in names
    }


@pytest.mark.parametrize("name", UNSCALED)
def test_losses_and_the_learning_rate_are_shown(cases: dict[str, Case], name: str) -> None:
    for rank, told in enumerate(cases[name].told):
        for micro_step in range(2):
            expected = [losses[micro_step] for losses in told["local_losses"]]
            assert cases[name].values(rank, f"local_loss/micro_step_{micro_step}") == pytest.approx(expected, rel=1e-4)
        assert cases[name].values(rank, "learning-rate") == pytest.approx([0.01] * 3)


@pytest.mark.parametrize("name", [name for name in UNSCALED if name not in OF_LAST_MICRO_BATCH])
def test_local_norms_are_those_of_the_gradients_of_each_rank(cases: dict[str, Case], name: str) -> None:
    for rank, told in enumerate(cases[name].told):
        for parameter in told["local_norms"][0]:
            expected = [step[parameter] for step in told["local_norms"]]
            assert cases[name].values(rank, f"local_norm/{parameter}") == pytest.approx(expected, rel=1e-4)
        totals = [math.hypot(*step.values()) for step in told["local_norms"]]
        assert cases[name].values(rank, "device_local_norm") == pytest.approx(totals, rel=1e-4)


@pytest.mark.parametrize("name", OF_LAST_MICRO_BATCH)
def test_where_gradients_are_taken_away_after_each_micro_batch_local_norms_are_not_shown(
    cases: dict[str, Case], name: str
) -> None:
    for rank in range(2):
        assert not [tag for tag in cases[name].shown[rank] if "local_norm" in tag]
        assert cases[name].warnings(rank).count(f"{NO_LOCAL_NORMS} {OF_LAST_MICRO_BATCH[name]}.") == 1


@pytest.mark.parametrize("name", [*WHOLE, *TOLD])
def test_the_gradient_norm_is_the_global_one_where_it_is_given_or_every_rank_has_it(cases: dict[str, Case], name: str) -> None:
    for rank in range(2):
        assert cases[name].values(rank, "grad-norm") == pytest.approx(cases[name].told[0]["grad_norms"], rel=1e-4)
        assert NOT_HERE not in cases[name].warnings(rank)


@pytest.mark.parametrize("name", CUT)
def test_a_gradient_norm_that_no_rank_has_is_not_shown_which_is_said_once(cases: dict[str, Case], name: str) -> None:
    for rank in range(2):
        assert "grad-norm" not in cases[name].shown[rank]
        assert cases[name].warnings(rank).count(NOT_HERE) == 1


@pytest.mark.parametrize("name", WHOLE)
def test_the_norm_of_weights_is_shown_where_the_rank_has_all(cases: dict[str, Case], name: str) -> None:
    for rank, told in enumerate(cases[name].told):
        assert cases[name].values(rank, "weight_norm") == pytest.approx(told["weights"], rel=1e-5)
        assert NOT_WHOLE not in cases[name].warnings(rank)


@pytest.mark.parametrize("name", [*CUT, *TOLD])
def test_the_norm_of_parts_of_weights_is_not_shown_which_is_said_once(cases: dict[str, Case], name: str) -> None:
    for rank in range(2):
        assert "weight_norm" not in cases[name].shown[rank]
        assert cases[name].warnings(rank).count(NOT_WHOLE) == 1


@pytest.mark.parametrize("name", UNSCALED)
def test_moments_of_the_ranks_together_are_those_of_the_whole(cases: dict[str, Case], name: str) -> None:
    alike = 2 if name in WHOLE else 1
    for metric, kept in (("adam_m_norm", "first_moments"), ("adam_v_norm", "second_moments")):
        for parameter in cases[name].told[0]["local_norms"][0]:
            tag = f"{metric}/{parameter}"
            parts = [cases[name].values(rank, tag, [1, 2]) for rank in range(2) if tag in cases[name].shown[rank]]
            found = [math.hypot(*of_ranks) / math.sqrt(alike) for of_ranks in zip(*parts, strict=True)]
            assert found == pytest.approx([step[parameter] for step in cases[name].told[0][kept][:2]], rel=1e-3), tag


@pytest.mark.parametrize("name", UNSCALED)
def test_flops_are_those_of_the_products_of_this_rank(cases: dict[str, Case], name: str) -> None:
    rates = cases[name].values(0, "model-flops-throughput-per-npu")
    times = cases[name].values(0, "iteration-time")
    assert [rate * time * 1e12 for rate, time in zip(rates, times, strict=True)] == pytest.approx([FLOPS] * 3, rel=1e-3)


class TestOverflow:
    """The second of three steps of ZeRO 1 in float16."""

    def test_the_loss_scale_is_that_of_the_step(self, cases: dict[str, Case]) -> None:
        assert cases["zero1-fp16"].values(0, "loss-scale") == [256.0, 256.0, 128.0]

    def test_norms_around_it_are_those_without_a_scale(self, cases: dict[str, Case]) -> None:
        case = cases["zero1-fp16"]
        for rank, told in enumerate(case.told):
            before, within, after = case.values(rank, "device_local_norm")
            assert [before, after] == pytest.approx([math.hypot(*step.values()) for step in told["local_norms"]], rel=1e-2)
            assert not math.isfinite(within)

    def test_that_the_step_is_skipped_is_in_the_log(self, cases: dict[str, Case]) -> None:
        (said,) = (line for line in cases["zero1-fp16"].warnings(0) if line.startswith("step 2:"))
        assert said.endswith("the optimizer skipped the step")
