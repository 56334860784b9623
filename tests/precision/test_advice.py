"""The advice for a small GPT that was trained on real text, compared with really rounding its operands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_fp8 import DTYPES, fp8, rounded
from torch import Tensor, nn
from torch.nn import functional as F
from trained_gpt import Trained, advised, change, formats_of, mean_loss, recorded

from gpt import GPT
from monitor.precision.advice import KEEP, NOT_LOOKED_AT, RARELY, SAFE
from monitor.precision.judging import LIMITS, Casting
from monitor.precision.rounding import GRIDS

LINEARS = [f"h.{block}.{name}" for block in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")] + ["head"]
HYBRID = {"input": "e4m3", "weight": "e4m3", "gradient": "e5m2"}


@contextmanager
def operands_of(model: nn.Module) -> Iterator[dict[str, dict[str, Tensor]]]:
    """The operands of each linear layer in the forward and backward that follow, taken by hooks."""
    found: dict[str, dict[str, Tensor]] = {name: {"weight": model.get_submodule(name).weight.detach()} for name in LINEARS}
    handles = []
    for name in LINEARS:

        def taken(_module: Any, inputs: Any, output: Tensor, name: str = name) -> None:
            found[name]["input"] = inputs[0].detach()
            output.register_hook(lambda gradient: found[name].__setitem__("gradient", gradient))

        handles.append(model.get_submodule(name).register_forward_hook(taken))
    yield found
    for handle in handles:
        handle.remove()


def test_every_linear_layer_of_a_healthy_model_is_safe_in_the_usual_formats(trained: Trained, tmp_path: Path) -> None:
    advice = advised(recorded(trained.copy(), [trained.batch(1)], tmp_path))
    assert [one.name for one in advice.gemms] == LINEARS
    assert formats_of(advice) == dict.fromkeys(LINEARS, HYBRID)
    assert advice.is_clean
    assert advice.steps == 1


@pytest.mark.parametrize("power_of_two", [True, False])
def test_what_is_said_of_each_operand_is_what_a_cast_does(trained: Trained, tmp_path: Path, power_of_two: bool) -> None:
    model, (tokens, following) = trained.copy(), trained.batch(2)
    advice = advised(recorded(model, [(tokens, following)], tmp_path), power_of_two=power_of_two)
    with operands_of(model) as operands:
        mean_loss(model(tokens), following).backward()
    for layer in advice.gemms:
        for what, of in layer.operands.items():
            x = operands[layer.name][what].double()
            for name in ("e4m3", "e5m2"):
                said = of.casts[Casting(name, "current")].numbers
                scale = GRIDS[name].greatest / float(x.abs().max())
                q = rounded(x, name, 2.0 ** torch.tensor(scale).log2().floor().item() if power_of_two else scale)
                underflow, error = float(((q == 0) & (x != 0)).double().mean()), float((q - x).norm() / x.norm())
                assert error <= said["most_error"] * (1 + 1e-6)
                assert underflow <= said["most_underflow"] + 1e-9
                assert said["underflow"] == pytest.approx(underflow, abs=1e-9 if power_of_two else 0.01)
                assert said["error"] == pytest.approx(error, rel=0.5)
                assert said["saturated"] == 0.0


def test_the_loss_changes_by_no_more_than_is_said(trained: Trained, tmp_path: Path) -> None:
    model = trained.copy()
    for seed in range(3):
        batch = trained.batch(10 + seed)
        advice = advised(recorded(model, [batch], tmp_path / str(seed)))
        found = abs(change(model, batch, formats_of(advice)))
        assert 0 < found <= RARELY * advice.loss.expected < advice.loss.most
        assert advice.loss.expected < 0.01  # of a loss of 2.5


def test_what_is_said_of_several_steps_holds_for_each_of_them(trained: Trained, tmp_path: Path) -> None:
    model, batches = trained.copy(), [trained.batch(20 + seed) for seed in range(3)]
    advice = advised(recorded(model, batches, tmp_path))
    for step, batch in enumerate(batches):
        alone = advised(recorded(model, [batch], tmp_path / str(step)))
        assert alone.loss.most <= advice.loss.most
        assert alone.loss.expected <= advice.loss.expected
        assert abs(change(model, batch, formats_of(advice))) <= RARELY * advice.loss.expected


def test_the_first_order_bound_is_that_of_the_gradients(trained: Trained, tmp_path: Path) -> None:
    """For one layer, against norms that the test takes itself, and against a direction that reaches the bound."""
    model, (tokens, following) = trained.copy(), trained.batch(3)
    advice = advised(recorded(model, [(tokens, following)], tmp_path))
    (layer,) = [one for one in advice.gemms if one.name == "h.1.mlp.0"]
    module = model.get_submodule(layer.name)
    taken: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    gradients = torch.autograd.grad(mean_loss(model(tokens), following), [module.weight, taken[0]], materialize_grads=True)
    errors = [layer.operands[what].casts[Casting("e4m3", "current")].numbers["most_error"] for what in ("weight", "input")]
    bound = sum(
        float(gradient.norm() * x.detach().norm()) * error
        for gradient, x, error in zip(gradients, (module.weight, taken[0]), errors, strict=True)
    )
    assert layer.loss.most == pytest.approx(bound, rel=1e-4)


# --- Plants that change the operands but not the function: a channel is multiplied and then divided.


def with_outliers(model: GPT, times: float) -> str:
    """A channel of the input of a layer is large, and its column of the weight small."""
    with torch.no_grad():
        for one in (model.h[1].mlp_norm.weight, model.h[1].mlp_norm.bias):
            one[5] *= times
        model.h[1].mlp[0].weight[:, 5] /= times
    return "h.1.mlp.0"


def with_heavy_tails(model: GPT, times: float) -> str:
    """A row of the weight is large: the values of attention in one channel."""
    with torch.no_grad():
        for one in (model.h[0].attn.qkv.weight, model.h[0].attn.qkv.bias):
            one[128 + 7] *= times
        model.h[0].attn.proj.weight[:, 7] /= times
    return "h.0.attn.qkv"


@pytest.mark.parametrize(("plant", "what"), [(with_outliers, "input"), (with_heavy_tails, "weight")])
def test_an_operand_with_outliers_is_not_advised_in_a_format_that_loses_the_others(
    trained: Trained, tmp_path: Path, plant: Any, what: str
) -> None:
    model, healthy, batch = trained.copy(), trained.copy(), trained.batch(4)
    name = plant(model, 1e7)
    advice = advised(recorded(model, [batch], tmp_path))
    layer = next(one for one in advice.gemms if one.name == name)
    assert layer.operands[what].format == "e5m2"  # which has the range
    safe = abs(change(model, batch, formats_of(advice)))
    assert safe <= RARELY * advice.loss.expected
    warned = abs(change(model, batch, {name: HYBRID}))
    assert warned > 5 * abs(change(healthy, batch, {name: HYBRID}))
    assert warned > RARELY * (layer.loss.expected or 0)
    assert warned > safe


@pytest.mark.parametrize("plant", [with_outliers, with_heavy_tails])
def test_a_layer_whose_outliers_are_beyond_both_formats_stays_in_bf16_and_matters(
    trained: Trained, tmp_path: Path, plant: Any
) -> None:
    model, batch = trained.copy(), trained.batch(5)
    name = plant(model, 1e12)
    advice = advised(recorded(model, [batch], tmp_path))
    layer = next(one for one in advice.gemms if one.name == name)
    assert layer.verdict == KEEP
    assert "in e4m3" in layer.worst.why
    assert not advice.is_clean
    safe = abs(change(model, batch, formats_of(advice)))
    assert safe <= RARELY * advice.loss.expected
    assert abs(change(model, batch, formats_of(advice, KEEP))) > 10 * max(safe, 0.003)


def weighed(logits: Tensor, following: Tensor) -> Tensor:
    """A loss whose tokens have weights over sixteen powers of ten: so have the gradients of outputs."""
    each = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
    return (each * torch.logspace(-16, 0, len(each))).sum()


def test_gradients_of_a_wide_range_are_warned_about_and_lost(trained: Trained, tmp_path: Path) -> None:
    model, batch = trained.copy(), trained.batch(6, size=2)
    advice = advised(recorded(model, [batch], tmp_path, weighed))
    head = next(one for one in advice.gemms if one.name == "head")
    assert (head.verdict, head.worst.what, head.operands["gradient"].format) == (KEEP, "gradient", "")
    assert 0.2 < head.worst.casts[Casting("e5m2", "current")].numbers["underflow"] < 0.9
    healthy = advised(recorded(model, [batch], tmp_path / "healthy"))
    lost = {loss: lost_gradients(model, batch, loss) for loss in (weighed, mean_loss)}
    assert "head" in formats_of(healthy)
    assert lost[weighed] > 10 * lost[mean_loss]


def lost_gradients(model: GPT, batch: Any, loss: Any) -> float:
    """The share of tokens whose gradient before the head is off by more than half if the head is in FP8."""
    before, inside = (gradient_before_head(model, batch, loss, fake) for fake in (False, True))
    off = (inside - before).norm(dim=-1) / before.norm(dim=-1)
    return float((off > 0.5).double().mean() + 0.001)


def gradient_before_head(model: GPT, batch: Any, loss: Any, fake: bool) -> Tensor:
    taken: list[Tensor] = []
    handle = model.head.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    with fp8(model, {"head": HYBRID} if fake else {}):
        if fake:
            handle.remove()
            handle = model.norm.register_forward_hook(lambda _module, _inputs, output: taken.append(output))
        total = loss(model(batch[0]), batch[1])
        (found,) = torch.autograd.grad(total, taken[-1])
    handle.remove()
    return found.double()


# --- Scaling from earlier steps, and what is not known.


def test_delayed_scaling_saturates_where_the_operand_grows_and_current_scaling_does_not(
    trained: Trained, tmp_path: Path
) -> None:
    model, batch = trained.copy(), trained.batch(7)
    batches = [batch] * 3
    run = recorded(model, batches, tmp_path / "before")
    assert advised(run, way="delayed").is_clean
    grown = trained.copy()
    optimizer_steps = growing(grown, tmp_path / "grown", batch)
    delayed, current = (advised(optimizer_steps, way=way) for way in ("delayed", "current"))
    layer = next(one for one in delayed.gemms if one.name == "h.1.mlp.0")
    cast = layer.operands["input"].casts[Casting("e4m3", "delayed")]
    assert (layer.verdict, cast.step) == (KEEP, 2)
    assert cast.numbers["saturated"] > LIMITS["saturated"]
    assert next(one for one in current.gemms if one.name == "h.1.mlp.0").verdict == SAFE
    assert (
        next(one for one in advised(optimizer_steps, way="delayed", margin=3).gemms if one.name == "h.1.mlp.0").verdict == SAFE
    )


def growing(model: GPT, base: Path, batch: Any) -> Path:
    """The input of a layer is four times as large from the third step on."""

    @torch.no_grad()
    def grow(step: int) -> None:
        if step == 2:
            model.h[1].mlp_norm.weight *= 4
            model.h[1].mlp_norm.bias *= 4
            model.h[1].mlp[0].weight /= 4

    return recorded(model, [batch] * 3, base, before=grow)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"param_distribution": False}, "There are no rows of param_origin for the weight of layers."),
        ({"xy_distribution": False, "all_xy": False}, "There are no rows of actv for the input of layers."),
        ({"ops": ["norm", "absmax"]}, "There are no histograms of magnitudes."),
        ({"format": "csv", "ops": ["magnitude_histogram"]}, "Rows have no histogram, norm or absmax."),
    ],
)
def test_a_layer_is_never_safe_by_absence(trained: Trained, tmp_path: Path, fields: Any, said: str) -> None:
    advice = advised(recorded(trained.copy(), [trained.batch(8)], tmp_path, **fields))
    assert {one.verdict for one in advice.gemms} <= {NOT_LOOKED_AT}
    assert any(one.startswith(said) for one in advice.lacking)
    assert not advice.is_clean


def test_a_layer_with_nan_is_not_looked_at_and_the_step_is_named(trained: Trained, tmp_path: Path) -> None:
    model, batch = trained.copy(), trained.batch(9)
    with torch.no_grad():
        model.h[1].mlp[0].weight[0, 0] = float("nan")
    advice = advised(recorded(model, [batch], tmp_path))
    layer = next(one for one in advice.gemms if one.name == "h.1.mlp.0")
    assert (layer.verdict, layer.operands["weight"].why) == (NOT_LOOKED_AT, "NaN or an infinity in step 0")
    assert advice.loss.most is None or "h.1.mlp.0" not in formats_of(advice)


def test_the_ready_file_records_what_is_needed(trained: Trained, tmp_path: Path) -> None:
    ready = Path(__file__).resolve().parents[2] / "configs" / "low_precision.json"
    fields = {name: value for name, value in json.loads(ready.read_text()).items() if name != "targets"}
    advice = advised(recorded(trained.copy(), [trained.batch(1)], tmp_path, **{"format": "csv", **fields}))
    assert formats_of(advice) == dict.fromkeys(LINEARS, HYBRID)
    assert advice.loss.expected is not None


def test_steps_that_are_read_in_parts_give_the_same_advice(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = growing(trained.copy(), tmp_path, trained.batch(7))
    together = advised(run, way="delayed", history=1)
    monkeypatch.setattr("monitor.precision.operands.ROWS_AT_A_TIME", 1)
    assert advised(run, way="delayed", history=1) == together


def test_every_dtype_of_the_emulation_has_the_greatest_number_of_its_grid() -> None:
    for name, dtype in DTYPES.items():
        assert torch.finfo(dtype).max == GRIDS[name].greatest


def test_a_step_of_two_micro_batches_has_the_bound_of_their_sum(trained: Trained, tmp_path: Path) -> None:
    """The gradients of activations are those of half the loss each; the loss of the step is the mean."""
    model, halves = trained.copy(), [trained.batch(30, size=2), trained.batch(31, size=2)]
    whole = [torch.cat(parts) for parts in zip(*halves, strict=True)]
    once = advised(recorded(model, [whole], tmp_path / "once"))
    twice = advised(recorded(model, halves, tmp_path / "twice", micro_batches=2))
    assert [one.operands["input"].rows for one in twice.gemms] == [2] * 9
    assert twice.loss.expected == pytest.approx(once.loss.expected, rel=0.15)
    assert twice.loss.most == pytest.approx(once.loss.most, rel=0.1)
    assert abs(change(model, whole, formats_of(twice))) <= RARELY * twice.loss.expected
