"""Megatron-core: its core attention, its router and its linear layers have the features of their definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from jobs import Job

from monitor.recording.features.reading import PADDED
from monitor.series import Placement, Shard

ATTENTION, ROUTER = "decoder.layers.0.self_attention.core_attention", "decoder.layers.1.mlp.router"
FEATURES: dict[str, Any] = {
    "recording_l2_features": True,
    "l2_targets": {
        "attention_hook": [ATTENTION],
        "attention_head_hook": [ATTENTION],
        "linear_hook": [],
        "moe_router_weight_hook": [ROUTER],
        "moe_router_logit_hook": [ROUTER],
        "moe_router_load_hook": [ROUTER],
    },
    "sa_heads": 0,
    "sa_batch_rows": 0,
    "wg_distribution": False,
    "param_distribution": False,
    "mv_distribution": False,
}
HOWS = ("plain", "distributed", "tp", "capacity", "padded")


@pytest.fixture(scope="module")
def jobs(run_job: Callable[..., Job]) -> dict[str, Job]:
    """Each way as a job of its own; they have run in the same processes."""
    ran = run_job("megatron_features.py", 2, *HOWS, **FEATURES)
    return {how: replace(ran, base=ran.base / how, monitored=[rank[how] for rank in ran.monitored]) for how in HOWS}


@pytest.mark.parametrize("how", HOWS)
def test_core_attention_and_router_are_recorded_on_every_rank(jobs: dict[str, Job], how: str) -> None:
    for rank in range(2):
        told = jobs[how].monitored[rank]
        assert told["heads"] == ([2, 1] if how == "tp" else [4, 2])
        (attention,) = jobs[how].rows("attention_hook", rank)
        assert (attention.values["entropy"], attention.values["softmax_max"]) == pytest.approx(told["spread"], rel=1e-5)
        whole, *each = jobs[how].rows("attention_head_hook", rank)
        assert [row.name.rpartition(".heads.")[2] for row in each] == [str(head) for head in range(told["heads"][0])]
        assert whole.values["entropy"] == pytest.approx(told["spread"][0], rel=1e-5)
        assert whole.values["max_logit"] == max(row.values["max_logit"] for row in each)
        routers = [row.values["per_token_expert_entropy"] for row in jobs[how].rows("moe_router_logit_hook", rank)]
        assert routers == ([] if how == "tp" else [pytest.approx(told["entropy"], rel=1e-5)])


@pytest.mark.parametrize("how", HOWS)
def test_linear_layers_have_the_norms_that_their_forward_finds(jobs: dict[str, Job], how: str) -> None:
    job = jobs[how]
    writers = range(2) if how == "tp" else range(1)
    for rank in writers:
        expected = job.monitored[rank]["norms"]
        found = {row.name.removeprefix("module.").removesuffix(".linear"): row.values for row in job.rows("linear_hook", rank)}
        assert set(found) <= set(expected)
        assert {"decoder.layers.0.self_attention.linear_qkv", "output_layer", ROUTER} - set(found) <= {ROUTER}
        for name, values in found.items():
            assert values["kernel_norm"] == pytest.approx(expected[name][0], rel=5e-3)
    if how != "tp":
        assert job.rows("linear_hook", 1) == []


def test_what_is_cut_says_which_part_it_is_of(jobs: dict[str, Job]) -> None:
    series = jobs["tp"].series(0)
    cut = series["linear_hook", "module.decoder.layers.0.self_attention.linear_qkv.linear"].placement
    assert cut.shard is not None
    assert (cut.shard.ranks, cut.shard.flat) == ((0, 1), False)
    whole = jobs["distributed"].series(0)["linear_hook", "module.decoder.layers.0.self_attention.linear_qkv.linear"].placement
    assert whole == Placement(replicas=(0, 1))


@pytest.mark.parametrize("how", ["plain", "distributed", "capacity"])
def test_experts_have_the_tokens_of_the_map_that_the_router_returns(jobs: dict[str, Job], how: str) -> None:
    for rank in range(2):
        told = jobs[how].monitored[rank]
        router, *experts = jobs[how].rows("moe_router_load_hook", rank)
        assert [row.values["assigned"] for row in experts] == told["counts"]
        assert router.values["z_loss"] == pytest.approx(told["z_loss"], rel=1e-5)
        dropped = 1 - sum(told["counts"]) / told["asked"]
        assert router.values["dropped"] == (pytest.approx(dropped) if how == "capacity" else None)
        assert (dropped > 0) == (how == "capacity")
        placement = jobs[how].series(rank)["moe_router_load_hook", experts[0].name].placement
        assert placement == Placement(shard=Shard((0, 1), (4,)))


def test_a_map_that_is_padded_is_not_counted(jobs: dict[str, Job]) -> None:
    assert jobs["padded"].rows("moe_router_load_hook", 0) == []
    assert [said for said in jobs["padded"].warnings if PADDED in said]
