"""``seed_all``."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import Launcher, Nursery
from torch import nn

from monitor.pytorch import seed_all
from monitor.pytorch.dump.backend import ATTRIBUTES, BUILTINS, FUNCTIONALS

NAMES = {*FUNCTIONALS, *(name for _, name, _, _ in BUILTINS)}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout as it is, when the test is over."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for kind in ATTRIBUTES:
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == "torch":
            for name in NAMES & vars(module).keys():
                monkeypatch.setattr(module, name, vars(module)[name])


def test_a_seed_repeats_random_numbers() -> None:
    found = []
    for _ in range(2):
        seed_all(7)
        found.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert found[0] == found[1]


def test_dropout_that_is_made_afterwards_has_a_probability_of_0() -> None:
    before = nn.Dropout(0.9)
    seed_all(rm_dropout=True)
    assert (before.p, nn.Dropout(0.9).p, nn.Dropout2d(0.9, inplace=True).inplace) == (0.9, 0.0, True)
    assert torch.equal(nn.Dropout(0.9)(torch.ones(100)), torch.ones(100))


@pytest.mark.parametrize("name", FUNCTIONALS)
def test_no_functional_drops_anything(name: str) -> None:
    x = torch.rand(*{"dropout1d": (2, 3, 4), "dropout2d": (2, 3, 4, 4)}.get(name, (2, 3, 4, 4, 4)))
    seed_all(rm_dropout=True)
    function = getattr(nn.functional, name)
    for y in (function(x, 0.5, True), function(x, p=0.5, training=True), function(input=x, training=True)):
        assert torch.equal(x, y)
    clone = x.clone()
    assert function(clone, 0.5, True, inplace=True) is clone


@pytest.mark.parametrize("name", [name for place, name, _, _ in BUILTINS if place is torch])
def test_no_function_of_torch_drops_anything(name: str) -> None:
    x = torch.rand(2, 3, 4)
    seed_all(rm_dropout=True)
    found = getattr(torch, name)(x.clone(), 0.5, True)
    assert torch.equal(x, found[0] if name == "native_dropout" else found)


def test_attention_drops_nothing() -> None:
    q = torch.rand(2, 2, 5, 4)
    attend = nn.functional.scaled_dot_product_attention
    expected = attend(q, q, q)
    seed_all(rm_dropout=True)
    attend = nn.functional.scaled_dot_product_attention
    assert torch.equal(expected, attend(q, q, q, None, 0.9))
    assert torch.equal(expected, attend(q, q, q, dropout_p=0.9))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(8, 2, dropout=0.5),
        lambda: nn.LSTM(8, 8, num_layers=2, dropout=0.5),
        lambda: nn.GRU(8, 8, num_layers=2, dropout=0.5),
        lambda: nn.RNN(8, 8, num_layers=2, dropout=0.5),
        lambda: nn.TransformerEncoderLayer(8, 2, dropout=0.5),
        lambda: nn.AlphaDropout(0.5),
        lambda: nn.FeatureAlphaDropout(0.5),
    ],
    ids=["MultiheadAttention", "LSTM", "GRU", "RNN", "TransformerEncoderLayer", "AlphaDropout", "FeatureAlphaDropout"],
)
def test_no_module_drops_anything(make: Callable[[], nn.Module]) -> None:
    x = torch.rand(4, 3, 8)
    seed_all(rm_dropout=True)
    module = make()
    given = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
    first, second = (module(*given) for _ in range(2))
    pairs = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
    assert torch.equal(*next(iter(pairs)))


def test_nothing_is_drawn_in_place_of_what_would_have_been_dropped() -> None:
    seed_all(rm_dropout=True)
    state = torch.get_rng_state()
    nn.functional.dropout(torch.ones(10), 0.5)
    nn.Dropout(0.5)(torch.ones(10))
    assert torch.equal(state, torch.get_rng_state())


def test_asking_twice_changes_nothing_more() -> None:
    seed_all(rm_dropout=True)
    first = nn.functional.dropout
    seed_all(rm_dropout=True)
    assert nn.functional.dropout is first


COMPILED = """
import torch
from torch import nn
from monitor.pytorch import seed_all

seed_all(rm_dropout=True)
x, q = torch.ones(2, 4), torch.rand(1, 2, 3, 4)
assert torch.equal(x, torch.jit.script(nn.Dropout(0.5))(x))
compiled = torch.compile(lambda q: nn.functional.dropout(q, 0.5), backend="eager", fullgraph=True)
assert torch.equal(q, compiled(q))
"""


def test_compilers_still_take_what_drops(tmp_path: Path, nursery: Nursery) -> None:
    """In a process of its own: a compiler keeps the functions that it has found, also after a test has put them back."""
    (tmp_path / "compiled.py").write_text(COMPILED)
    launcher = Launcher(tmp_path, nursery)
    ended = launcher.run(str(tmp_path / "compiled.py"))
    assert launcher.clean_up() == ([], [])
    assert ended.status == 0, ended.err


@pytest.mark.parametrize("name", ["mode", "rm_dropout"])
def test_a_flag_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is 'False': expected True or False"):
        seed_all(**{name: "False"})


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1.5, True])
def test_a_seed_that_is_none_is_refused(seed: object) -> None:
    with pytest.raises(ValueError, match="expected a whole number from 0 to 4294967295"):
        seed_all(seed)
