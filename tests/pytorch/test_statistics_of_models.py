"""Statistics of the activations, gradients, weights and moments of real models are those of their tensors in float64."""

from __future__ import annotations

import math
from collections import Counter
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from evidence import PROVES, sampled
from small_transformers import MODELS, inputs_of, made
from torch import Tensor, nn
from watching import Output, attached

from monitor.stats.histograms import PERCENTILES

OPS = ("rms", "absmean", "smallest_nonzero", "skewness", "kurtosis", "absmax", *PERCENTILES)
CONFIG: dict[str, Any] = {
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "xy_distribution": True,
    "all_xy": True,
    "forward_only": True,
    "ops": list(OPS),
    "ndigits": 17,
}
Tensors = dict[tuple[str, str], Tensor]


def reference(model: nn.Module, inputs: dict[str, Tensor]) -> Tensors:
    """What one step of a copy of the model reads and writes: outputs of modules, gradients, weights and moments."""
    model = deepcopy(model)
    found: Tensors = {}
    calls: Counter[str] = Counter()

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                call = calls[name]
                calls[name] += 1
                found["actv", f"{name}.output" + (f"#{call}" if call else "")] = output.detach().clone()

        return hook

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(keep(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, inputs)
    for name, p in model.named_parameters():
        if p.grad is not None:
            found["grad_reduced", name] = p.grad.clone()
            found["param_updated", name] = p.detach().clone()
            found["exp_avg_sq_2", name] = optimizer.state[p]["exp_avg_sq"].clone()
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> None:
    model(**inputs).logits.square().mean().backward()
    optimizer.step()


def assert_statistics(values: dict[str, Any], x: Tensor, *, rounded: float = 0.0) -> None:
    """The row is that of ``x``.

    Args:
        rounded: How far elements may be from those of ``x``, as a share of the greatest: compiled code rounds otherwise.
    """
    a = x.double().numpy().ravel()
    off = a - a.mean()
    spread = np.square(off).mean()
    magnitudes = np.abs(a)
    expected = {"rms": math.sqrt(np.square(a).mean()), "absmean": magnitudes.mean(), "absmax": magnitudes.max()}
    if magnitudes.any():
        expected["smallest_nonzero"] = magnitudes[magnitudes > 0].min()
    if a.min() < a.max():
        expected |= {"skewness": (off**3).mean() / spread**1.5, "kurtosis": (off**4).mean() / spread**2 - 3}
    for op in ("rms", "absmean", "absmax", "smallest_nonzero", "skewness", "kurtosis"):
        if op not in expected:
            assert values[op] is None, op
        else:
            apart = 1e-5 if op in ("skewness", "kurtosis") else rounded * magnitudes.max()
            assert values[op] == pytest.approx(expected[op], rel=1e-5, abs=apart), op
    for op, share in PERCENTILES.items():
        element = np.quantile(magnitudes, share, method="inverted_cdf")
        off_by = rounded * magnitudes.max()
        assert values[op] == 0 if element == 0 else element / 2 - off_by < values[op] < 2 * element + off_by, op


COMPILED = [(name, "compiled") for name in MODELS]


@pytest.mark.parametrize(("name", "how"), [*((name, "eager") for name in MODELS), *sampled(COMPILED, 2, 6)])
def test_statistics_of_a_model_are_those_of_its_tensors(output: Output, name: str, how: str) -> None:
    model, inputs = made(name), inputs_of(name)
    expected = reference(model, inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # The rows do not depend on the backend; it takes most of the time.
    run = torch.compile(model, backend="inductor" if PROVES else "aot_eager") if how == "compiled" else model
    with attached(output, model, optimizer, **CONFIG):
        step(run, optimizer, inputs)
    found = {(kind, row.name): row.values for kind in ("actv", "grad_reduced", "param_updated") for row in output.rows(kind)}
    places = [place for place in expected if place[0] != "exp_avg_sq_2"]
    missing = [place for place in places if place not in found]
    assert not missing
    assert len(places) > 40
    for place in places:
        assert_statistics(found[place], expected[place], rounded=0.0 if how == "eager" else 1e-6)


@pytest.mark.parametrize("name", ["gpt2"])
def test_moments_have_statistics_in_the_step_after(output: Output, name: str) -> None:
    model, inputs = made(name), inputs_of(name)
    expected = reference(model, inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with attached(output, model, optimizer, **CONFIG):
        for _ in range(2):
            step(model, optimizer, inputs)
            optimizer.zero_grad()
    rows = {row.name: row.values for row in output.rows("exp_avg_sq") if row.step == 1}
    assert rows
    for row, values in rows.items():
        assert_statistics(values, expected["exp_avg_sq_2", row])
