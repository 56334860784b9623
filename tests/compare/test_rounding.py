"""What parts two runs: rounding alone, or a change. Real training of a small transformer, recorded whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import monitor
from monitor.compare.cli import app
from monitor.merge.merge import Wanted, merge
from monitor.stats.histograms import PERCENTILES

STEPS, WIDTH, LENGTH = 6, 32, 16
OPS = ["min", "max", "mean", "norm", "zeros", "std", "nans"]
ON_REQUEST = ["rms", "absmean", "smallest_nonzero", "skewness", *PERCENTILES]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.scale, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), 8**-0.5, True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.between, self.up, self.act, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(self.act(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(64, WIDTH), nn.Sequential(*(Block() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


class Run:
    """A run, and what may be changed in it: the model, the optimizer, and each step before the optimizer's turn."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.permuted, self.parts = False, 2
        self.at: dict[int, Callable[[], Any]] = {}
        self.loss: Callable[[Tensor, int, int], Tensor] = lambda loss, _step, _part: loss

    @property
    def block(self) -> Any:
        return self.model.blocks[1]

    def record(self, dtype: torch.dtype, *, mixed: bool = False, **fields: Any) -> None:
        self.model.to(dtype)
        order = torch.Generator().manual_seed(1)
        tokens = torch.randint(64, (STEPS, 8, LENGTH), generator=torch.Generator().manual_seed(2))
        fields = {"ops": OPS, "format": "parquet", **fields}
        watch = monitor.watch(self.model, self.optimizer, "everything", micro_batches=self.parts, **fields)
        with watch:
            for step, batch in enumerate(tokens):
                for part, some in enumerate(batch.chunk(self.parts)):
                    x = some[torch.randperm(len(some), generator=order)] if self.permuted else some
                    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                        logits = self.model(x)
                    loss = F.cross_entropy(logits.float().flatten(0, 1), x.roll(-1, 1).flatten()) / self.parts
                    self.loss(loss, step, part).backward()
                if step in self.at:
                    self.at[step]()
                watch.log(loss=loss)
                self.optimizer.step()
                self.optimizer.zero_grad()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Record a run with a change, once for all tests; returns its directory."""
    done: dict[tuple[Any, ...], Path] = {}

    def record(change: Callable[[Run], object], dtype: torch.dtype = torch.float32, **how: Any) -> Path:
        asked = (change, dtype, str(how))
        if asked not in done:
            done[asked] = tmp_path_factory.mktemp("run") / "out"
            patched.setenv("MONITOR_OUTPUT_DIR", str(done[asked]))
            made = Run()
            change(made)
            made.record(dtype, **how)
        return done[asked]

    with pytest.MonkeyPatch.context() as patched:
        yield record


def compared(*arguments: object) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "300"})
    return outcome.exit_code, outcome.output


def first(said: str) -> tuple[int, str]:
    """Step and name of what parts first."""
    step, name = re.findall(r"first: step (\d+), rank0: ([^:,]+/\d+:[\w.]+)", said)[0]
    return int(step), name.replace("/0:", "/")


def nothing(_run: Run) -> None: ...


def permuted(run: Run) -> None:
    """Sums over the batch in another order."""
    run.permuted = True


def with_sgd(run: Run) -> None:
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05, momentum=0.9)


def permuted_with_sgd(run: Run) -> None:
    permuted(run)
    with_sgd(run)


def in_graphs(run: Run) -> None:
    """Other kernels: those of decompositions."""
    run.model.compile(backend="aot_eager_decomp_partition")


@pytest.mark.parametrize(
    ("one", "other", "dtype", "mixed"),
    [
        (nothing, permuted, torch.float32, False),
        (nothing, permuted, torch.bfloat16, False),
        (nothing, permuted, torch.float32, True),
        (with_sgd, permuted_with_sgd, torch.float32, False),
        (nothing, in_graphs, torch.float32, False),
    ],
    ids=["float32", "bfloat16", "mixed", "SGD", "compiled"],
)
def test_rounding_alone_is_no_difference(
    one: Callable[..., object], other: Callable[..., object], dtype: torch.dtype, mixed: bool, run: Callable[..., Path]
) -> None:
    sides = run(one, dtype, mixed=mixed), run(other, dtype, mixed=mixed)
    status, said = compared(*sides)
    assert (status, said.startswith("the same: ")) == (0, True), said
    assert "rows differ by rounding" in said
    assert compared(*sides, "--tolerance", 0)[0] == 1


@pytest.mark.parametrize("other", ["csv", "hdf5", "parquet"])
def test_the_digits_of_csv_are_rounding_too(other: str, run: Callable[..., Path]) -> None:
    sides = [run(nothing, format="csv"), run(permuted, format=other)]
    merged = sides[0] / "merged"
    if not merged.exists():  # each of the formats is compared with one run
        merge(Wanted(sides[0], merged, kinds=["param_updated", "grad_reduced"]))
    for one in sides[0], merged:
        for pair in ((one, sides[1]), (sides[1], one)):
            status, said = compared(*pair)
            assert (status, said.startswith("the same: ")) == (0, True), said


def zero_biases(run: Run) -> None:
    """Rounding is all that the bias of keys is updated with, by whole updates of Adam."""
    for name, one in run.model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(one)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)


def normalized(run: Run) -> None:
    """The bias before a normalization has a gradient of 0."""
    run.block.up = nn.Sequential(nn.Linear(WIDTH, 64), nn.Flatten(0, 1), nn.BatchNorm1d(64), nn.Unflatten(0, (-1, LENGTH)))
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3)


@pytest.mark.parametrize("model", [zero_biases, normalized])
def test_a_gradient_that_is_rounding_alone_is_no_difference(model: Callable[[Run], object], run: Callable[..., Path]) -> None:
    def both(made: Run) -> None:
        model(made)
        permuted(made)

    status, said = compared(run(model), run(both))
    assert (status, said.startswith("the same: ")) == (0, True), said


@pytest.mark.parametrize("ops", [["mean"], ["min"], ["norm"], ["zeros", "kurtosis"], ON_REQUEST], ids=str)
def test_any_ops_are_enough_to_tell_rounding(ops: list[str], run: Callable[..., Path]) -> None:
    status, said = compared(run(nothing, ops=ops), run(permuted, ops=ops))
    assert (status, said.startswith("the same: ")) == (0, True), said


def test_what_cannot_be_judged_is_said(run: Callable[..., Path]) -> None:
    sides = [run(nothing, ops=ops) for ops in (["norm"], ["mean"], ["checksum"])]
    for one, other in ((0, 1), (1, 0)):
        status, said = compared(sides[one], sides[other])
        assert status == 1
        assert "alone has values of norm of actv" in said
        assert "alone has values of mean of actv" in said
    status, said = compared(sides[2], run(permuted, ops=["checksum"]))
    assert status == 1
    assert "there is no other op. --tolerance 0 compares them" in said


def test_another_dtype_is_a_difference_where_it_begins(run: Callable[..., Path]) -> None:
    def cast(made: Run) -> None:
        made.block.between.register_forward_hook(lambda _module, _args, result: result.bfloat16())
        made.block.up.register_forward_pre_hook(lambda _module, args: args[0].float())

    status, said = compared(run(nothing), run(cast))
    assert (status, first(said)) == (1, (0, "actv/blocks.1.between.output")), said
    assert "dtype: float32 against bfloat16" in said


def another_epsilon(run: Run) -> None:
    run.block.between.eps = 1e-4


def tanh(run: Run) -> None:
    run.block.act.approximate = "tanh"


def unmasked(run: Run) -> None:
    run.block.attention.causal = False


def another_scale(run: Run) -> None:
    run.block.attention.scale *= 1.01


def swapped(run: Run) -> None:
    weights = [run.model.blocks[at].up.weight for at in (1, 2)]
    with torch.no_grad():
        weights[0].copy_(weights[1].clone())


def another_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 1.01


def another_rate_of_one(run: Run) -> None:
    head = [run.model.head.weight]
    others = [one for one in run.model.parameters() if one is not head[0]]
    run.optimizer = torch.optim.AdamW([{"params": others}, {"params": head, "weight_decay": 0.5}], lr=1e-3)


def another_beta(run: Run) -> None:
    run.optimizer.param_groups[0]["betas"] = (0.9, 0.99)


def unscaled(run: Run) -> None:
    run.loss = lambda loss, step, _part: loss * 2 if step == 3 else loss


def dropped(run: Run) -> None:
    run.loss = lambda loss, step, part: loss * (0 if (step, part) == (3, 1) else 1)


def reset(run: Run) -> None:
    run.at[4] = lambda: [state["exp_avg_sq"].zero_() for state in run.optimizer.state.values()]


def clipped(run: Run) -> None:
    run.at[2] = lambda: nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)


def halved(run: Run) -> None:
    run.at[3] = lambda: run.block.up.weight.grad.mul_(0.5)


def rounded(run: Run) -> None:
    run.block.down.register_forward_hook(lambda _module, _args, result: result.bfloat16().to(result.dtype))


CHANGES = {
    another_epsilon: (0, "actv/blocks.1.between.output"),
    tanh: (0, "actv/blocks.1.act.output"),
    unmasked: (0, "actv/blocks.1.attention.out.input"),
    another_scale: (0, "actv/blocks.1.attention.out.input"),
    swapped: (0, "param_origin/blocks.1.up.weight"),
    another_rate: (0, "run/learning_rate.0"),
    another_rate_of_one: (0, "run/learning_rate.1"),
    another_beta: (1, "exp_avg_sq/embed.weight"),
    unscaled: (3, "actv_grad/head.output"),
    dropped: (3, "actv_grad/head.output"),
    reset: (4, "exp_avg_sq/embed.weight"),
    clipped: (2, "grad_reduced/embed.weight"),
    halved: (3, "grad_reduced/blocks.1.up.weight"),
    rounded: (0, "actv/blocks.1.down.output"),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_named_where_it_shows_first(change: Callable[[Run], object], run: Callable[..., Path]) -> None:
    def both(made: Run) -> None:
        permuted(made)
        change(made)

    status, said = compared(run(nothing), run(both))
    assert status == 1
    assert first(said) == CHANGES[change], said
