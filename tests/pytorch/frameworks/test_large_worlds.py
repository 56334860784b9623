"""Jobs of many ranks, played rank by rank in one process: between them their files hold every number exactly once.

The process group is a fake, in which collectives move nothing; everything of the monitor is real.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from evidence import PROVES, sampled
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from watching import Output, Row

from monitor.coordinator.manifest_format import ManifestRecord, Recordings, read_manifest
from monitor.coordinator.series_file import MeasuredSeries, read_series
from monitor.pytorch import TrainerMon
from monitor.recording import trainer_mon

AFTER_REDUCTION = ["grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq"]
OF_PARAMETERS = ["grad_unreduced", *AFTER_REDUCTION]
EVERYTHING: dict[str, Any] = {
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "xy_distribution": True,
    "ops": ["norm"],
    "ndigits": 12,
    "step_count_per_record": 2,
}
WIDTH, LAYERS_A_STAGE = 4, 2


@dataclass(frozen=True)
class Grid:
    """A job whose ranks stand as Megatron lays them out: tensor-parallel ones side by side, pipeline stages furthest apart."""

    dp: int
    tp: int
    pp: int

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    def at(self, rank: int) -> tuple[int, int, int]:
        """The places of a rank in its data-, tensor- and pipeline-parallel groups."""
        return rank // self.tp % self.dp, rank % self.tp, rank // (self.tp * self.dp)

    def group(self, rank: int, role: str) -> list[int]:
        size, stride = {"dp": (self.dp, self.tp), "tp": (self.tp, 1), "pp": (self.pp, self.tp * self.dp)}[role]
        first = rank - rank // stride % size * stride
        return [first + stride * place for place in range(size)]


GRID = Grid(dp=4, tp=4, pp=4) if PROVES else Grid(dp=2, tp=2, pp=4)
"""Of ``world``."""


class Layer(nn.Module):
    """Two linear maps, the first cut by rows and the second by columns, behind a norm that every rank has whole."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH // tp or 1), nn.Linear(2 * WIDTH // tp or 1, WIDTH)
        for p in (self.first.weight, self.first.bias, self.second.weight):
            p.tensor_model_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.norm(x)))


class Stage(nn.Module):
    def __init__(self, grid: Grid, rank: int) -> None:
        super().__init__()
        _, tensor, stage = grid.at(rank)
        numbers = range(stage * LAYERS_A_STAGE, (stage + 1) * LAYERS_A_STAGE)
        self.layers = nn.ModuleDict({str(number): Layer(grid.tp) for number in numbers})
        for name, p in self.named_parameters():
            own = tensor if is_split(name) else "all"
            with torch.no_grad():
                p.normal_(generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {own}".encode())))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def is_split(name: str) -> bool:
    return "first" in name or name.endswith("second.weight")


class Part(NamedTuple):
    """What one rank, or several alike, hold of a parameter.

    Attributes:
        tensor: Place in the tensor-parallel group; None for what all of them hold alike.
        data: Place in the data-parallel group, the same way.
    """

    name: str
    tensor: int | None
    data: int | None


class World:
    """What the ranks of a job wrote."""

    def __init__(self, grid: Grid, output: Output, said: list[str]) -> None:
        self.grid = grid
        self.said = said
        self.directories = {int(path.name.split("-rank")[1].split("-")[0]): path for path in output.directories()}
        self._output = output

    def manifest(self, rank: int) -> ManifestRecord:
        return read_manifest(self.directories[rank] / "manifest.json")

    def series(self, rank: int) -> dict[tuple[str, str], MeasuredSeries]:
        return {(one.series.kind, one.series.name): one for one in read_series(self.directories[rank], self.manifest(rank))}

    def rows_of(self, kind: str, rank: int) -> list[Row]:
        return self._output.rows(kind, self.directories[rank])

    def rows(self, kind: str, step: int = 1) -> list[tuple[int, Row]]:
        """Of all ranks, each with its rank."""
        return [(rank, row) for rank in self.directories for row in self.rows_of(kind, rank) if row.step == step]

    def part(self, kind: str, rank: int, name: str) -> Part:
        data, tensor, _ = self.grid.at(rank)
        return Part(name, tensor if is_split(name) else None, data if kind == "grad_unreduced" else None)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share out four numbers cost more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def one_rank(rank: int, world: int, store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a rank of a job for a while, and has not called ``set_monitor`` before."""
    monkeypatch.setattr(trainer_mon, "RECORDINGS", Recordings())
    dist.init_process_group("fake", rank=rank, world_size=world, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def play(
    directory: Path,
    grid: Grid,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    trained: Callable[[TrainerMon, int], None],
    **config: Any,
) -> None:
    """Each rank in turn attaches a monitor to its part of the model, and hands it to ``trained`` after each step."""
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "out").mkdir()
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(directory / "out"))
    store = dist.HashStore()
    for rank in range(grid.world):
        with one_rank(rank, grid.world, store, monkeypatch):
            groups = {role: dist.new_group(grid.group(rank, role)) for role in ("dp", "tp", "pp")}
            model = Stage(grid, rank)
            optimizer = torch.optim.Adam(model.parameters())
            with TrainerMon(directory / "config.json", groups["pp"], params_have_main_grad=False) as monitor:
                monitor.set_monitor(model, 1, optimizer, dp_group=groups["dp"], tp_group=groups["tp"])
                for _ in range(steps):
                    model(torch.ones(2, WIDTH)).square().sum().backward()
                    for p in model.parameters():
                        dist.all_reduce(p.grad, group=groups["dp"])
                    optimizer.step()
                    trained(monitor, rank)
                    optimizer.zero_grad()


def written(directory: Path, grid: Grid, caplog: Callable[[], list[str]], **config: Any) -> World:
    with pytest.MonkeyPatch.context() as monkeypatch:
        play(directory, grid, monkeypatch, 2, lambda *_: None, **EVERYTHING | config)
    return World(grid, Output(directory / "out"), caplog())


@pytest.fixture(scope="module")
def told() -> Iterator[list[str]]:
    """What the monitor logs while the tests of this module run."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("monitor")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, told: list[str]) -> World:
    """All of its ranks are monitored."""
    return written(tmp_path_factory.mktemp("all"), GRID, told.copy)


def expected_parts(grid: Grid, kind: str, monitored: range | list[int]) -> dict[Part, int]:
    """Every part that there is on a monitored rank, and the first of the ranks that hold it."""
    found: dict[Part, int] = {}
    for rank in monitored:
        data, tensor, _ = grid.at(rank)
        for name, _ in Stage(grid, rank).named_parameters():
            part = Part(name, tensor if is_split(name) else None, data if kind == "grad_unreduced" else None)
            found.setdefault(part, rank)
    return found


@pytest.mark.parametrize("kind", OF_PARAMETERS)
def test_each_part_of_a_parameter_is_written_once_by_the_first_that_holds_it(world: World, kind: str) -> None:
    rows = [(world.part(kind, rank, row.name), rank) for rank, row in world.rows(kind)]
    assert sorted(expected_parts(world.grid, kind, range(GRID.world)).items(), key=str) == sorted(rows, key=str)


def test_activations_are_every_ranks_own(world: World) -> None:
    for kind in ("actv", "actv_grad"):
        counts = Counter(rank for rank, _ in world.rows(kind))
        assert counts.keys() == set(range(GRID.world))
        assert len(set(counts.values())) == 1


def test_the_norm_of_all_rows_of_weights_is_that_of_the_whole_model(world: World) -> None:
    parts: dict[Part, float] = {}
    for rank in range(GRID.world):
        for name, p in Stage(world.grid, rank).named_parameters():
            parts[world.part("param_origin", rank, name)] = float(p.detach().double().square().sum())
    recorded = sum(row.values["norm"] ** 2 for _, row in world.rows("param_origin", step=0))
    assert math.fsum(parts.values()) == pytest.approx(recorded, rel=1e-6)


def test_all_ranks_are_of_one_job_and_say_where_they_stand(world: World) -> None:
    manifests = [world.manifest(rank) for rank in range(GRID.world)]
    assert len({(one.job_id, one.timestamp) for one in manifests}) == 1
    for rank, one in enumerate(manifests):
        assert one.groups == {role: tuple(world.grid.group(rank, role)) for role in ("dp", "tp", "pp")}
        assert one.pipeline is not None
        assert one.pipeline.stages == (world.grid.at(rank)[2],)


def test_placements_name_the_ranks_that_hold_the_same(world: World) -> None:
    grid, series = world.grid, world.series(0)
    both = {t + d for t in grid.group(0, "tp") for d in grid.group(0, "dp")}
    of_all = series["grad_reduced", "layers.0.norm.weight"].placement.replicas
    assert (set(of_all), of_all) == (both, tuple(sorted(both)))
    assert series["grad_reduced", "layers.0.first.weight"].placement.replicas == tuple(grid.group(0, "dp"))
    assert series["grad_unreduced", "layers.0.norm.weight"].placement.replicas == tuple(grid.group(0, "tp"))
    assert series["grad_unreduced", "layers.0.first.weight"].placement.replicas == ()


def test_what_was_announced_at_the_start_is_what_is_written(world: World) -> None:
    """But for the inputs of the first module of each stage, whose gradients no one asks for."""
    (said,) = [message for message in world.said if "each collected step of this job" in message][:1]
    rows, series, ranks = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:row|series|rank)", said))
    found = [row for kind in (*OF_PARAMETERS, "actv", "actv_grad") for row in world.rows(kind)]
    no_gradient = GRID.world * len([".input", "layers.0.input", "layers.0.norm.input"])
    assert (rows - no_gradient, series - no_gradient, ranks) == (len(found), len(found), GRID.world)


@pytest.mark.parametrize("module_ranks", sampled([[63], [5, 2, 33, 21, 34], list(range(1, 64, 3))], 1), ids=len)
def test_of_some_monitored_ranks_the_first_that_holds_a_part_writes_it(
    tmp_path: Path, told: list[str], module_ranks: list[int]
) -> None:
    grid = Grid(dp=2, tp=4, pp=8)
    config = {"xy_distribution": False, "module_ranks": module_ranks}
    world = written(tmp_path, grid, told.copy, **config)
    assert world.directories.keys() == set(module_ranks)
    for kind in OF_PARAMETERS:
        rows = [(world.part(kind, rank, row.name), rank) for rank, row in world.rows(kind)]
        assert sorted(expected_parts(grid, kind, sorted(module_ranks)).items(), key=str) == sorted(rows, key=str)


@pytest.mark.parametrize("grid", sampled([Grid(dp=4, tp=2, pp=4), Grid(dp=16, tp=8, pp=8)]), ids=lambda grid: str(grid.world))
def test_of_up_to_1024_ranks_each_gradient_is_measured_once(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without files: what each rank measures is asked for."""
    found: dict[str, list[tuple[Part, int]]] = {"grad_reduced": [], "grad_unreduced": []}
    world = World(grid, Output(tmp_path), [])

    def trained(monitor: TrainerMon, rank: int) -> None:
        for tag in itertools.chain(*monitor.generate_wgrad_metrics()):
            name, _, kind = tag.removeprefix("0:").split("/")
            found[kind].append((world.part(kind, rank, name), rank))

    config = {"wg_distribution": True, "format": "api", "ops": ["norm"]}
    play(tmp_path, grid, monkeypatch, 1, trained, **config)
    for kind, measured in found.items():
        assert sorted(expected_parts(grid, kind, range(grid.world)).items(), key=str) == sorted(measured, key=str)


DATA, TENSOR = (16, 4) if PROVES else (5, 2)
"""The mesh."""


class Mlp(nn.Module):
    """Sizes that 16 ranks cannot share evenly, nor 5: some hold nothing of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def meshed(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Ranks that cut each parameter in two directions: tensor-parallel, and fully sharded over the data-parallel ranks."""
    directory = tmp_path_factory.mktemp("meshed")
    config = EVERYTHING | {"xy_distribution": False, "mv_distribution": False}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "out").mkdir()
    store = dist.HashStore()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(directory / "out"))
        for rank in range(DATA * TENSOR):
            with one_rank(rank, DATA * TENSOR, store, monkeypatch):
                step_of_a_meshed_rank(directory / "config.json")
    return World(Grid(DATA, TENSOR, 1), Output(directory / "out"), [])


def step_of_a_meshed_rank(config: Path) -> None:
    # Meshes compare equal whichever rank they were made on, and torch would take what it remembers of one for all.
    _clear_sharding_prop_cache()
    mesh = init_device_mesh("cpu", (DATA, TENSOR), mesh_dim_names=("dp", "tp"))
    model = Mlp()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(config, params_have_main_grad=False) as monitor:
        monitor.set_monitor(model, 1, optimizer, tp_group=mesh["tp"].get_group())
        model(torch.ones(2, 12)).sum().backward()
        optimizer.step()


def covered(meshed: World, kind: str, ranks: range) -> dict[str, Any]:
    """How often the rows of some ranks hold each element of each parameter."""
    found = {name: np.zeros(tuple(p.shape), np.int64) for name, p in Mlp().named_parameters()}
    for rank in ranks:
        series = meshed.series(rank)
        for row in meshed.rows_of(kind, rank):
            one = series[kind, row.name]
            assert one.layout is not None
            if 0 in one.layout.shape:
                continue
            offset = one.placement.shard.offset if one.placement.shard else (0,) * len(one.layout.shape)
            part = tuple(slice(at, at + size) for at, size in zip(offset, one.layout.shape, strict=True))
            found[row.name][part] += 1
    return found


@pytest.mark.parametrize("kind", ["grad_reduced", "param_origin", "param_updated"])
def test_of_parameters_that_ranks_share_out_in_two_directions_each_element_is_in_one_row(meshed: World, kind: str) -> None:
    assert {name: {1} for name, _ in Mlp().named_parameters()} == {
        name: set(times.flatten().tolist()) for name, times in covered(meshed, kind, range(DATA * TENSOR)).items()
    }


def test_of_local_gradients_each_element_is_in_one_row_of_each_tensor_parallel_group(meshed: World) -> None:
    for first in range(0, DATA * TENSOR, TENSOR):
        times = covered(meshed, "grad_unreduced", range(first, first + TENSOR))
        assert all((one == 1).all() for one in times.values())


def test_the_manifest_knows_the_mesh(meshed: World) -> None:
    for rank in (0, 6, DATA * TENSOR - 1):
        groups = meshed.manifest(rank).groups
        assert groups["tp"] == tuple(range(rank - rank % TENSOR, rank - rank % TENSOR + TENSOR))
        assert groups["dp"] == tuple(range(rank % TENSOR, DATA * TENSOR, TENSOR))
