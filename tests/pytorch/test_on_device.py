"""Training on an accelerator: the same bits, the right numbers, and no wait. Without an accelerator all of this is left out.

``pytest --device cuda tests/pytorch`` runs the other tests of this folder there, too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from observing import small_gpt, tokens
from test_same_bits import assert_same
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from watching import EVERYTHING, Output, Row, attached
from ways import IN_PYTHON, WAYS, use

pytestmark = pytest.mark.accelerator

STEPS = 4
MICRO_STEPS = 2
KINDS = ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")
RECORDED: dict[str, Any] = {
    **EVERYTHING,
    "ops": [*EVERYTHING["ops"], "magnitude_histogram"],
    "monitor_mbs_grad": True,
    "update_ratio": True,
    "mg_direction": True,
    "ur_distribution": True,
    "format": ["csv", "parquet"],
    "recording_l2_features": True,
    "l2_targets": {"linear_hook": [], "activation_hook": ["h.0", "h.1.mlp.1"]},
    "dead_after_steps": 1,
}

Place = tuple[str, str, int, int | None]
Called = Callable[[Tensor], Tensor]
Wrap = Callable[[nn.Module], Called]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_rank(tmp_path: Path, device: torch.device) -> Iterator[None]:
    """The process group of a job of one rank, with the backend of the device."""
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(
    device: torch.device,
    output: Output | None,
    wrap: Wrap = lambda model: model,
    dtype: torch.dtype = torch.float32,
    optimizer_of: Callable[..., Optimizer] = torch.optim.AdamW,
    mixed: bool = False,
    recorded: dict[str, Any] = RECORDED,
) -> dict[str, Any]:
    """Losses, weights and moments of a few steps of a small GPT, monitored if there is an ``output``."""
    torch.manual_seed(0)
    model = small_gpt().to(device, dtype)
    called = wrap(model)
    in_place = wrap is in_graphs  # what a graph has computed is overwritten: gradients need memory of their own
    for p in model.parameters() if in_place else ():
        p.grad = torch.zeros_like(p)
    optimizer = optimizer_of(model.parameters(), lr=0.01)
    losses = []
    with nullcontext() if output is None else attached(output, model, optimizer, MICRO_STEPS, **recorded):
        for step in range(STEPS):
            for micro_step in range(MICRO_STEPS):
                batch = (tokens() + step + micro_step).to(device) % 16
                with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
                    loss = called(batch).float().square().mean()
                loss.backward()
                losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=not in_place)
    return {"losses": losses, "weights": model.state_dict(), "moments": optimizer.state_dict()["state"]}


def rows_of(output: Output) -> dict[Place, Row]:
    directory = max(output.directories(), key=lambda path: path.stat().st_mtime_ns)
    found = {(kind, row.name, row.step, row.micro_step): row for kind in KINDS for row in output.rows(kind, directory)}
    return {place: row for place, row in found.items() if not place[1].endswith("dropout.input")}  # compiled code copies there


def eager(model: nn.Module) -> Called:
    return model


def checkpointed(model: nn.Module) -> Called:
    return lambda batch: torch.utils.checkpoint.checkpoint(model, batch, use_reentrant=False)


def traced(model: nn.Module) -> Called:
    """Compiled, but nothing is fused: an observed tensor cannot be fused away, so that the bits of fused code are its own."""
    return torch.compile(model, backend="aot_eager")


def compiled(model: nn.Module) -> Called:
    return torch.compile(model)


def in_graphs(model: nn.Module) -> Called:
    """Compiled, and captured as work that the device repeats by itself."""
    code = torch.compile(model, mode="reduce-overhead")

    def called(batch: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        result: Tensor = code(batch)
        return result

    return called


def in_another_stream(model: nn.Module) -> Called:
    stream = torch.Stream()

    def called(batch: Tensor) -> Tensor:
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            result: Tensor = model(batch)
        torch.accelerator.current_stream().wait_stream(stream)
        return result

    return called


UNFUSED = (eager, checkpointed, traced, in_another_stream)
OPTIMIZERS = {
    "foreach": {"foreach": True}, "fused": {"fused": True}, "capturable": {"capturable": True}, "for loop": {"foreach": False},
}  # fmt: skip


def made(options: dict[str, bool]) -> Callable[..., Optimizer]:
    return lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, **options)


@pytest.mark.parametrize("wrap", UNFUSED)
def test_training_is_the_same_bit_for_bit(wrap: Wrap, device: torch.device, output: Output) -> None:
    unmonitored = trained(device, None, wrap)
    torch._dynamo.reset()
    assert_same(unmonitored, trained(device, output, wrap))

    kinds = {kind for kind, *_ in rows_of(output)}
    assert kinds == set(KINDS)


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_implementation_of_the_optimizer_trains_the_same(
    options: dict[str, bool], device: torch.device, output: Output
) -> None:
    assert_same(trained(device, None, optimizer_of=made(options)), trained(device, output, optimizer_of=made(options)))


def test_mixed_precision_trains_the_same(device: torch.device, output: Output) -> None:
    assert_same(trained(device, None, mixed=True), trained(device, output, mixed=True))


@pytest.mark.parametrize("wrap", [*UNFUSED, compiled, in_graphs])
def test_rows_are_those_of_the_host_in_float64(wrap: Wrap, device: torch.device, output: Output) -> None:
    trained(torch.device("cpu"), output, dtype=torch.float64, recorded=EVERYTHING)
    expected = rows_of(output)

    trained(device, output, wrap, dtype=torch.float64, recorded=EVERYTHING)
    found = rows_of(output)

    assert sorted(found.keys() - expected.keys()) == []
    missing = sorted(expected.keys() - found.keys(), key=str)
    assert wrap is in_graphs or missing == []
    assert [place for place in missing if place[2] > 1] == []  # what a capture meets first has no row in the steps before
    for place, row in found.items():
        assert row.values == pytest.approx(expected[place].values, rel=1e-7, abs=1e-9), place


@pytest.mark.parametrize("wrap", [eager, in_another_stream])
def test_rows_are_the_same_in_both_ways(wrap: Wrap, device: torch.device, output: Output) -> None:
    found = {}
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            use(way, patch)
            trained(device, output, wrap)
        found[way] = rows_of(output)
    assert repr(found["in C"]) == repr(found[IN_PYTHON])


def test_no_step_waits_for_the_device(device: torch.device, output: Output) -> None:
    module = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        pytest.skip("torch does not tell of waits for this device")
    model = small_gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = tokens().to(device)

    def step() -> None:
        for _ in range(MICRO_STEPS):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with attached(output, model, optimizer, MICRO_STEPS, **RECORDED):
        for _ in range(3):
            step()
        module.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                step()
        finally:
            module.set_sync_debug_mode("default")
    assert {step for _, _, step, _ in rows_of(output)} == set(range(8))


def test_memory_of_the_device_is_given_back(device: torch.device, output: Output) -> None:
    used = []
    for _ in range(3):
        trained(device, output)
        gc.collect()
        torch.accelerator.synchronize()
        used.append(torch.accelerator.memory_allocated(device))
    assert used[0] == used[1] == used[2]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_a_rank_of_a_job_trains_the_same(wrap: Wrap, device: torch.device, output: Output) -> None:
    """And what it sends is recorded."""
    recorded = {**EVERYTHING, "cc_distribution": {"enable": True, "cc_pre_hook": True}}
    assert_same(trained(device, None, wrap), trained(device, output, wrap, recorded=recorded))

    assert {kind for kind, *_ in rows_of(output)} >= {"actv", "grad_reduced", "param_updated"}
