"""The command ``trainermon precision``: from every format, from directories of ranks and from a merged set."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_job import RecordedRank, merged
from sink_rows import Measured
from torch import nn
from trained_gpt import Trained, advised, mean_loss, recorded
from typer.testing import CliRunner

from monitor.precision.cli import app
from monitor.precision.judging import Casting
from monitor.precision.rounding import GRIDS
from monitor.series import Placement, Shard

OPS = ("absmax", "norm", "shape", "magnitude_histogram")


def ran(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def printed(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CliRunner().invoke(app, [*(str(one) for one in arguments), "--json"]).stdout)
    return found


def test_every_format_and_a_merged_set_give_the_same_advice(trained: Trained, tmp_path: Path) -> None:
    found = {}
    for name in ("hdf5", "parquet", "csv"):
        base = tmp_path / name
        recorded(trained.copy(), [trained.batch(1), trained.batch(2)], base, format=name)
        merged(base / "run", str(base / "merged"))
        found[name], found[f"merged {name}"] = printed(base / "run"), printed(base / "merged")
    in_order = [[layer["name"] for layer in one["layers"]] for name, one in found.items() if name != "merged csv"]
    assert in_order == in_order[:1] * 5  # CSV files say no order of calls, and a merge sorts rows by name
    for one in found.values():
        assert one["verdicts"] == {"fp8": 9, "bf16": 0, "not looked at": 0}
        assert len(one["layers"]) == 9
        by_name = {layer["name"]: layer for layer in one["layers"]}
        for first in found["hdf5"]["layers"]:
            layer = by_name[first["name"]]
            assert layer["loss"] == pytest.approx(first["loss"], rel=1e-6)
            for what, operand in layer["operands"].items():
                assert operand["format"] == first["operands"][what]["format"]
                for cast, numbers in operand["casts"].items():
                    assert numbers["badness"] == pytest.approx(first["operands"][what]["casts"][cast]["badness"], rel=1e-6)


def test_the_table_has_a_line_for_each_layer_in_order_of_depth_and_says_what_the_loss_does(
    trained: Trained, tmp_path: Path
) -> None:
    status, said = ran(recorded(trained.copy(), [trained.batch(1)], tmp_path))
    lines = said.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines[1:10]] == [
        *(f"h.{block}.{name}" for block in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")),
        "head",
    ]
    assert all(line.split()[1:5] == ["FP8", "e4m3", "e4m3", "e5m2"] for line in lines[1:10])
    assert [line.split()[:2] for line in lines[13:19]] == [
        ["e4m3", "current"],
        ["e4m3", "delayed"],
        ["e5m2", "current"],
        ["e5m2", "delayed"],
        ["fp16", "none"],
        ["bf16", "none"],
    ] or "delayed" not in said  # one row has no history
    assert "9 layers in 1 step: 9 FP8, 0 keep in bf16, 0 not looked at" in said
    assert "is expected to change by 0.00" in lines[-1]


def judged(base: Path, layers: dict[str, list[float]]) -> str:
    """The last line about layers that have these inputs; NaN in one leaves its layer unjudged."""
    one = RecordedRank(base, 0, 1, "hdf5", ops=OPS)
    around = {
        kind: [
            Measured(f"{name}.{end}", taken, shape=(2, 2), magnitudes=True, micro_step=0)
            for name, taken in layers.items()
            for end in ("input", "output")
        ]
        for kind in ("actv", "actv_grad")
    }
    weights = [Measured(f"{name}.weight", WEIGHT, shape=(3, 2), magnitudes=True) for name in layers]
    one.write(0, {**around, "param_origin": weights})
    one.close()
    return ran(base)[1].splitlines()[-1]


def test_without_histograms_no_table_of_rows_is_printed(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, 0, 1, "hdf5", ops=("norm", "shape"))
    inputs = [Measured("a.input", WEIGHT, shape=(3, 2), micro_step=0)]
    one.write(0, {"actv": inputs, "param_origin": [Measured("a.weight", WEIGHT, shape=(3, 2))]})
    one.close()
    status, said = ran(tmp_path)
    assert (status, "There are no histograms of magnitudes." in said, "The rows that lose most" in said) == (1, True, False)


def test_layers_that_could_not_be_judged_are_not_called_unsafe(tmp_path: Path) -> None:
    broken, wide = [math.nan, 1.0, 2.0, 3.0], [1e-30, 1e-20, 1e-10, 1.0]
    assert judged(tmp_path / "none", {"a": broken, "b": broken}) == "No layer was judged."
    assert judged(tmp_path / "one", {"a": broken, "b": wide}) == "No layer that was judged is safe in FP8."
    assert judged(tmp_path / "all", {"a": wide, "b": wide}) == "No layer is safe in FP8."


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "2"], "Write the first and the last step, as in 100:200."),
        (["--scaling", "later"], "Write current or delayed."),
        (["--steps", "9:8"], "ends before it begins"),
        (["--steps", "100:200"], "there are no rows in these steps. There are rows of steps 0 to 0."),
    ],
)
def test_arguments_that_make_no_sense_end_with_2(arguments: list[str], said: str, trained: Trained, tmp_path: Path) -> None:
    status, told = ran(recorded(trained.copy(), [trained.batch(1)], tmp_path), *arguments)
    assert status == 2
    assert said in told


def test_steps_are_chosen(trained: Trained, tmp_path: Path) -> None:
    run = recorded(trained.copy(), [trained.batch(seed) for seed in range(4)], tmp_path)
    assert [printed(run, "--steps", steps)["steps"] for steps in ("1:2", "2:", ":0", ":")] == [2, 2, 1, 4]
    alone = {one["casts"]["e4m3 current"]["step"] for one in printed(run, "--steps", "2:2")["layers"][0]["operands"].values()}
    assert alone == {2}


# --- Ranks.

WEIGHT = (0.5, -0.25, 1.0, 3.0, 0.001, 2.0)


def sharded(base: Path) -> None:
    """Two ranks, each with half of a weight and its own inputs."""
    for rank in (0, 1):
        one = RecordedRank(base, rank, 2, "hdf5", {"dp": (0, 1)}, ops=OPS)
        one.place("param_origin", "a.weight", Placement(shard=Shard((0, 1), (3, 2), (rank * 3,), flat=True)))
        values = [0.5, 1.0, 2.0, 4.0 * (rank + 1)]
        for step in range(2):
            of_modules = {
                kind: [Measured(name, values, shape=(2, 2), magnitudes=True, micro_step=0) for name in ("a.input", "a.output")]
                for kind in ("actv", "actv_grad")
            }
            own = Measured("a.weight", WEIGHT[rank * 3 : rank * 3 + 3], magnitudes=True)
            one.write(step, {**of_modules, "param_origin": [own]})
        one.close()


def test_shards_are_judged_as_one_weight_and_inputs_by_rank(tmp_path: Path) -> None:
    sharded(tmp_path)
    (layer,) = advised(tmp_path).gemms
    weight, taken = layer.operands["weight"], layer.operands["input"]
    assert (layer.name, weight.rows, taken.rows) == ("a", 2, 4)
    cast = weight.casts[Casting("e4m3", "current")]
    assert (cast.rank, cast.numbers["underflow"]) == (-1, 0.0)
    scale = GRIDS["e4m3"].greatest / max(map(abs, WEIGHT))
    x = torch.tensor(WEIGHT, dtype=torch.float64)
    q = (x * scale).float().to(torch.float8_e4m3fn).double() / scale
    assert float((q - x).norm() / x.norm()) <= cast.numbers["most_error"]
    assert taken.casts[Casting("e4m3", "current")].rank in (0, 1)


def test_ranks_that_are_read_apart_give_the_same_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path)
    together = {way: advised(tmp_path, way=way) for way in ("current", "delayed")}
    monkeypatch.setattr("monitor.precision.operands.ROWS_AT_A_TIME", 1)
    assert {way: advised(tmp_path, way=way) for way in ("current", "delayed")} == together
    assert together["current"].steps == 2


def test_delayed_scales_are_those_of_the_rows_before(tmp_path: Path) -> None:
    """Against the definition, with numbers of which the scale alone decides whether they saturate."""
    sizes = [1.0, 8.0, 2.0, 4.0, 9.0, 1.0, 1.0, 2.0]
    one = RecordedRank(tmp_path, 0, 1, "hdf5", ops=OPS)
    for step, size in enumerate(sizes):
        values = [size, size / 2, size / 4, size / 8]
        modules = [Measured(f"a.{place}", values, 0, shape=(2, 2), magnitudes=True) for place in ("input", "output")]
        rows = {"actv": modules, "actv_grad": modules}
        one.write(step, {**rows, "param_origin": [Measured("a.weight", [1.0, 2.0, 3.0, 4.0], shape=(2, 2), magnitudes=True)]})
    one.close()
    for history in (1, 2, 3, 10):
        over = [step for step in range(1, len(sizes)) if sizes[step] > 464 / 448 * max(sizes[max(0, step - history) : step])]
        (layer,) = advised(tmp_path, way="delayed", history=history).gemms
        cast = layer.operands["input"].casts[Casting("e4m3", "delayed")]
        assert cast.step in over
        assert cast.numbers["most_saturated"] >= 0.25
        limited = advised(tmp_path, way="delayed", history=history, margin=float(np.log2(max(sizes))) + 1).gemms[0]
        assert limited.operands["input"].casts[Casting("e4m3", "delayed")].numbers["saturated"] == 0.0


def with_two_calls(base: Path) -> Path:
    """A layer that is called twice in each step. The second call is eight times as large."""
    one = RecordedRank(base, 0, 1, "hdf5", ops=OPS)
    for step in range(3):
        modules = [
            Measured(f"a.{place}{call}", [size, size / 2, size / 4, size / 8], 0, shape=(2, 2), magnitudes=True)
            for call, size in (("", 1.0), ("#1", 8.0))
            for place in ("input", "output")
        ]
        weight = Measured("a.weight", [1.0, 2.0, 3.0, 4.0], shape=(2, 2), magnitudes=True)
        one.write(step, {"actv": modules, "actv_grad": modules, "param_origin": [weight]})
    one.close()
    return base


def test_all_calls_of_a_layer_have_one_history(tmp_path: Path) -> None:
    """An input meets the scale of the call before it. Backward begins with the last call, which has the larger gradient."""
    run = with_two_calls(tmp_path)
    (layer,) = advised(run, way="delayed", history=1).gemms
    taken, given = (layer.operands[what].casts[Casting("e4m3", "delayed")] for what in ("input", "gradient"))
    assert (taken.step, taken.numbers["most_saturated"]) == (0, 0.75)
    assert (given.step, given.numbers["most_saturated"]) == (1, 0.75)
    (layer,) = advised(run, way="delayed", history=2).gemms
    assert layer.operands["gradient"].casts[Casting("e4m3", "delayed")].numbers["saturated"] == 0.0


def test_a_history_may_be_longer_than_any_memory(tmp_path: Path) -> None:
    run = with_two_calls(tmp_path)
    every = printed(run, "--scaling", "delayed", "--history", 6)
    longer = printed(run, "--scaling", "delayed", "--history", 3 * 10**17)
    assert longer["layers"] == every["layers"]


def test_no_bound_is_given_where_the_second_order_dominates(trained: Trained, tmp_path: Path) -> None:
    run = recorded(trained.copy(), [trained.batch(1)], tmp_path)
    assert "and at most by" in ran(run)[1]
    huge = recorded(Squares(), [(torch.randn(64, 8), torch.zeros(64, 8))], tmp_path / "huge", loss=of_huge_numbers)
    said = ran(huge)[1].splitlines()[-1]
    assert "The second order dominates" in said
    assert "at most" not in said


class Squares(nn.Sequential):
    """Two layers, whose loss is far from linear."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))


def of_huge_numbers(output: torch.Tensor, _following: torch.Tensor) -> torch.Tensor:
    """A loss of which the gradient is large, so that its square is larger."""
    return 1e9 * output.square().sum()


# --- Which modules are layers.


class Mixed(nn.Module):
    """Layers of several sorts, of which two are matrix multiplications."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm([4, 8])
        self.conv = nn.Conv1d(4, 4, 1)
        self.wide = nn.Linear(8, 24)
        self.head = nn.Linear(24, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(self.conv(self.norm(self.words(tokens)))))


@pytest.mark.parametrize("format", ["hdf5", "csv"])
def test_embeddings_norms_and_convolutions_are_no_layers(format: str, tmp_path: Path) -> None:  # noqa: A002
    torch.manual_seed(0)
    tokens = torch.randint(16, (2, 4))
    advice = advised(recorded(Mixed(), [(tokens, tokens)], tmp_path, format=format))
    assert [one.name for one in advice.gemms] == ["wide", "head"]


class Tied(nn.Module):
    """A head that shares the weight of the embedding, whose gradient is then of both uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens))


def test_a_head_has_the_weight_of_the_embedding_that_it_shares(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens, model = torch.randint(16, (2, 4)), Tied()
    (head,) = advised(recorded(model, [(tokens, tokens)], tmp_path)).gemms
    operands = {what: of.rows for what, of in head.operands.items()}
    assert (head.name, head.verdict, operands) == ("head", "fp8", {"input": 1, "weight": 1, "gradient": 1})
    taken = model.words(tokens).detach().requires_grad_()
    output = model.head(taken)
    (given,) = torch.autograd.grad(mean_loss(output, tokens), output, retain_graph=True)
    (back,) = torch.autograd.grad(output, taken, given)
    errors = {what: of.casts[Casting("e4m3", "current")].numbers["most_error"] for what, of in head.operands.items()}
    gradient = float(given.norm() * taken.detach().norm())  # a bound of the part of the head
    bound = (
        errors["input"] * float(taken.detach().norm() * back.norm())
        + errors["weight"] * float(model.head.weight.detach().norm()) * gradient
    )
    assert head.loss.most == pytest.approx(bound, rel=1e-4)


class TiedByArgument(Tied):
    """The head is given its weight, as Megatron gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = GivenWeight()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens), weight=self.words.weight)


class GivenWeight(nn.Module):
    """A layer without a weight of its own."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t()


def test_a_head_may_be_given_the_weight_of_the_embedding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(16, (2, 4))
    (head,) = advised(recorded(TiedByArgument(), [(tokens, tokens)], tmp_path)).gemms
    assert (head.name, head.verdict) == ("head", "fp8")


class Scattered(nn.Module):
    """Matrix products that no linear layer does, and one that gets its input by keyword under the name of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(16, 8), nn.Embedding(4, 8)
        self.linear, self.patch_emb = nn.Linear(8, 8), nn.Linear(8, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.lstm, self.attention = nn.LSTM(8, 8), nn.MultiheadAttention(8, 2)
        self.bare = nn.Parameter(torch.randn(8, 8))
        self.experts = nn.Parameter(torch.randn(2, 8, 8))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.words(tokens) + self.positions(input=torch.arange(4)))
        x = self.lstm(self.normed(x))[0] @ self.bare.t()
        x = self.attention(x, x, x)[0] @ self.experts[0]
        return self.head(self.patch_emb(input=x))


@pytest.mark.parametrize("format", ["hdf5", "parquet", "csv"])
def test_a_product_that_is_in_no_table_is_named_and_the_run_is_not_safe(format: str, tmp_path: Path) -> None:  # noqa: A002
    torch.manual_seed(0)
    tokens = torch.randint(16, (2, 4))
    run = recorded(Scattered(), [(tokens, tokens)], tmp_path, format=format, ops=[*OPS, "dtype"])
    status, said = ran(run)
    found = printed(run)
    of_none = ["attention.in_proj_weight", "bare", "experts", "lstm.weight_hh_l0", "lstm.weight_ih_l0"]
    assert sorted(found["without_layer"]) == [*of_none, "normed.parametrizations.weight.original1"]
    assert "6 matrices belong to no layer, and were not looked at: " in said
    verdicts = {one["name"]: one["verdict"] for one in found["layers"]}
    absent = dict.fromkeys(("patch_emb", "attention.out_proj"), "not looked at")
    assert verdicts == {"linear": "fp8", "head": "fp8", **absent}
    assert status == 1


class Bare(nn.Module):
    """A layer and a parameter that is multiplied without one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bare = nn.Linear(8, 16), nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x @ self.bare)


def test_a_matrix_without_a_layer_alone_makes_a_run_not_safe(tmp_path: Path) -> None:
    torch.manual_seed(0)
    status, said = ran(recorded(Bare(), [(torch.randn(2, 4, 8), torch.randint(16, (2, 4)))], tmp_path))
    assert status == 1
    assert "1 matrix belongs to no layer, and was not looked at: bare" in said
    assert "1 layer in 1 step: 1 FP8" in said


def test_a_damaged_list_of_series_ends_with_2(tmp_path: Path) -> None:
    one = RecordedRank(tmp_path, 0, 1, "hdf5", ops=OPS)
    one.write(0, {"param_origin": [Measured("a.weight", WEIGHT, shape=(3, 2))]})
    one.close()
    (series,) = tmp_path.glob("*/series-*")
    series.write_bytes(b"damaged")
    status, said = ran(tmp_path)
    assert (status, "Nothing was read" in said, series.name in said.replace("\n", "")) == (2, True, True)
