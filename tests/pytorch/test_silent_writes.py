"""A tensor that was changed without raising its version is read again under its next name."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from observing import seeded
from torch import Tensor, nn
from watching import Output, attached

WRITES: dict[str, Callable[[Tensor, int], object]] = {
    "all_reduce": lambda x, _: dist.all_reduce(x),
    "all_reduce, awaited": lambda x, _: dist.all_reduce(x, async_op=True).wait(),
    "broadcast": lambda x, _: dist.broadcast(x, 0),
    "reduce": lambda x, _: dist.reduce(x, 1),
    "scatter": lambda x, rank: dist.scatter(x, [x.clone() + 1, x.clone() + 2] if rank == 0 else None, src=0),
    "all_to_all_single": lambda x, _: dist.all_to_all_single(x, x.clone() * 3),
    "send and receive": lambda x, rank: dist.recv(x, 0) if rank else dist.send(x, 1),
    "isend and irecv": lambda x, rank: [
        one.wait() for one in dist.batch_isend_irecv([dist.P2POp(*((dist.irecv, x, 0) if rank else (dist.isend, x, 1)))])
    ],
}


ENDS: dict[str, Callable[[dist.Work], object]] = {
    "wait": lambda work: work.wait(),
    "wait of the future": lambda work: work.get_future().wait(),
    "wait of several futures": lambda work: torch.futures.wait_all([work.get_future()]),
    "wait of what follows": lambda work: work.get_future().then(bool).wait(),
    "polled": lambda work: until(work.is_completed),
    "future polled": lambda work: until(work.get_future().done),
}
"""The ways to learn that a call has ended."""


def until(ended: Callable[[], bool]) -> None:
    while not ended():
        time.sleep(0.001)


class Look(nn.Module):
    """Passes its input on while a collective writes to it, and is called once more when the collective has ended."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Parallel(nn.Module):
    """A layer of which each rank has a part. It changes what its own layer has returned, and returns that."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.write = write
        self.look = Look()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        with torch.no_grad():
            self.write(y)
        return y

    def look_and_end(self, end: Callable[[dist.Work], object], rank: int, looked: Path, x: Tensor) -> None:
        """Rank 1 takes part in the collective when rank 0 has looked."""
        if rank:
            until(looked.exists)
        work = dist.all_reduce(x, async_op=True)
        self.look(x)
        if not rank:
            looked.touch()
        assert work is not None
        end(work)


def norms(output: Output, model: nn.Module, x: Tensor) -> tuple[dict[str, float], float]:
    """The norms that were recorded, and that of the result."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = set(output.directories())
    with attached(output, model, optimizer, xy_distribution=True, all_xy=True, ops=["norm"], ndigits=17):
        result = model(x)
        result.square().sum().backward()
        optimizer.step()
    (directory,) = set(output.directories()) - before
    return {row.name: row.values["norm"] for row in output.rows("actv", directory)}, result.norm().item()


def run_rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    output = Output(Path(directory) / f"out{rank}")
    found = {}
    for name, write in WRITES.items():
        model = seeded(lambda write=write: Parallel(partial(write_by, write, rank)))
        found[name] = norms(output, model, torch.full((2, 4), 1.0 + rank, dtype=torch.float64))
    for name, end in ENDS.items():
        looks = seeded(lambda: Parallel(bool))
        looks.write = partial(looks.look_and_end, end, rank, Path(directory) / name)
        found[name] = norms(output, looks, torch.full((2, 4), 1.0 + rank, dtype=torch.float64))
    torch.save(found, Path(directory) / f"{rank}.pt")
    dist.destroy_process_group()


def write_by(write: Callable[[Tensor, int], object], rank: int, x: Tensor) -> None:
    write(x, rank)


Found = dict[str, tuple[dict[str, float], float]]
"""The recorded norms and the true one, by kind of write."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    directory = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        for rank in range(2):
            (directory / f"out{rank}").mkdir()
        torch.multiprocessing.start_processes(run_rank_recording, args=(str(directory),), nprocs=2, start_method="fork")
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(2)]


def run_rank_recording(rank: int, directory: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MONITOR_OUTPUT_DIR", f"{directory}/out{rank}")
        run_rank(rank, directory)


@pytest.mark.parametrize("name", WRITES)
def test_what_a_collective_has_written_is_in_the_next_row(name: str, found: list[Found]) -> None:
    changed = []
    for rank in found:
        recorded, result = rank[name]
        assert recorded[".output"] == pytest.approx(result, rel=1e-12)
        changed.append(recorded[".output"] != recorded["inner.output"])
    assert any(changed)


@pytest.mark.parametrize("name", ENDS)
def test_what_was_read_before_a_collective_has_ended_is_read_again(name: str, found: list[Found]) -> None:
    for rank in found:
        recorded, result = rank[name]
        assert recorded[".output"] == pytest.approx(result, rel=1e-12)
    recorded, _ = found[0][name]
    assert recorded["look.output"] != recorded[".output"]  # the other rank was late


def test_what_a_kernel_of_triton_has_written_is_in_the_next_row(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    kernel = object.__new__(jit.JITFunction)

    def run(_kernel: object, x: Tensor, **_: object) -> None:
        """Launches nothing here, where there is no device, but writes."""
        x.numpy()[:] = 7.0

    with monkeypatch.context() as patched:
        patched.setattr(jit.JITFunction, "run", run)
        recorded, result = norms(
            output, seeded(lambda: Parallel(lambda x: kernel.run(x.detach()))), torch.ones(2, 4, dtype=torch.float64)
        )
    assert recorded[".output"] == pytest.approx(result, rel=1e-12)


def test_what_is_unchanged_is_an_alias_and_nothing_stays_patched(output: Output) -> None:
    methods = {name: vars(dist.ProcessGroup)[name] for name in ("allreduce", "broadcast", "recv")}
    recorded, _ = norms(output, seeded(lambda: Parallel(lambda _: None)), torch.ones(2, 4, dtype=torch.float64))
    assert recorded[".output"] == recorded["inner.output"]
    assert {name: vars(dist.ProcessGroup)[name] for name in methods} == methods


def test_tensors_that_were_recorded_can_be_swapped_and_are_read_again(output: Output) -> None:
    model, kept = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Look())), list[Tensor]()
    model[0].register_forward_hook(lambda *given: kept.append(given[-1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, xy_distribution=True, all_xy=True, ops=["norm"], ndigits=17):
        x = torch.ones(2, 4, dtype=torch.float64)
        model(x).sum().backward()
        torch.utils.swap_tensors(x, torch.full_like(x, 3.0))
        torch.utils.swap_tensors(kept[0], torch.zeros_like(x))
        optimizer.step()
        model(x).sum().backward()
        optimizer.step()
    rows = {row.step: row.values["norm"] for row in output.rows("actv") if row.name == ".input"}
    assert rows == pytest.approx({0: 8**0.5, 1: 72**0.5})
