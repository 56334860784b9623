"""``fully_shard``: every rank holds a part of every parameter, and the union of all files holds each number once."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import Job, shape_of, sum_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.testing._internal.distributed.fake_pg import FakeStore
from watching import Output, Row, attached

from monitor.recording.parameters import KEPT_BY, NOT_ACCUMULATED
from monitor.series import LOCAL, Placement, Shard

JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {"xy_distribution": True, "all_xy": True}),
    "kept": (2, {"xy_distribution": True, "all_xy": True}),
    "accumulated": (2, {}),
    "accumulated-bf16": (2, {"monitor_mbs_grad": True}),
    "every": (2, {"monitor_mbs_grad": True}),
    "short": (2, {}),
    "bf16": (2, {"ops": ["norm", "mean", "shape", "dtype"]}),
    "hsdp": (4, {}),
    "hsdp-late": (4, {}),
    "replicate": (2, {}),
    "ignored": (2, {}),
}
LAST_ALONE = NOT_ACCUMULATED + KEPT_BY.format(how="set_requires_gradient_sync(False)")
SHAPES = {
    "extra": (5,),
    "first.scale": (1,),
    "first.up.weight": (6, 4),
    "first.up.bias": (6,),
    "first.down.weight": (3, 6),
    "first.down.bias": (3,),
    "second.weight": (5, 3),
    "second.bias": (5,),
}
AFTER_REDUCTION = ("grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")

Ran = Callable[[str], Job]

every_job = pytest.mark.parametrize("how", list(JOBS))
close = partial(pytest.approx, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def ran(run_job: Callable[..., Job]) -> Ran:
    """The job of a name, run when it is first asked for."""

    def run(how: str) -> Job:
        ranks, config = JOBS[how]
        return run_job("fsdp2.py", ranks, how, **config)

    return cache(run)


def rows(job: Job, kind: str, rank: int, step: int, micro_step: int | None = None) -> dict[str, Row]:
    found = [row for row in job.rows(kind, rank) if (row.step, row.micro_step) == (step, micro_step)]
    assert len({row.name for row in found}) == len(found)
    return {row.name: row for row in found}


def sums(job: Job, kind: str, step: int, micro_step: int | None = None) -> list[dict[str, float]]:
    """The sum of the elements that each rank wrote of each parameter."""
    ranks = range(len(job.directories))
    return [{name: sum_of(row) for name, row in rows(job, kind, rank, step, micro_step).items()} for rank in ranks]


@every_job
def test_training_has_the_same_bits(ran: Ran, how: str) -> None:
    assert ran(how).plain == ran(how).monitored


@every_job
def test_nothing_is_warned_of(ran: Ran, how: str) -> None:
    assert ran(how).warnings == []


@every_job
@pytest.mark.parametrize("step", range(3))
def test_the_norm_of_all_reduced_gradients_is_what_clipping_reports(ran: Ran, how: str, step: int) -> None:
    assert ran(how).plain[0]["gradients"][step] == pytest.approx(ran(how).total_norm("grad_reduced", step), rel=1e-5)


@every_job
def test_each_rank_has_the_norm_that_clipping_reports_as_a_number_of_the_run(ran: Ran, how: str) -> None:
    job = ran(how)
    for rank in range(len(job.directories)):
        expected = [] if how == "ignored" else pytest.approx(job.plain[rank]["gradients"], rel=1e-5)
        for number in ("grad_norm", "grad_norm_clipped"):
            assert job.numbers(number, rank) == expected
        assert job.numbers("learning_rate.0", rank) == [0.01] * 3


@every_job
@pytest.mark.parametrize("step", range(3))
def test_the_norm_of_all_weights_is_that_of_the_gathered_model(ran: Ran, how: str, step: int) -> None:
    assert ran(how).plain[0]["before"][step] == pytest.approx(ran(how).total_norm("param_origin", step), rel=1e-5)
    assert ran(how).plain[0]["after"][step] == pytest.approx(ran(how).total_norm("param_updated", step), rel=1e-5)


@every_job
def test_the_norm_of_all_moments_is_that_of_the_gathered_optimizer(ran: Ran, how: str) -> None:
    for step in (1, 2):
        for kind, expected in zip(("exp_avg", "exp_avg_sq"), ran(how).plain[0]["moments"][step], strict=True):
            assert expected == pytest.approx(ran(how).total_norm(kind, step), rel=1e-5)


@every_job
def test_every_parameter_has_its_original_name(ran: Ran, how: str) -> None:
    micro_step = 1 if JOBS[how][1].get("monitor_mbs_grad") else None
    assert rows(ran(how), "grad_unreduced", 1, 2, micro_step).keys() == SHAPES.keys()
    for kind in AFTER_REDUCTION:
        assert {*rows(ran(how), kind, 0, 2), *rows(ran(how), kind, 1, 2)} == SHAPES.keys()


@pytest.mark.parametrize("how", ["plain", "kept", "accumulated", "short", "hsdp", "replicate"])
@pytest.mark.parametrize("step", range(3))
def test_local_gradients_average_to_the_reduced_one(ran: Ran, how: str, step: int) -> None:
    local, reduced = sums(ran(how), "grad_unreduced", step), sums(ran(how), "grad_reduced", step)
    for name in SHAPES:
        average = sum(rank[name] for rank in local) / len(local)
        assert average == close(sum(rank.get(name, 0.0) for rank in reduced))


def test_where_every_micro_batch_is_reduced_a_row_is_that_of_one_and_the_manifest_says_so(ran: Ran) -> None:
    job = ran("every")
    assert [job.manifest(rank).notes["grad_unreduced"] for rank in (0, 1)] == [LAST_ALONE] * 2
    first, second = (sums(job, "grad_unreduced", 1, micro_step) for micro_step in (0, 1))
    reduced = sums(job, "grad_reduced", 1)
    for name in SHAPES:
        both = sum(rank[name] for rank in (*first, *second)) / 2
        assert both == close(sum(rank[name] for rank in reduced))


def test_where_the_last_micro_batch_is_reduced_a_row_is_the_sum_and_there_is_no_note(ran: Ran) -> None:
    for how in ("accumulated", "short", "accumulated-bf16"):
        assert "grad_unreduced" not in ran(how).manifest(0).notes


def test_each_micro_batch_adds_to_the_row_before(ran: Ran) -> None:
    job = ran("accumulated-bf16")
    one, both = (sums(job, "grad_unreduced", 2, micro_step) for micro_step in (0, 1))
    reduced = sums(job, "grad_reduced", 2)
    for name in SHAPES:
        assert both[0][name] != one[0][name]
        average = sum(rank[name] for rank in both) / 2
        assert average == pytest.approx(sum(rank[name] for rank in reduced), rel=1e-4, abs=1e-4)


def test_local_gradients_are_in_the_dtype_of_the_backward_and_reduced_ones_in_that_of_the_parameter(ran: Ran) -> None:
    for kind, dtype in (
        ("grad_unreduced", "torch.bfloat16"),
        ("grad_reduced", "torch.float32"),
        ("param_origin", "torch.float32"),
    ):
        assert {row.values["dtype"] for row in ran("bf16").rows(kind, 0)} == {dtype}


def test_late_all_reduces_of_replicas_leave_the_last_micro_batch_alone_in_a_row(ran: Ran) -> None:
    assert ran("hsdp-late").manifest(3).notes["grad_unreduced"] == LAST_ALONE


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_has_its_own_shape_in_the_row_and_the_global_one_in_the_manifest_fault_21(ran: Ran, rank: int) -> None:
    for kind in AFTER_REDUCTION:
        for name, row in rows(ran("plain"), kind, rank, 2).items():
            length, *rest = SHAPES[name]
            first = -(-length // 2)
            held = first if rank == 0 else length - first
            offset = (rank * first, *(0 for _ in rest)) if held else ()
            assert shape_of(row) == (held, *rest)
            placement = Placement(shard=Shard((0, 1), SHAPES[name], offset))
            assert ran("plain").series(rank)[kind, name].placement == placement


def test_a_local_gradient_is_whole(ran: Ran) -> None:
    for rank in (0, 1):
        for name, row in rows(ran("plain"), "grad_unreduced", rank, 2).items():
            assert shape_of(row) == SHAPES[name]
            assert ran("plain").series(rank)["grad_unreduced", name].placement == LOCAL


def test_of_replicated_shards_the_first_rank_of_each_writes(ran: Ran) -> None:
    job = ran("hsdp")
    for kind in AFTER_REDUCTION:
        assert [bool(job.rows(kind, rank)) for rank in range(4)] == [True, True, False, False]
        placements = [job.series(rank)[kind, "first.up.weight"].placement for rank in (0, 1)]
        shards = [Shard((0, 1), (6, 4), offset) for offset in ((0, 0), (3, 0))]
        assert placements == [Placement(replicas=(0, 2), shard=shards[0]), Placement(replicas=(1, 3), shard=shards[1])]
    assert all(rows(job, "grad_unreduced", rank, 2).keys() == SHAPES.keys() for rank in range(4))


def test_the_manifest_has_the_groups_of_the_mesh(ran: Ran) -> None:
    assert ran("plain").manifest(1).groups == {"dp": (0, 1)}
    assert ran("kept").manifest(1).groups == {"dp": (0, 1)}
    assert ran("hsdp").manifest(3).groups == {"replicate": (1, 3), "shard": (2, 3)}


def test_a_parameter_that_is_not_managed_is_a_plain_one(ran: Ran) -> None:
    local = sum(rank["extra"] for rank in sums(ran("ignored"), "grad_unreduced", 2)) / 2
    assert local == close(sums(ran("ignored"), "grad_reduced", 2)[0]["extra"])
    assert "extra" not in rows(ran("ignored"), "grad_reduced", 1, 2)
    assert ran("ignored").series(0)["grad_reduced", "extra"].placement == Placement(replicas=(0, 1))


@pytest.mark.parametrize("how", ["plain", "kept"])
def test_activations_are_read_while_parameters_are_gathered(ran: Ran, how: str) -> None:
    for rank in (0, 1):
        found = [row.values["norm"] for row in ran(how).rows("actv", rank) if row.name == "first.output"]
        assert found == close(ran(how).plain[rank]["outputs"])
        gradients = {row.name for row in ran(how).rows("actv_grad", rank)}
        assert {"first.input", "first.up.output", "second.input", ".output"} - gradients == {"first.input"}  # it needs none


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, in which nothing moves."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


def small() -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def functions_of_torch() -> tuple[Any, Any]:
    return _fsdp_param_group.foreach_reduce, FSDPParam.to_accumulated_grad_if_needed


ORIGINAL = functions_of_torch()


@pytest.mark.usefixtures("alone")
class TestPatches:
    """Of torch's functions, which are called once with each gradient."""

    def test_they_are_gone_when_the_last_monitor_closes(self, output: Output) -> None:
        monitors = [attached(output, *small(), wg_distribution=True) for _ in range(2)]
        patched = functions_of_torch()
        monitors[0].close()
        assert functions_of_torch() == patched
        assert not set(patched) & set(ORIGINAL)
        monitors[1].close()
        assert functions_of_torch() == ORIGINAL

    def test_each_model_gets_its_own(self, output: Output) -> None:
        models = [small(), small()]
        monitors = [attached(output, *one, wg_distribution=True) for one in models]
        for model, optimizer in models[:1]:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        for monitor in monitors:
            monitor.close()
        assert sorted(len(output.rows("grad_unreduced", one)) for one in output.directories()) == [0, 4]

    def test_somebody_elses_later_patch_is_left_in_place(self, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizer = small()
        monitor = attached(output, model, optimizer, wg_distribution=True)
        ours = _fsdp_param_group.foreach_reduce

        def theirs(*args: Any, **named: Any) -> Any:
            return ours(*args, **named)

        monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", theirs)
        monitor.close()
        assert _fsdp_param_group.foreach_reduce is theirs
        model(torch.ones(1, 4)).sum().backward()
        assert model[0].weight.grad is not None
        monkeypatch.undo()
        _fsdp_param_group.foreach_reduce = ORIGINAL[0]

    def test_a_model_that_no_one_holds_is_collected_and_the_patches_with_it(self, output: Output) -> None:
        model, optimizer = small()
        monitor = attached(output, model, optimizer, wg_distribution=True, param_distribution=True)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        gone = [weakref.ref(one) for one in (model, optimizer, monitor, model[0].weight)]
        del model, optimizer, monitor
        deadline = time.monotonic() + 20  # a thread of the monitor or of torch may still be at work on the last step
        while any(one() is not None for one in gone) and time.monotonic() < deadline:
            gc.collect()
        assert [one() for one in gone] == [None] * 4
        assert functions_of_torch() == ORIGINAL

    def test_a_version_of_torch_that_is_not_known_is_refused(self, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", lambda _groups: None)
        with pytest.raises(ValueError, match=r"does not know how torch .* keeps the parameters of fully_shard"):
            attached(output, *small(), wg_distribution=True)

    def test_parameters_that_are_gathered_are_refused_until_they_are_back(self, output: Output) -> None:
        model, optimizer = small()
        model.unshard()
        with pytest.raises(ValueError, match=r"call reshard\(\)"):
            attached(output, model, optimizer, wg_distribution=True)
        model.reshard()
        attached(output, model, optimizer, wg_distribution=True).close()
