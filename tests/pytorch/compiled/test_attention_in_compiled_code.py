"""Attention of compiled modules has the rows of eager code, or the reason of eager code why there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import WAYS, Ways, needs_a_compiler, trained
from evidence import in_turn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from watching import Output, Row, attached, warnings_in

KERNELS = Path(__file__).parent / "scripts" / "flex_in_kernels.py"
KINDS = ("attention_hook", "attention_head_hook")
TARGETS = ["layers.0.attention", "layers.1.attention"]
FIELDS: dict[str, Any] = {"recording_l2_features": True, "ops": ["norm"], "ndigits": 17}
CONFIG = {**FIELDS, "l2_targets": dict.fromkeys(KINDS, TARGETS)}
OF_ONE_LAYER = {**FIELDS, "l2_targets": dict.fromkeys(KINDS, TARGETS[:1])}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.5, -1) @ v


SLOPES = torch.tensor([-0.5, 1.5])
WINDOW = torch.tensor(2)


def flexed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With a slope for each head, and a window, which are tensors of the program."""
    slopes, window = SLOPES.to(q.device), WINDOW.to(q.device)

    def biased(score: Tensor, _row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + slopes[head] * (query - key)

    def seen(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    mask = create_block_mask(seen, None, None, q.shape[2], q.shape[2], device=q.device.type)
    given = (one.detach().float() for one in (q, k, v))  # no backward on a host
    return flex_attention(*given, score_mod=biased, block_mask=mask, scale=0.7).double() + v


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return written_out(q, k, v) + written_out(k, q, v)


def without(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q * k + v


def overwritten(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).detach()
    attended = torch.softmax(scores, -1) @ v
    scores.mul_(100)
    return attended + q


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast(q.device.type, torch.bfloat16):
        return F.scaled_dot_product_attention(3 * q.float(), k.float(), v.float()).double()


def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return written_out(q, k, v)


def checkpointed_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result: Tensor = checkpoint(written_out, q, k, v, use_reentrant=False)
    return result


class Attention(nn.Module):
    attend: Attend = staticmethod(causal)

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4)
        return type(self).attend(q, k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, attention: type[Attention], *, checkpointed: bool) -> None:
        super().__init__()
        self.attention, self.checkpointed = attention(), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.attention, x, use_reentrant=False) if self.checkpointed else self.attention(x)
        return x + y


def model(attend: Attend, *, checkpointed: bool = False, layers: int = 2) -> Callable[[], nn.Module]:
    kind = type("Attending", (Attention,), {"attend": staticmethod(attend)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(kind, checkpointed=checkpointed) for _ in range(layers)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    return Net


def batch(number: int) -> Tensor:
    return torch.sin(torch.arange(24, dtype=torch.float64) + number).view(2, 3, 4)


def growing(number: int) -> Tensor:
    return torch.sin(torch.arange(8 * (3 + number), dtype=torch.float64)).view(2, -1, 4)


def rows(output: Output) -> list[Row]:
    directory = output.directories()[-1]
    return [row for kind in KINDS for row in output.rows(kind, directory)]


def assert_equal(found: list[Row], expected: list[Row], within: float = 1e-9) -> None:
    places, wanted = (
        {(row.kind, row.name, row.step, row.micro_step): row.values for row in some} for some in (found, expected)
    )
    assert places.keys() == wanted.keys()
    assert len(wanted) == len(expected) > 0
    for place, values in wanted.items():
        assert places[place] == pytest.approx(values, rel=within), place


HOWS = [("layer_by_layer", False), ("whole", True), ("layer_by_layer", True), ("whole", False)]
"""Ways of compiling, and whether layers are checkpointed."""


@pytest.mark.parametrize(("attend", "how"), in_turn([causal, masked, written_out, under_autocast, flexed], HOWS))
def test_attention_has_the_rows_of_eager_code_and_training_keeps_its_bits(
    output: Output, attend: Attend, how: tuple[str, bool]
) -> None:
    way, checkpointed = how
    make = model(attend, checkpointed=checkpointed)
    trained(make, Ways.eager, output, batch, config=CONFIG)
    expected = rows(output)
    before = trained(make, WAYS[way], None, batch, backend="aot_eager")
    after = trained(make, WAYS[way], output, batch, config=CONFIG, backend="aot_eager")
    assert_equal(rows(output), expected)
    assert all(map(torch.equal, after.numbers, before.numbers))
    assert (after.graphs, after.breaks) == (before.graphs, before.breaks)


@needs_a_compiler
@pytest.mark.usefixtures("one_compiler")
@pytest.mark.parametrize("attend", [causal, written_out])
def test_what_inductor_compiles_has_them_too_for_any_length(output: Output, attend: Attend) -> None:
    make = model(attend, layers=1)
    trained(make, Ways.eager, output, growing, config=OF_ONE_LAYER)
    expected = rows(output)
    before = trained(make, Ways.whole, None, growing, dynamic=True, backend="eager")  # the graphs are those of any backend
    after = trained(make, Ways.whole, output, growing, config=OF_ONE_LAYER, dynamic=True)
    assert_equal(rows(output), expected, within=1e-6)  # training with inductor rounds in another way
    assert after.graphs == before.graphs


@needs_a_compiler
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="its kernels need vectors")
def test_flex_attention_in_kernels_has_the_rows_of_eager_code(tmp_path: Path) -> None:
    """In a process of its own: this one may have told inductor that the host has no vectors."""
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MONITOR_OUTPUT_DIR": str(recordings),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # it would leave them behind
    }
    command = [sys.executable, str(KERNELS), str(recordings)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    eager, compiled, bits, graphs = json.loads(told.stdout.splitlines()[-1])
    assert len(eager) == 2 * 3 * 4  # micro-batches, steps, and rows of the module and of heads
    assert compiled == [[place, pytest.approx(values, rel=1e-5)] for place, values in eager]
    assert bits[0] == bits[1]
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("attend", [twice, without])
def test_what_has_no_rows_in_eager_code_has_none_for_the_same_reason(
    output: Output, caplog: pytest.LogCaptureFixture, attend: Attend
) -> None:
    said = []
    for way in (Ways.eager, Ways.whole):
        caplog.clear()
        trained(model(attend), way, output, batch, config=CONFIG, **({} if way is Ways.eager else {"backend": "aot_eager"}))
        said.append([one for one in warnings_in(caplog) if "have no row" in one])
        assert rows(output) == []
    assert said[0] == said[1] != []


def test_calls_within_an_operator_of_higher_order_are_not_guessed(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    trained(model(checkpointed_inside), Ways.whole, output, batch, config=CONFIG, backend="aot_eager")
    assert rows(output) == []
    assert "it calls tag_activation_checkpoint in compiled code, which hides its calls" in str(warnings_in(caplog))


def test_scores_that_are_overwritten_later_have_no_row(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    trained(model(overwritten), Ways.whole, output, batch, config=CONFIG, backend="aot_eager")
    assert rows(output) == []
    assert "a tensor of its attention is changed in place in compiled code" in str(warnings_in(caplog))


@pytest.mark.parametrize("way", ["whole", "layer_by_layer"])
def test_a_graph_that_breaks_inside_is_compiled_as_without_the_monitor(
    output: Output, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    before = trained(model(broken), WAYS[way], None, batch, backend="aot_eager")
    after = trained(model(broken), WAYS[way], output, batch, config=CONFIG, backend="aot_eager")
    assert all(map(torch.equal, after.numbers, before.numbers))
    assert (after.graphs, after.breaks) == (before.graphs, before.breaks)
    assert rows(output) == []
    assert "it is called between graphs of torch.compile" in str(warnings_in(caplog))


def test_two_monitors_of_one_model_both_have_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(written_out)().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    outputs = [Output(tmp_path / name) for name in ("first", "second")]
    with ExitStack() as stack:
        for one in outputs:
            one.base.mkdir()
            monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(one.base))
            stack.enter_context(attached(one, net, optimizer, **CONFIG))
        torch.compile(net, backend="aot_eager")(batch(0)).sum().backward()
        optimizer.step()
    first, second = map(rows, outputs)
    assert_equal(first, second)
