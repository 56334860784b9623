"""The health of activations of models that train: real transformers, planted faults, micro-steps, ranks and compiled parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from definitions import active_units, health
from observing import drawn
from small_transformers import inputs_of, made, tokens
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from watching import Output, attached, on_two_ranks, warnings_in

from monitor.merge.merge import Wanted, merge
from monitor.merge.outputs import read_merged
from monitor.recording.features import reading
from monitor.recording.features.reading import SHARDED_THERE

FORMAT: dict[str, Any] = {"recording_l2_features": True, "ndigits": 17, "ops": ["norm"]}
KIND = "activation_hook"
WITHOUT = "dead_units"


def watched(output: Output, model: nn.Module, *names: str, grad_acc_steps: int = 1, **config: Any) -> Any:
    parameters = [*model.parameters()] or [nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    config = {**FORMAT, "l2_targets": {KIND: list(names)}, **config}
    return attached(output, model, optimizer, grad_acc_steps, **config), optimizer


def rows(output: Output, directory: Path | None = None) -> dict[tuple[str, int, int | None], dict[str, float]]:
    """The numbers of each row, without empty cells."""
    return {
        (row.name, row.step, row.micro_step): {name: value for name, value in row.values.items() if value is not None}
        for row in output.rows(KIND, directory)
    }


def stepping(model: nn.Module, optimizer: Any, *inputs: Tensor) -> None:
    for x in inputs:
        model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# --- Models of transformers.

LAYERS = {
    "llama": "model.layers",
    "mixtral": "model.layers",
    "gpt2": "transformer.h",
    "bert": "bert.encoder.layer",
    "vit": "vit.layers",
    "t5": "decoder.block",
    "mamba": "backbone.layers",
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_of_a_transformer_have_the_numbers_of_their_hidden_states(
    output: Output, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    model, names = made(name), [f"{LAYERS[name]}.{number}" for number in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model.train(), optimizer, **FORMAT, l2_targets={KIND: names}):
        for module in map(model.get_submodule, names):
            module.register_forward_hook(lambda _module, _args, result: kept.append(_first(result).detach().clone()))
        kept: list[Tensor] = []
        model(**inputs_of(name))[0].square().mean().backward()
        optimizer.step()
    found = rows(output)
    assert [*found] == [(f"{name}.activation", 0, 0) for name in names]
    for values, hidden in zip(found.values(), kept, strict=True):
        assert hidden.shape[-1] == 32
        assert values == pytest.approx(health(hidden), rel=1e-5)
    assert [one.getMessage() for one in caplog.records if (one.name, one.levelname) == ("monitor", "WARNING")] == []


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def test_hidden_states_of_a_llama_are_those_that_it_returns(output: Output) -> None:
    torch.manual_seed(0)
    model, inputs = made("llama"), tokens()
    monitor, optimizer = watched(output, model, "model.layers.0", "model.embed_tokens", "model.norm")
    with monitor:
        result = model(**inputs, output_hidden_states=True)
        result.logits.sum().backward()
        optimizer.step()
    embedded, first, last = result.hidden_states
    found = {place[0]: values for place, values in rows(output).items()}
    for name, hidden in (("embed_tokens", embedded), ("layers.0", first), ("norm", last)):
        assert found[f"model.{name}.activation"] == pytest.approx(health(hidden), rel=1e-5)


# --- Planted faults.


class Scaled(nn.Module):
    """Multiplies one channel of one token."""

    def __init__(self, channel: int, factor: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.channel, self.factor = channel, factor

    def forward(self, x: Tensor) -> Tensor:
        planted = torch.ones_like(x)
        planted[..., 0, self.channel] = self.factor
        return x * planted * self.scale


def test_a_planted_massive_activation_is_named_by_its_channel(output: Output) -> None:
    model, x = nn.Sequential(Scaled(5, 1.0), Scaled(5, 1e5)), drawn(2, 30, 16)
    monitor, optimizer = watched(output, model, "0", "1")
    with monitor:
        stepping(model, optimizer, x)
    healthy, massive = rows(output).values()
    assert healthy["massive"] < 10
    assert massive["massive"] == pytest.approx(health(model(x))["massive"], rel=1e-9)
    assert massive["massive"] > 1000
    assert massive["massive_channel"] == 5


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.SiLU(), nn.ReLU(inplace=True)], ids=str)
def test_planted_dead_units_are_counted_after_enough_steps(output: Output, activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), activation, nn.Linear(40, 4))
    with torch.no_grad():
        model[0].bias[:30] = -1e3
    monitor, optimizer = watched(output, model, "1", dead_after_steps=3, step_interval=2)
    with monitor:
        for step in range(12):
            if step == 6:
                with torch.no_grad():
                    model[0].bias[:10] = 0.0
            stepping(model, optimizer, drawn(64, 8, seed=step))
    found = [(step, values.get("dead_units")) for (_, step, _), values in rows(output).items()]
    assert found == [(0, None), (2, None), (4, None), (6, 0.75), (8, 0.5), (10, 0.5)]


def test_a_unit_is_dead_only_if_it_was_idle_in_each_of_the_steps(output: Output) -> None:
    model, steps = nn.Sequential(nn.Identity()), 9
    factors = [torch.tensor([1.0, step % 4 == 0, step < 3, 1e-4, 0.05, step == 5]) for step in range(steps)]
    inputs = [drawn(4, 6, seed=step) * factor for step, factor in enumerate(factors)]
    monitor, optimizer = watched(output, model, "0", dead_after_steps=4)
    with monitor:
        for x in inputs:
            model(x)
            optimizer.step()
    active = [active_units(x) for x in inputs]
    assert [list(one[[3, 4]]) for one in active] == [[False, True]] * steps
    expected = [1 - sum(active[step - 4 : step]).astype(bool).mean() for step in range(4, steps)]
    found = [values.get("dead_units") for values in rows(output).values()]
    assert found[:4] == [None] * 4
    assert found[4:] == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) == 2


def test_a_planted_collapse_of_rank_shows(output: Output) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24))
    with torch.no_grad():
        model[1].weight[3:], model[1].bias[3:] = 0.0, 0.0
        model[2].weight[:], model[2].bias[:] = 0.0, drawn(24)
    monitor, optimizer = watched(output, model, "0", "1", "2")
    with monitor:
        stepping(model, optimizer, drawn(4, 30, 24))
    whole, of_three, of_one = (values["effective_rank"] for values in rows(output).values())
    assert whole > 10
    assert 1.5 < of_three < 3.000001
    assert of_one == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_numbers_that_are_not_finite_make_the_numbers_nan_and_units_unknown(output: Output, wrong: float) -> None:
    model = nn.Sequential(nn.Identity())
    monitor, optimizer = watched(output, model, "0", dead_after_steps=2)
    with monitor:
        for step in range(6):
            x = drawn(4, 6)
            x[1, 2] = wrong if step == 1 else 1.0
            model(x)
            optimizer.step()
    found = [*rows(output).values()]
    assert {name for name, value in found[1].items() if math.isnan(value)} == {"massive", "effective_rank", "residual_norm"}
    assert "massive_channel" not in found[1]
    assert [str(one.get("dead_units")) for one in found] == ["None", "None", "nan", "nan", "0.0", "0.0"]


# --- Micro-steps, calls and what does not fit.


def test_micro_steps_have_rows_of_their_own_and_the_first_tells_of_dead_units(output: Output) -> None:
    model, inputs = nn.Sequential(nn.ReLU()), [drawn(5, 6, seed=seed) for seed in range(4)]
    monitor, optimizer = watched(output, model, "0", grad_acc_steps=2, dead_after_steps=1)
    with monitor:
        for pair in (inputs[:2], inputs[2:]):
            for x in pair:
                model(x.requires_grad_()).sum().backward()
            optimizer.step()
    found = rows(output)
    assert [*found] == [("0.activation", step, micro_step) for step in range(2) for micro_step in range(2)]
    for values, x in zip(found.values(), inputs, strict=True):
        dead = values.pop(WITHOUT, None)
        assert values == pytest.approx(health(x.relu()), rel=1e-9)
        assert dead == (0.0 if x is inputs[2] else None)


class Pair(nn.ModuleList):
    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self[0](one), self[1](other)


def test_combined_micro_steps_say_what_is_true_of_all(output: Output) -> None:
    model = Pair([nn.Identity(), nn.Identity()])
    plant = torch.ones(5, 6).index_put((torch.tensor(0), torch.tensor(3)), torch.tensor(50.0))
    inputs = [drawn(5, 6, seed=seed) * plant * torch.tensor([1.0, 1, 1, 1, 1, 0]) for seed in range(6)]
    other = [inputs[0].roll(1, 1), *inputs[1:]]
    monitor, optimizer = watched(output, model, "0", "1", grad_acc_steps=3, dead_after_steps=1, micro_steps="combined")
    with monitor:
        for number, pair in enumerate(zip(inputs, other, strict=True)):
            model(*pair)
            if number % 3 == 2:
                optimizer.step()
    found = rows(output)
    for name, given in (("0", inputs), ("1", other)):
        for step in range(2):
            each = [health(x) for x in given[3 * step : 3 * step + 3]]
            alike = len({one["massive_channel"] for one in each}) == 1
            assert alike == ((name, step) != ("1", 0))
            expected = {
                "massive": max(one["massive"] for one in each),
                **({"massive_channel": each[0]["massive_channel"]} if alike else {}),
                "effective_rank": sum(one["effective_rank"] for one in each) / 3,
                "residual_norm": sum(one["residual_norm"] for one in each) / 3,
                **({"dead_units": 1 / 6 if name == "0" else 0.0} if step else {}),
            }
            assert found[f"{name}.activation", step, None] == pytest.approx(expected, rel=1e-9)


def test_a_second_call_has_a_row_and_units_of_its_own(output: Output) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x[:, :3] * self.scale).sum() + self.act(-x.abs() * self.scale).sum()

    model = Twice()
    monitor, optimizer = watched(output, model, "act", dead_after_steps=1)
    with monitor:
        for step in range(3):
            stepping(model, optimizer, drawn(40, 5, seed=step))
    dead = {place[:2]: values[WITHOUT] for place, values in rows(output).items() if WITHOUT in values}
    assert dead == {(f"act.activation{call}", step): float(bool(call)) for step in (1, 2) for call in ("", "#1")}


def test_only_training_calls_count(output: Output) -> None:
    model, x = nn.Sequential(nn.Linear(6, 6)), drawn(5, 6)
    monitor, optimizer = watched(output, model, "0")
    with monitor:
        model.eval()
        model(7 * x)
        model.train()
        stepping(model, optimizer, x)
    assert [*rows(output).values()] == [pytest.approx(health(model(x)), rel=1e-9)]


def test_a_forward_that_raised_and_is_repeated_has_the_same_dead_units(output: Output) -> None:
    class Raising(nn.Module):
        def forward(self, x: Tensor, error: Exception | None) -> Tensor:
            if error is not None:
                raise error
            return x

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.raising = nn.ReLU(), Raising()

        def forward(self, x: Tensor, error: Exception | None = None) -> Tensor:
            return self.raising(self.act(x), error)

    model, x = Chain(), drawn(40, 4) * torch.tensor([1.0, 1.0, 1.0, 0.0])
    monitor, optimizer = watched(output, model, "act", dead_after_steps=1)
    with monitor:
        for step in range(3):
            if step == 2:
                with pytest.raises(KeyError):
                    model(x, KeyError("out of memory"))
            model(x)
            optimizer.step()
    assert [values.get(WITHOUT) for values in rows(output).values()] == [None, 0.25, 0.25]


class Returning(nn.Module):
    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result(x)


class Column(Returning):
    """Knows how many channels all ranks have, as Megatron's layers do."""

    output_size = 12


def test_the_first_floating_point_tensor_is_read_and_what_does_not_fit_is_named(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    x = drawn(5, 6)
    results: dict[str, nn.Module] = {
        "second": Returning(lambda x: (torch.arange(4), {"hidden": x}, 2 * x)),
        "integers": Returning(lambda x: x.long()),
        "scalar": Returning(lambda x: x.sum()),
        "nothing": Returning(lambda _x: None),
        "empty": Returning(lambda x: x[:0]),
        "freed": Returning(_freed),
        "meta": Returning(lambda x: x.to("meta")),
        "column": Column(lambda x: x),
    }
    model = nn.ModuleDict(results)
    monitor, optimizer = watched(output, model, *results, "unused")
    with monitor:
        for module in model.values():
            module(x)
        optimizer.step()
    assert rows(output) == {("second.activation", 0, 0): pytest.approx(health(x), rel=1e-9)}
    said = warnings_in(caplog)[-1]
    assert f"{reading.NO_OUTPUT}: 'integers', 'scalar'" in said
    assert f"{reading.NO_ELEMENTS}: 'empty', 'freed'" in said
    assert f"{reading.CHANNELS_SPLIT}: 'meta', 'column'" in said


def _freed(x: Tensor) -> Tensor:
    gone = x.clone()
    gone.untyped_storage().resize_(0)
    return gone


# --- Ranks.


def _train_under_ddp(output: Output) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)))
    with torch.no_grad():
        model.module[0].bias[:2] = -1e3
    kept: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = {**FORMAT, "format": ["hdf5"], "l2_targets": {KIND: ["0", "1"]}, "dead_after_steps": 1}
    with attached(output, model, optimizer, **config):
        model.module[0].register_forward_hook(lambda _module, _args, result: kept.append(result.detach().clone()))
        for step in range(2):
            stepping(model, optimizer, drawn(3, 5, 6, seed=2 * step + rank))
    torch.save(kept, output.base / "kept.pt")


def test_each_rank_of_ddp_says_what_it_saw_and_a_merge_keeps_that(tmp_path: Path) -> None:
    on_two_ranks(_train_under_ddp, tmp_path)
    kept = [torch.load(tmp_path / f"out{rank}" / "kept.pt") for rank in range(2)]
    for rank in range(2):
        (directory,) = [path for path in (tmp_path / f"out{rank}").iterdir() if path.is_dir()]
        directory.rename(tmp_path / "out0" / directory.name)
    merge(Wanted(tmp_path / "out0", tmp_path / "merged"))
    (table,) = (tmp_path / "merged" / "global").glob(f"{KIND}_*")
    found = read_merged(table).to_pylist()
    linear = [row for row in found if row["name"].endswith("0.activation")]
    assert {(row["step"], row["ranks"]) for row in linear} == {(step, rank) for step in range(2) for rank in ("0", "1")}
    for row in linear:
        expected = health(kept[int(row["ranks"])][row["step"]])
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    relu = {(row["step"], row["ranks"]): row["dead_units"] for row in found if row["name"].endswith("1.activation")}
    assert [relu[0, rank] for rank in ("0", "1")] == [None, None]
    assert all(relu[1, rank] >= 0.25 for rank in ("0", "1"))


def _shard_outputs(output: Output) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    x = drawn(4, 6)
    model = nn.ModuleDict(
        {
            "tokens": Returning(lambda x: distribute_tensor(x, mesh, [Shard(0)])),
            "channels": Returning(lambda x: distribute_tensor(x, mesh, [Shard(1)])),
        }
    )
    monitor, optimizer = watched(output, model, *model)
    with monitor:
        for module in model.values():
            module(x)
        optimizer.step()
    part = x[2 * dist.get_rank() :][:2]
    assert rows(output) == {("tokens.activation", 0, 0): pytest.approx(health(part), rel=1e-9)}


def test_a_rank_has_the_numbers_of_its_own_tokens_and_none_of_split_channels(tmp_path: Path) -> None:
    on_two_ranks(_shard_outputs, tmp_path)


# --- Compiled code.


def test_a_module_around_compiled_code_has_its_row(output: Output) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    model, x = nn.Sequential(nn.Sequential(torch.compile(inner, backend="aot_eager")), nn.Linear(6, 2)), drawn(4, 6)
    monitor, optimizer = watched(output, model, "0", "0.0", "0.0._orig_mod.1", dead_after_steps=1)
    with monitor:
        for _ in range(2):
            stepping(model, optimizer, x)
    found = {place[:2]: values for place, values in rows(output).items()}
    expected = health(inner(x).detach())
    for name in ("0.activation", "0.0.activation"):
        assert found[name, 0] == pytest.approx(expected, rel=1e-6)
        assert found[name, 1] == pytest.approx({**expected, WITHOUT: 1 - active_units(inner(x)).mean()}, rel=1e-6)


def test_a_module_in_compiled_code_that_returns_no_tensor_has_none_and_that_is_said(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    class Nothing(nn.Module):
        def forward(self, _: Tensor) -> None: ...

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.nothing = nn.Linear(6, 6), Nothing()

        def forward(self, x: Tensor) -> Tensor:
            self.nothing(x)
            y: Tensor = self.first(x)
            return y

    model = torch.compile(Net(), backend="eager", fullgraph=True)
    monitor, optimizer = watched(output, model, "nothing")
    with monitor:
        stepping(model, optimizer, drawn(4, 6))
    assert f"{SHARDED_THERE}: 'nothing'" in warnings_in(caplog)[-1]
    assert rows(output) == {}
