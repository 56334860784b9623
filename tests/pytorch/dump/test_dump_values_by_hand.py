"""Each level and task on a convolutional network and a transformer: every entry, its structure and every number in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tapes
import torch
from dumping import Convolutional, Transformer, images, seeded, tokens
from dumps_by_hand import ByHand, Spelling, assert_tasks_agree, debugger_of, points
from tapes import Tape, Value
from torch import Tensor, nn

from monitor.pytorch import PrecisionDebugger

SPELLING = Spelling("torch.Tensor", "torch.float32", "torch.int64", ("requires_grad",))
LABELS = torch.tensor([0, 2])

Parameters = dict[str, Value]
Kind = type[nn.Module]


def parameters_of(network: nn.Module) -> Parameters:
    return {name: Value(one.detach().numpy(), trained=True) for name, one in network.named_parameters()}


def below(parameters: Parameters, name: str) -> Parameters:
    """Those of one module, by their names in it."""
    return {key.rpartition(".")[2]: one for key, one in parameters.items() if key.rpartition(".")[0] == name}


def convolved(tape: Tape, x: Value, name: str, p: Parameters) -> Value:
    own = below(p, name)
    settings = own.get("bias"), (1, 1), (0, 0), (1, 1), 1
    with tape.module(f"Module.{name}.Conv2d", x, parameters=own) as module:
        y = tape.call("Functional.conv2d", tapes.convolution, x, own["weight"], *settings)
        module.results = (y,)
    return y


def projected(tape: Tape, x: Value, name: str, p: Parameters) -> Value:
    own = below(p, name)
    with tape.module(f"Module.{name}.Linear", x, parameters=own) as module:
        y = tape.call("Functional.linear", tapes.linear, x, own["weight"], own["bias"])
        module.results = (y,)
    return y


def convolutional(tape: Tape, p: Parameters) -> Value:
    x = convolved(tape, Value(images().numpy()), "conv1", p)
    with tape.module("Module.relu.ReLU", x) as module:
        x = tape.call("Functional.relu", tapes.relu, x, inplace=False)
        module.results = (x,)
    x = convolved(tape, x, "conv2", p)
    x = tape.call("Tensor.flatten", tapes.reshaped((2, 32)), x, 1)
    x = projected(tape, x, "fc", p)
    return tape.call("Functional.cross_entropy", tapes.cross_entropy, x, Value(LABELS.numpy()))


def normalized(x: np.ndarray, _: Any, weight: np.ndarray, bias: np.ndarray, eps: float) -> Any:
    (y, _, _), back = tapes.normalized(x, weight, bias, eps)
    return y, back


def block(tape: Tape, x: Value, name: str, p: Parameters) -> Value:
    with tape.module(f"Module.{name}.Block", x, scale=0.5) as module:
        own = below(p, f"{name}.norm")
        with tape.module(f"Module.{name}.norm.LayerNorm", x, parameters=own) as norm:
            y = tape.call("Functional.layer_norm", normalized, x, (8,), own["weight"], own["bias"], 1e-5)
            norm.results = (y,)
        y = projected(tape, y, f"{name}.qkv", p)
        q, k, v = tape.call("Tensor.chunk", tapes.in_thirds, y, 3, dim=-1)
        y = tape.call("Functional.scaled_dot_product_attention", tapes.causal_attention, q, k, v, is_causal=True)
        y = tape.call("Functional.dropout", tapes.unchanged, y, 0.1, False)
        y = projected(tape, y, f"{name}.out", p)
        y = tape.call("Tensor.mul", tapes.scaled, y, 0.5)
        y = tape.call("Tensor.add", tapes.added, x, y)
        module.results = (y,)
    return y


def transformer(tape: Tape, p: Parameters) -> Value:
    text, own = Value(tokens().numpy()), below(p, "embedding")
    settings = None, None, 2.0, False, False  # padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    with tape.module("Module.embedding.Embedding", text, parameters=own) as module:
        x = tape.call("Functional.embedding", tapes.looked_up, text, own["weight"], *settings)
        module.results = (x,)
    for n in range(2):
        x = block(tape, x, f"blocks.{n}", p)
    x = projected(tape, x, "head", p)
    x = tape.call("Tensor.flatten", tapes.reshaped((12, 11)), x, 0, 1)
    return tape.call("Functional.cross_entropy", tapes.cross_entropy, x, Value(tokens().flatten().numpy()))


BY_HAND: dict[Kind, Callable[[Tape, Parameters], Value]] = {Convolutional: convolutional, Transformer: transformer}
POINTS = {Convolutional: ("conv1", "relu", "fc"), Transformer: ("embedding", "blocks.0", "blocks.1.norm", "head")}


@pytest.fixture(scope="module", params=[Convolutional, Transformer])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def tape(kind: Kind) -> Tape:
    tape = Tape()
    tape.backward(BY_HAND[kind](tape, parameters_of(seeded(kind))))
    return tape


def ran(network: nn.Module, debugger: PrecisionDebugger) -> None:
    """A forward and a backward, and nothing else."""
    given, labels = (images(), LABELS) if isinstance(network, Convolutional) else (tokens(), tokens().flatten())
    debugger.start(network)
    x: Tensor = network(given)
    if isinstance(network, Transformer):
        x = x.flatten(0, 1)
    torch.autograd.backward(nn.functional.cross_entropy(x, labels))
    debugger.stop()
    debugger.step()
    debugger.close()


def dumped(base: Path, kind: Kind, level: str, task: str) -> ByHand:
    debugger = debugger_of(PrecisionDebugger, base, level, task)
    network = seeded(kind).eval()
    if level == "debug":
        for name in POINTS[kind]:
            network.get_submodule(name).register_forward_hook(lambda _, __, y, name=name: debugger.save(y, name))
    ran(network, debugger)
    return ByHand(base, SPELLING, level, task)


@pytest.mark.parametrize("task", ["statistics", "md5", "tensor"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix", "debug"])
def test_every_entry_and_every_number_in_it_is_the_one_computed_by_hand(
    tmp_path: Path, tape: Tape, kind: Kind, level: str, task: str
) -> None:
    expected = points(tape, POINTS[kind]) if level == "debug" else tape.expected(level)
    assert dumped(tmp_path, kind, level, task).differences(expected) == []


@pytest.mark.parametrize("level", ["mix", "debug"])
def test_statistics_and_checksums_are_those_of_the_elements(tmp_path: Path, kind: Kind, level: str) -> None:
    assert_tasks_agree(tmp_path, lambda base, task: dumped(base, kind, level, task))
