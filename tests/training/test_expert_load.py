"""What went to each expert, caught from routers of transformers and from modules that users name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shown import scalars
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from monitor.failures import LOGGER, Failures
from monitor.pytorch.features.choices import counts_of
from monitor.pytorch.training import TrainingMetrics
from monitor.pytorch.training.backend import TorchRouters
from monitor.recording.features.reading import NotARouterError

EXPERTS, CHOSEN = 4, 2
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": CHOSEN,
}
CONFIGS: dict[str, tuple[str, dict[str, int]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": EXPERTS}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"num_experts": EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 8}),
}
"""Of models with experts: the class of ``transformers``, and what is its own."""

YAML = """
monitor_config: {{dump_path: {base}/dump}}
tensorboard: {{tensorboard_dir: {base}/board, log_expert_load_to_tensorboard: true}}
"""


class Choosing(nn.Module):
    """Says what it was asked to."""

    def __init__(self, result: Any, **known: int) -> None:
        super().__init__()
        self._result = result
        for name, value in known.items():
            setattr(self, name, value)

    def forward(self, _: Tensor) -> Any:
        return self._result


def tokens_of(routers: TorchRouters) -> dict[str, list[int]]:
    return {name: list(count()) for name, count in routers.step().items()}


@pytest.mark.parametrize("routers", [[], ["0"]])
def test_a_model_without_routers_is_said(routers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "train.yaml").write_text(YAML.format(base=tmp_path))
    model = nn.Sequential(nn.Linear(4, 2))
    with (
        caplog.at_level(logging.WARNING, LOGGER.name),
        TrainingMetrics(tmp_path / "train.yaml", model, routers=routers),
    ):
        pass
    assert ("is recognised as a router: expert_load is not shown" in caplog.text) == (not routers)


@pytest.mark.parametrize("name", CONFIGS)
def test_shares_of_every_layer_sum_to_one_and_are_those_of_counts_made_by_hand(name: str, tmp_path: Path) -> None:
    import transformers  # only here: it takes seconds

    config, own = CONFIGS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SMALL, **own)).train()
    (tmp_path / "train.yaml").write_text(YAML.format(base=tmp_path))
    chosen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _, __, result, name=name: chosen.update({name: result[2].flatten()}))
    with TrainingMetrics(tmp_path / "train.yaml", model) as metrics, metrics.step():
        model(torch.randint(32, (3, 5)))
    shown = scalars(tmp_path / "board" / "rank_0")
    assert len(chosen) == 2
    for name, indices in chosen.items():
        expected = np.bincount(indices.numpy(), minlength=EXPERTS) / (3 * 5 * CHOSEN)
        found = [shown[f"expert_load/{name}/expert_{expert}"] for expert in range(EXPERTS)]
        assert [[x for x, _ in points] for points in found] == [[1]] * EXPERTS
        assert [points[0][1] for points in found] == pytest.approx(expected.tolist())
        assert sum(points[0][1] for points in found) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("result", "known"),
    [
        ((torch.rand(3, 4), torch.tensor([[0, 1], [0, 3], [0, 1]])), {"num_experts": 4, "top_k": 2}),
        ((torch.tensor([[0, 1], [0, 3], [0, 1]]),), {"num_experts": 4}),
        ((torch.rand(3, 4), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)), {}),
    ],
    ids=["indices", "indices-alone", "map"],
)
def test_a_router_may_say_in_several_ways_what_it_chooses(result: Any, known: dict[str, int]) -> None:
    assert counts_of(Choosing(result, **known), result).tolist() == [3, 2, 0, 1]


def test_a_token_without_an_expert_counts_for_none() -> None:
    result = (torch.tensor([[0, -1], [1, 2], [1, 0]]),)
    assert counts_of(Choosing(result, num_experts=2, top_k=2), result).tolist() == [2, 2]


def test_of_several_tensors_of_integers_the_one_of_as_many_as_are_chosen_is_taken() -> None:
    result = (torch.tensor([[0, 1], [1, 1]]), torch.tensor([[0, 0, 0], [1, 1, 1]]))
    with pytest.raises(NotARouterError, match="several integer tensors"):
        counts_of(Choosing(result, num_experts=2), result)
    assert counts_of(Choosing(result, num_experts=2, top_k=2), result).tolist() == [1, 3]


@pytest.mark.parametrize("result", [None, torch.rand(3, 4), (torch.tensor([[0, 1]]),)])
def test_what_does_not_say_it_is_not_guessed(result: Any) -> None:
    with pytest.raises(NotARouterError):
        counts_of(Choosing(result), result)


def test_a_module_that_says_nothing_is_named_once_and_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Choosing(torch.rand(3, 4)))
    routers = TorchRouters(model, ["0"], Failures())
    with caplog.at_level(logging.WARNING, LOGGER.name):
        for _ in range(2):
            model(torch.rand(1))
    assert len(caplog.records) == 1
    assert "counting what went to each expert of '0' failed" in caplog.text
    assert tokens_of(routers) == {}


def test_a_name_that_no_module_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="routers: there is no module 'gate' in the model"):
        TorchRouters(nn.Sequential(nn.Linear(1, 1)), ["gate"], Failures())


def test_micro_batches_of_a_step_add_up_and_the_next_step_begins_anew() -> None:
    model = nn.Sequential(Choosing((torch.tensor([0, 1, 0]),), num_experts=2))
    routers = TorchRouters(model, ["0"], Failures())
    for _ in range(3):
        model(torch.rand(1))
    first = routers.step()
    model(torch.rand(1))
    assert list(first["0"]()) == [6, 3]
    assert tokens_of(routers) == {"0": [2, 1]}


def test_evaluation_is_not_counted() -> None:
    model = nn.Sequential(Choosing((torch.tensor([0, 1]),), num_experts=2))
    routers = TorchRouters(model, ["0"], Failures())
    model.eval()(torch.rand(1))
    assert tokens_of(routers) == {}


def test_what_is_recomputed_for_a_backward_counts_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].top_k = 2
    routers = TorchRouters(model, ["0"], Failures())
    checkpoint(model, torch.rand(3, 4, requires_grad=True), use_reentrant=False).sum().backward()
    assert sum(tokens_of(routers)["0"]) == 6


def test_nothing_is_counted_any_more_when_it_is_removed() -> None:
    model = nn.Sequential(Choosing((torch.tensor([0, 1]),), num_experts=2))
    routers = TorchRouters(model, ["0"], Failures())
    routers.remove()
    model(torch.rand(1))
    assert tokens_of(routers) == {}
