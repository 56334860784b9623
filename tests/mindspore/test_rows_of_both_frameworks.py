"""A network written in PyTorch and in MindSpore, with the same weights and data, has the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from attaching import attached
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim
from reading_back import Output
from typer.testing import CliRunner
from watching_cells import batch, drawn, written

from monitor.cli import app
from monitor.pytorch import TrainerMon as TorchsTrainerMon
from monitor.sinks.hdf5 import read_hdf5

CONFIG: dict[str, Any] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "monitor_mbs_grad": True,
    "mv_distribution": True,
    "param_distribution": True,
    "update_ratio": True,
    "mg_direction": True,
    "ur_distribution": True,
    "recording_l2_features": True,
    "l2_targets": {
        "linear_hook": [],
        "moe_router_weight_hook": ["block.b"],
        "moe_router_logit_hook": ["block.b"],
        "activation_hook": ["block.a", "block.act"],
    },
    "dead_after_steps": 2,
    "ops": ["min", "max", "mean", "norm", "std", "zeros", "nans", "infs", "absmax", "shape"],
    "ndigits": 12,
    "format": ["csv", "hdf5"],
}
KINDS = {
    "actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq",
    "max_exp_avg_sq", "update_ratio", "other", "adam_update", "adam_ratio", "linear_hook", "moe_router_weight_hook",
    "moe_router_logit_hook", "activation_hook",
}  # fmt: skip
STEPS, MICRO_STEPS = 4, 2
BETAS = (0.75, 0.96875)  # MindSpore's optimizers compute 1 - beta in float32, which of these is exact
SHAPES = {
    "first.weight": (8, 4),
    "block.a.weight": (8, 8),
    "block.a.bias": (8,),
    "block.b.weight": (2, 8),
    "block.b.bias": (2,),
}


class TorchBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.act(self.a(x) + x)
        return self.b(y) * scale, y


class TorchNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = torch.nn.Linear(4, 8, bias=False), TorchBlock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, skipped = self.block(self.first(x), scale=torch.tensor(0.5))
        return y + skipped.mean()


class MindSporeBlock(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Dense(8, 8), nn.ReLU(), nn.Dense(8, 2)

    def construct(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = self.act(self.a(x) + x)
        return self.b(y) * scale, y


class MindSporeNet(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Dense(4, 8, has_bias=False), MindSporeBlock()

    def construct(self, x: Tensor) -> Tensor:
        y, skipped = self.block(self.first(x), scale=Tensor(0.5, ms.float32))
        return y + skipped.mean()


def weights() -> dict[str, np.ndarray]:
    return {name: drawn(place, *shape) for place, (name, shape) in enumerate(SHAPES.items())}


def trained_with_torch(output: Output) -> None:
    model = TorchNet()
    model.load_state_dict({name: torch.from_numpy(x.copy()) for name, x in weights().items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=BETAS, weight_decay=0.01, eps=0.01, amsgrad=True)
    with TorchsTrainerMon(written(output, **CONFIG), params_have_main_grad=False) as monitor:
        monitor.set_monitor(model, MICRO_STEPS, optimizer)
        for step in range(STEPS):
            for micro_step in range(MICRO_STEPS):
                x, y = map(torch.from_numpy, batch(step * MICRO_STEPS + micro_step))
                (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def trained_with_mindspore(output: Output) -> None:
    net = MindSporeNet().set_train(True)
    for name, parameter in net.parameters_and_names():
        parameter.set_data(Tensor(weights()[name]))
    optimizer = optim.AdamW(net.trainable_params(), lr=0.01, betas=BETAS, weight_decay=0.01, eps=0.01, amsgrad=True)
    gradients_of = ms.grad(lambda x, y: ops.square(net(x) - y).mean(), None, optimizer.parameters)
    with attached(output, net, optimizer, MICRO_STEPS, **CONFIG):
        for step in range(STEPS):
            summed: list[Tensor] = []
            for micro_step in range(MICRO_STEPS):
                found = gradients_of(*map(Tensor, batch(step * MICRO_STEPS + micro_step)))
                summed = [a + b for a, b in zip(summed, found, strict=True)] if summed else list(found)
            optimizer(tuple(summed))


def histograms_of(output: Output) -> dict[tuple[str, str, int], list[int]]:
    """Of what Adam makes of its moments."""
    (path,) = output.directory().glob("*.h5")
    kinds = ("adam_update", "adam_ratio")
    return {(k, row["name"], row["step"]): row["histogram"] for k in kinds for row in read_hdf5(path, kinds=[k]).to_pylist()}


def rows_of(output: Output) -> dict[str, dict[tuple[str, int, int | None], dict[str, Any]]]:
    found: dict[str, dict[tuple[str, int, int | None], dict[str, Any]]] = {}
    for kind in sorted({path.stem.rpartition("_")[0] for path in output.directory().glob("*.csv")}):
        rows = output.rows(kind)
        found[kind] = {(row.name, row.step, row.micro_step): row.values for row in rows}
        assert len(found[kind]) == len(rows)
    return found


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Where PyTorch recorded, and where MindSpore did."""
    found = []
    for train in (trained_with_torch, trained_with_mindspore):
        base: Path = tmp_path_factory.mktemp("both") / "out"
        base.mkdir()
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("MONITOR_OUTPUT_DIR", str(base))
            train(Output(base))
        found.append(base)
    return found


@pytest.fixture(scope="module")
def both(bases: list[Path]) -> tuple[Any, Any]:
    """The rows of PyTorch, and those of MindSpore."""
    of_torch, of_mindspore = ((rows_of(Output(base)), histograms_of(Output(base))) for base in bases)
    return of_torch, of_mindspore


def test_both_have_rows_of_every_kind(both: tuple[Any, Any]) -> None:
    assert set(both[0][0]) == set(both[1][0]) == KINDS


@pytest.mark.parametrize("kind", sorted(KINDS - {"grad_unreduced"}))
def test_the_rows_of_a_kind_are_the_same_in_both(both: tuple[Any, Any], kind: str) -> None:
    of_torch, of_mindspore = (rows[kind] for rows, _ in both)
    assert set(of_mindspore) == set(of_torch)
    for place, values in of_torch.items():
        assert set(of_mindspore[place]) == set(values)
        for op, value in values.items():
            other = of_mindspore[place][op]
            assert other == value or other == pytest.approx(value, rel=1e-5, abs=1e-5), (place, op)


def test_gradients_of_micro_batches_add_up_in_pytorch_and_are_each_its_own_in_mindspore(both: tuple[Any, Any]) -> None:
    of_torch, of_mindspore = (rows["grad_unreduced"] for rows, _ in both)
    assert set(of_mindspore) == set(of_torch)
    for (name, step, micro_step), values in of_torch.items():
        means = [of_mindspore[name, step, one]["mean"] for one in range((micro_step or 0) + 1)]
        assert sum(means) == pytest.approx(values["mean"], rel=1e-5, abs=1e-6)


def test_histograms_of_updates_are_the_same_in_both_but_for_what_lies_on_an_edge(both: tuple[Any, Any]) -> None:
    (_, of_torch), (_, of_mindspore) = both
    assert set(of_mindspore) == set(of_torch)
    assert len(of_torch) == 2 * len(SHAPES) * STEPS
    for place, counts in of_torch.items():
        if place[0] == "adam_ratio" and place[2] == 0:
            continue  # all of them 1 or -1, on an edge
        moved = np.abs(np.cumsum(np.array(counts) - np.array(of_mindspore[place])))
        assert moved.max() <= 1, place


@pytest.mark.parametrize("how", [(), ("--whole",)])
def test_the_comparison_finds_both_the_same(bases: list[Path], how: tuple[str, ...]) -> None:
    outcome = CliRunner().invoke(app, ["compare", *how, *map(str, bases)], env={"COLUMNS": "300"})
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output.startswith("the same: ")
    assert "only the first is compared" in outcome.output
