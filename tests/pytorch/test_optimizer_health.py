"""Whether rounding swallows updates and whether Adam's second moment fits, against float64 and the bits of weights."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, SparseAdam
from watching import Output, attached, train, warnings_in

from monitor.failures import NOTHING_OF
from monitor.pytorch.updates import TorchWeightCopies
from monitor.stats.torch.updates import CHUNK, staleness, swallowed

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))
WORDS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16, torch.float16: torch.int16}
HEALTH: dict[str, Any] = {"optimizer_health": True, "ndigits": 17}
Expected = dict[tuple[str, int], dict[str, float | None]]


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


class Reference:
    """What a loop must have recorded, from the tensors around each step.

    The second moment is that of the optimizer's state, or kept here in float64 from the gradients alone.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, own_moments: bool) -> None:
        self.rows: Expected = {}
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._optimizer, self._own = optimizer, own_moments
        self._before: dict[str, Tensor] = {}
        self._moments: dict[str, Tensor] = {}
        self._greatest: dict[str, Tensor] = {}
        self._step = 0
        optimizer.register_step_pre_hook(self._begins)
        optimizer.register_step_post_hook(self._ended)

    def _begins(self, *_: Any) -> None:
        self._before = {self._names[id(p)]: p.detach().clone() for g in self._optimizer.param_groups for p in g["params"]}

    def _ended(self, *_: Any) -> None:
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    name = self._names[id(p)]
                    self.rows[name, self._step] = self._health(name, p, group)
        self._step += 1

    def _health(self, name: str, p: nn.Parameter, group: dict[str, Any]) -> dict[str, float | None]:
        before, words = self._before[name], WORDS[p.dtype]
        same = before.view(words).numpy() == p.detach().view(words).numpy()
        assert p.grad is not None
        g = p.grad.double().numpy()
        updated = (g != 0) & bool(float(group["lr"]))
        decoupled = isinstance(self._optimizer, AdamW)
        g = g * (-1 if group.get("maximize") else 1)
        g = g if decoupled else g + float(group["weight_decay"]) * before.double().numpy()
        root = np.sqrt(self._corrected(name, p, g, group))
        eps = group["eps"]
        return {
            "swallowed": float((same & updated).sum() / updated.sum()) if updated.any() else None,
            "staleness": math.sqrt(np.mean(g**2 / np.maximum(root, eps) ** 2)),
            "below_eps": float((root < eps).mean()),
        }

    def _corrected(self, name: str, p: nn.Parameter, g: np.ndarray, group: dict[str, Any]) -> np.ndarray:
        beta, state = float(group["betas"][1]), self._optimizer.state[p]
        steps = self._step + 1
        if self._own:
            v = self._moments[name] = beta * self._moments.get(name, 0.0) + (1 - beta) * torch.from_numpy(g) ** 2
            most = self._greatest[name] = torch.maximum(v, self._greatest.get(name, v))
            return (most if group["amsgrad"] else v).numpy() / (1 - beta**steps)
        return state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].double().numpy() / (1 - beta**steps)


def found(output: Output) -> Expected:
    rows = output.rows("optimizer_health")
    by_place = {(row.name, row.step): row.values for row in rows}
    assert len(by_place) == len(rows)
    return by_place


def assert_recorded(output: Output, expected: Expected, tolerance: float) -> None:
    rows = found(output)
    assert sorted(rows) == sorted(expected)
    for place, values in expected.items():
        known = {column: value for column, value in values.items() if value is not None}
        assert {column: value for column, value in rows[place].items() if value is not None} == pytest.approx(
            known, rel=tolerance, abs=1e-12
        ), place


# --- Every way of Adam.

ADAMS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adam": lambda model: Adam(model.parameters(), lr=0.1),
    "Adam, decay in the gradient": lambda model: Adam(model.parameters(), lr=0.1, weight_decay=0.7),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.7),
    "amsgrad": lambda model: Adam(model.parameters(), lr=0.1, amsgrad=True),
    "maximize": lambda model: Adam(model.parameters(), lr=0.1, maximize=True, weight_decay=0.7),
    "foreach": lambda model: Adam(model.parameters(), lr=0.1, foreach=True, maximize=True, weight_decay=0.7),
    "fused": lambda model: Adam(model.parameters(), lr=0.1, fused=True, weight_decay=0.7),
    "hyperparameters in tensors": lambda model: Adam(
        model.parameters(), lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "eps that dominates": lambda model: Adam(model.parameters(), lr=0.1, eps=3.0),
    "groups that differ": lambda model: AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-2},
            {"params": model[2].parameters(), "lr": 0.0, "amsgrad": True},
        ]
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("adam", ADAMS)
def test_every_step_of_adam_is_recorded_as_it_was(output: Output, adam: str, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    optimizer = ADAMS[adam](model)
    expected = Reference(model, optimizer, own_moments=dtype is not torch.bfloat16)
    with attached(output, model, optimizer, **HEALTH):
        train(model, optimizer, 4, X.to(dtype))
    assert len(expected.rows) == 16
    assert_recorded(output, expected.rows, 1e-5)


# --- Models of transformers.


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=1))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL, max_position_embeddings=16))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1))


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
MODELS = {one.__name__: one for one in (llama, mixtral, gpt2, bert, vit, t5, mamba)}


def loss_of(model: nn.Module, step: int) -> Tensor:
    seeded = torch.Generator().manual_seed(step)
    if "ViT" in type(model).__name__:
        images = torch.randn(2, 3, 8, 8, generator=seeded).to(next(model.parameters()).dtype)
        return model(pixel_values=images, labels=torch.tensor([0, 1])).loss
    tokens = torch.randint(0, 64, (2, 8), generator=seeded)
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_a_model_is_recorded_as_it_was(output: Output, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train().to(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    expected = Reference(model, optimizer, own_moments=dtype is torch.float32)
    with attached(output, model, optimizer, **HEALTH):
        for step in range(3):
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert {place[0] for place in expected.rows} == {name for name, p in model.named_parameters() if p in optimizer.state}
    assert_recorded(output, expected.rows, 1e-5)


# --- Planted states.


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.bfloat16, 0.9, 1.0), (torch.float32, 0.0, 0.0)])
def test_weights_of_bfloat16_swallow_updates_that_float32_keeps(
    output: Output, dtype: torch.dtype, least: float, most: float
) -> None:
    model = nn.Linear(64, 64).to(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    with attached(output, model, optimizer, **HEALTH):
        train(model, optimizer, 3, torch.randn(8, 64).to(dtype))
    shares = [row.values["swallowed"] for row in output.rows("optimizer_health")]
    assert len(shares) == 6
    assert least <= min(shares) <= max(shares) <= most


def test_a_gradient_that_jumps_is_ahead_of_its_second_moment(output: Output) -> None:
    """Of a constant gradient the corrected second moment is its square, so the root mean square is 1 before the jump."""
    weight = nn.Parameter(torch.ones(100))
    model = nn.Module()
    model.register_parameter("weight", weight)
    optimizer = Adam(model.parameters(), lr=1e-6, betas=(0.9, 0.999))
    with attached(output, model, optimizer, **HEALTH):
        for step in range(10):
            weight.grad = torch.full((100,), 100.0 if step == 9 else 1.0)
            optimizer.step()
    rows = [row.values["staleness"] for row in output.rows("optimizer_health")]
    assert rows[:9] == pytest.approx([1.0] * 9, rel=1e-6)
    v = (0.999 * (1 - 0.999**9) + 0.001 * 100.0**2) / (1 - 0.999**10)
    assert rows[9] == pytest.approx(100.0 / math.sqrt(v), rel=1e-5)
    assert rows[9] > 2.3


def test_a_step_of_the_rate_zero_swallows_nothing(output: Output) -> None:
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, **HEALTH):
        train(model, optimizer, 1, X)
    assert [row.values["swallowed"] for row in output.rows("optimizer_health")] == [None] * 4
    assert [row.values["staleness"] for row in output.rows("optimizer_health")] == pytest.approx([1.0] * 4, rel=1e-6)


def test_elements_without_a_gradient_do_not_count(output: Output) -> None:
    """Rows of an embedding that no token names have no update, however long Adam's first moment remembers others."""
    model = nn.Sequential(nn.Embedding(10, 4))
    optimizer = Adam(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **HEALTH):
        for token in (3, 4):
            train(model, optimizer, 1, torch.tensor([token]))
    assert [row.values["swallowed"] for row in output.rows("optimizer_health")] == [0.0, 0.0]
    assert [row.values["below_eps"] for row in output.rows("optimizer_health")] == [0.9, 0.8]


# --- Steps that are not plain.


def test_the_gradient_counts_as_the_optimizer_used_it(output: Output) -> None:
    """Accumulated over two micro-batches, without the loss scale, and clipped."""
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    expected = Reference(model, optimizer, own_moments=True)
    scaler = GradScaler("cpu", init_scale=1024.0)
    with attached(output, model, optimizer, grad_acc_steps=2, **HEALTH):
        for step in range(3):
            for micro_step in range(2):
                scaler.scale(model(X * (1 + step + micro_step)).square().sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_recorded(output, expected.rows, 1e-5)


def test_a_fused_optimizer_that_unscales_by_itself_is_recorded_as_it_was(output: Output) -> None:
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    expected = Reference(model, optimizer, own_moments=True)
    scaler = GradScaler("cpu", init_scale=1024.0)
    with attached(output, model, optimizer, **HEALTH):
        for step in range(3):
            scaler.scale(model(X * (1 + step)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_recorded(output, expected.rows, 1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_has_no_rows(output: Output, fused: bool) -> None:
    model = small_model()
    optimizer = Adam(model.parameters(), fused=fused)
    scaler = GradScaler("cpu", init_scale=4.0)
    with attached(output, model, optimizer, **HEALTH):
        for factor in (1.0, math.inf, 1.0):
            scaler.scale(model(X * factor).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert {0, 2} == {row.step for row in output.rows("optimizer_health")}


class NamedAlike(Optimizer):
    """An optimizer of another package, with the name and the hyperparameters of a known Adam. It steps by another rule, as that
    of GaLore does.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.sub_(0.1 * p.grad)


NamedAlike.__name__ = "Adam"


def test_an_optimizer_that_only_has_the_name_of_adam_is_named_and_keeps_what_needs_none(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = NamedAlike(model.parameters())
    with attached(output, model, optimizer, **HEALTH, ur_distribution=True, format=["csv", "hdf5"]):
        train(model, optimizer, 2, X)
    assert [row.values for row in output.rows("optimizer_health")] == [
        {"staleness": None, "swallowed": 0.0, "below_eps": None}
    ] * 8
    assert output.rows("adam_update") == []
    reason = f"an Adam optimizer, and {__name__}.Adam is not a known one"
    assert sum(reason in said for said in warnings_in(caplog)) == len(warnings_in(caplog)) == 2


def test_only_stepped_parameters_have_rows(output: Output) -> None:
    """The first layer is frozen, and the bias of the second takes no part in the loss."""
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **HEALTH):
        for _ in range(2):
            nn.functional.linear(X[:, :4], model[2].weight).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [row.name for row in output.rows("optimizer_health")] == ["2.weight"] * 2


@pytest.mark.parametrize("update_ratio", [False, True])
def test_a_parameter_that_is_frozen_while_training_has_no_rows_from_then_on(output: Output, update_ratio: bool) -> None:
    """``update_ratio`` keeps copies of frozen weights, too."""
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **HEALTH, update_ratio=update_ratio):
        for step in range(4):
            model[0].requires_grad_(step < 2)
            train(model, optimizer, 1, X)
    rows = [(row.name, row.step) for row in output.rows("optimizer_health")]
    assert sorted(rows) == sorted(
        (name, step) for name, _ in model.named_parameters() for step in range(2 if "0." in name else 4)
    )
    assert {row.values["swallowed"] for row in output.rows("optimizer_health")} == {0.0}


def test_an_optimizer_without_second_moment_has_no_staleness(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model(torch.bfloat16)
    optimizer = SGD(model.parameters(), lr=1e-6, momentum=0.9)
    with attached(output, model, optimizer, **HEALTH):
        train(model, optimizer, 2, X.bfloat16())
    rows = output.rows("optimizer_health")
    assert len(rows) == 8
    assert {(row.values["staleness"], row.values["below_eps"]) for row in rows} == {(None, None)}
    assert min(row.values["swallowed"] for row in rows) > 0.5
    reason = "staleness and below_eps need an Adam optimizer, and SGD is none: their cells are empty"
    assert sum(reason in said for said in warnings_in(caplog)) == 1


def zero(optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def enlarge(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(100)


@pytest.mark.parametrize("change", [Optimizer.zero_grad, zero, enlarge])
@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_a_gradient_that_a_hook_of_the_step_changes_has_no_staleness(
    output: Output, change: Callable[[Optimizer], None], kind: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.1, **kind)
    optimizer.register_step_post_hook(lambda stepped, *_: change(stepped))
    with attached(output, model, optimizer, **HEALTH):
        train(model, optimizer, 2, X)
    empty = {"staleness": None, "swallowed": 0.0, "below_eps": None}
    assert [row.values for row in output.rows("optimizer_health")] == [empty] * 8
    (said,) = warnings_in(caplog)
    assert "gradients are changed or cleared inside the optimizer's step or in a hook of it (first: 0.weight)" in said
    assert all(cause.startswith(NOTHING_OF) for cause in output.manifest()["failures"])  # the monitor has not failed


@pytest.mark.parametrize("kind", [{"foreach": False}, {"fused": True}])
def test_a_gradient_of_fsdp2_that_a_hook_clears_has_no_staleness(output: Output, tmp_path: Path, kind: dict[str, bool]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = fully_shard(small_model(), mesh=dist.init_device_mesh("cpu", (1,)))
        optimizer = AdamW(model.parameters(), lr=0.1, **kind)
        optimizer.register_step_post_hook(lambda stepped, *_: zero(stepped))
        with attached(output, model, optimizer, **HEALTH):
            train(model, optimizer, 2, X)
    finally:
        dist.destroy_process_group()
    cells = [(row.values["staleness"], row.values["below_eps"]) for row in output.rows("optimizer_health")]
    assert cells == [(None, None)] * 8


def test_a_step_that_clears_its_gradients_has_no_staleness(output: Output) -> None:
    class Clearing(AdamW):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            self.zero_grad(set_to_none=False)
            return result

    model = small_model()
    optimizer = Clearing(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **HEALTH):
        train(model, optimizer, 2, X)
    empty = {"staleness": None, "swallowed": 0.0, "below_eps": None}
    assert [row.values for row in output.rows("optimizer_health")] == [empty] * 8


def test_a_gradient_into_which_sgd_adds_its_momentum_counts_by_that(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    with attached(output, model, optimizer, **HEALTH):
        train(model, optimizer, 2, X)
    assert [row.values["swallowed"] for row in output.rows("optimizer_health")] == [0.0] * 8


def test_no_gradient_is_held_beyond_the_step(output: Output) -> None:
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **HEALTH):
        model(X).square().sum().backward()
        held = [weakref.ref(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert [one() for one in held] == [None] * 4


@pytest.mark.parametrize("optimizer_of", [lambda p: SGD(p, 0.1, momentum=0.9), lambda p: SparseAdam(p, 0.1)])
def test_sparse_gradients_are_named_as_the_reason_for_no_rows(
    output: Output, optimizer_of: Callable[[Any], Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True))
    optimizer = optimizer_of(model.parameters())
    with attached(output, model, optimizer, **HEALTH):
        train(model, optimizer, 2, torch.tensor([1, 2]))
    assert "parameters with sparse gradients have no rows (first: 0.weight)" in warnings_in(caplog)[0]
    assert not any("needs an Adam" in said or "need an Adam" in said for said in warnings_in(caplog))


def test_complex_parameters_are_named_as_the_reason_for_no_rows(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, **HEALTH):
        model.weight.grad = torch.ones(3, dtype=torch.complex64)
        optimizer.step()
    assert "complex parameters have no rows (first: weight)" in warnings_in(caplog)[0]


def test_a_second_moment_that_underflows_gives_no_number(output: Output) -> None:
    """The square of 1e-200 is 0 in float64. A gradient of 0 needs no second moment."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model = nn.Module()
    model.register_parameter("weight", weight)
    optimizer = AdamW(model.parameters(), eps=0.0)
    with attached(output, model, optimizer, **HEALTH):
        for gradient in ([1e-200, 1.0], [1e-100, 1.0]):
            optimizer.state.clear()
            weight.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.step()
    rows = [row.values for row in output.rows("optimizer_health")]
    assert [(row["staleness"], row["below_eps"]) for row in rows] == [(None, None), (pytest.approx(1.0), 0.0)]


def test_an_optimizer_of_another_rule_has_no_staleness(output: Output) -> None:
    model = small_model()
    optimizer = NAdam(model.parameters())
    with attached(output, model, optimizer, **HEALTH):
        train(model, optimizer, 1, X)
    assert [row.values for row in output.rows("optimizer_health")] == [
        {"swallowed": 0.0, "staleness": None, "below_eps": None}
    ] * 4


# --- One copy, the same bits.


def test_both_features_of_updates_share_one_copy(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = TorchWeightCopies.copy
    monkeypatch.setattr(TorchWeightCopies, "copy", lambda self, x: copied.append(x.numel()) or copy(self, x))
    model = small_model()
    optimizer = Adam(model.parameters())
    expected = Reference(model, optimizer, own_moments=True)
    intervals = {"update_ratio": 2}
    with attached(output, model, optimizer, update_ratio=True, intervals=intervals, **HEALTH) as monitor:
        train(model, optimizer, 4, X)
        first, *_ = monitor._recordings[0].attachment.collectors
        assert first._weights._kept == {}
    assert copied == [p.numel() for p in model.parameters()] * 4
    assert_recorded(output, expected.rows, 1e-5)
    assert [row.step for row in output.rows("update_ratio")] == [0] * 4 + [2] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_has_the_same_bits(output: Output, dtype: torch.dtype) -> None:
    ends = []
    for monitored in (False, True):
        model = small_model(dtype)
        optimizer = AdamW(model.parameters(), lr=0.1)
        monitor = attached(output, model, optimizer, **HEALTH) if monitored else None
        losses = train(model, optimizer, 5, X.to(dtype))
        if monitor is not None:
            monitor.close()
        ends.append([*losses, *(p.detach() for p in model.parameters())])
    assert all(torch.equal(plain, watched) for plain, watched in zip(*ends, strict=True))


# --- The kernel, beyond one chunk.


@pytest.mark.parametrize("layout", ["rows", "columns", "mixed"])
def test_the_numbers_of_many_chunks_are_those_of_float64(layout: str) -> None:
    seeded = torch.Generator().manual_seed(0)
    shape = 3, CHUNK // 2 + 17
    after, before, g, v = (torch.randn(shape, generator=seeded) for _ in range(4))
    before[:, ::3] = after[:, ::3]
    g[:, ::2] = 0
    v = v.square() * 1e-9
    tensors = [x.t().contiguous().t() if layout == "columns" or (layout == "mixed" and i % 2) else x for i, x in
               enumerate((after, before, g, v))]  # fmt: skip
    counts = swallowed(*tensors[:3])
    sums = staleness(tensors[2], tensors[3], 0.5, 0.5e-10, tensors[1], 0.25)
    updated = g != 0
    assert [float(x) for x in counts.values()] == [updated.sum(), (updated & (after == before)).sum()]
    root = (v.double() / 0.5).sqrt()
    total = ((g.double() + 0.25 * before.double()) / root.clamp(min=1e-5)).square().sum()
    assert [float(x) for x in sums.values()] == pytest.approx([float(total), v.numel(), int((root < 1e-5).sum())], rel=1e-6)


def test_what_is_not_finite_stays_visible() -> None:
    g = torch.tensor([1.0, math.nan, 0.0])
    assert math.isnan(float(next(iter(staleness(g, torch.ones(3), 1.0, 1e-16, torch.ones(3), 0).values()))))
    counts = swallowed(torch.tensor([1.0, math.nan, 1.0]), torch.tensor([1.0, math.nan, 1.0]), g)
    assert [float(x) for x in counts.values()] == [2.0, 1.0]
