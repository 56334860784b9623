"""What the manifest tells of how data ran through a model: edges between series, and the order of micro-batches."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint
from watching import EVERYTHING, Output, attached, train

from monitor.coordinator import series_file
from monitor.coordinator.manifest_format import read_manifest
from monitor.coordinator.series_file import Flow, Pass, read_flow, read_series
from monitor.recording import recorder as observing
from monitor.series import Series

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """A residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Tanh(), nn.Linear(4, 2, bias=False))


def flow_of(output: Output) -> tuple[list[Series], Flow]:
    directory = output.directory()
    manifest = read_manifest(directory / "manifest.json")
    return [one.series for one in read_series(directory, manifest)], read_flow(directory, manifest)


def named(output: Output) -> set[tuple[str, str]]:
    """The edges, each end written ``{kind} {name}``."""
    series, found = flow_of(output)
    spelled = [f"{one.kind} {one.name}" for one in series]
    assert len(set(found.edges)) == len(found.edges)
    return {(spelled[edge.source], spelled[edge.target]) for edge in found.edges}


def recorded(output: Output, model: nn.Module, steps: int = 1, micro_steps: int = 1, **config: Any) -> set[tuple[str, str]]:
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, micro_steps, **{**EVERYTHING, **config}):
        for _ in range(steps):
            for _ in range(micro_steps):
                model(X).square().sum().backward()
            optimizer.step()
    return named(output)


def of_kind(kind: str, *edges: str) -> set[tuple[str, str]]:
    """Edges within a kind: ``"0.input > 0.output"``."""
    return {(f"{kind} {source}", f"{kind} {target}") for source, target in (edge.split(" > ") for edge in edges)}


def test_activations_flow_through_modules_and_from_one_to_the_next(output: Output) -> None:
    edges = recorded(output, small_model())
    same = [".input > 0.input", ".input > 0.norm.input", "0.norm.output > 0.mlp.input", "0.output > 1.input"]
    same += ["1.output > 2.input", "2.output > .output"]
    through = [f"{name}.input > {name}.output" for name in ("", "0", "0.norm", "0.mlp", "1", "2")]
    assert {edge for edge in edges if edge[0].startswith("actv ")} == of_kind("actv", *same, *through)


def test_their_gradients_flow_back(output: Output) -> None:
    model = small_model()
    model[0].norm.register_forward_pre_hook(lambda _, args: (args[0].requires_grad_(),))
    edges = {edge for edge in recorded(output, model) if edge[1].startswith("actv_grad ")}
    back = [f"{name}.output > {name}.input" for name in ("0.mlp", "1", "2")]
    between = ["0.mlp.input > 0.norm.output", "1.input > 0.output", "2.input > 1.output", "2.output > .output"]
    assert of_kind("actv_grad", *back, *between) <= edges
    assert all((b, a) not in edges for a, b in edges)


def test_a_parameters_gradient_hangs_below_the_module_and_leads_to_its_new_weight(output: Output) -> None:
    edges = recorded(output, small_model(), steps=2)
    (above,) = (source for source, target in edges if target == "grad_unreduced 0.mlp.weight")
    assert above == "actv_grad 0.mlp.output"
    chain = ["grad_unreduced", "grad_reduced", "param_updated"]
    chain = [f"{kind} 0.mlp.weight" for kind in chain]
    assert {source for source, target in edges if target == chain[1]} == {chain[0]}
    others = {f"{kind} 0.mlp.weight" for kind in ("param_origin", "exp_avg", "exp_avg_sq")}
    assert {source for source, target in edges if target == chain[2]} == {chain[1], *others}


def test_it_hangs_below_the_nearest_module_around_it_that_is_watched(output: Output) -> None:
    edges = recorded(output, small_model(), all_xy=False, targets={"0": {}})
    assert ("actv_grad 0.output", "grad_unreduced 0.mlp.weight") in edges
    assert ("actv_grad 0.output", "grad_unreduced 0.norm.bias") in edges


def test_the_calls_of_a_module_are_distinguished(output: Output) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.linear(x))

    edges = {edge for edge in recorded(output, Twice(), targets={"linear": {}}, all_xy=False) if edge[0].startswith("actv ")}
    between = "linear.output > linear.input#1"
    assert edges == of_kind("actv", "linear.input > linear.output", between, "linear.input#1 > linear.output#1")


def test_several_inputs_flow_into_several_outputs(output: Output) -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * scale, x + scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.pair = nn.Linear(4, 4), Pair()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(self.pair(self.linear(x), scale=x))

    edges = recorded(output, Model())
    ends = [f"pair.{source} > pair.output_{i}" for source in ("input_0", "input_scale") for i in (0, 1)]
    assert of_kind("actv", *ends) <= edges


def test_the_gradient_of_a_tensor_given_in_several_places_flows_to_where_it_was_made(output: Output) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.join = nn.Linear(4, 4), nn.Bilinear(4, 4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return self.join(y, y)

    edges = recorded(output, Model())
    assert of_kind("actv_grad", "join.output > join.input_0+1", "join.input_0+1 > linear.output") <= edges
    assert of_kind("actv", "linear.output > join.input_0", "linear.output > join.input_1") <= edges


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_no_way_leads_from_a_series_back_to_itself(output: Output, micro_steps: int) -> None:
    """Not even where one tensor is handed from each micro-batch to the next."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.table, self.state = nn.Linear(4, 4), X.clone(), X.clone()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = self.cell(self.state) + self.cell(self.table) * x
            return self.state

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Recurrent(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.second(self.first(x))
            self.first.state = result.detach()
            return result

    recorded(output, Model(), steps=2, micro_steps=micro_steps)
    _, found = flow_of(output)
    place = {series: turn for turn, series in enumerate(ascending(found))}
    assert all(place[edge.source] < place[edge.target] for edge in found.edges)


def ascending(found: Flow) -> list[int]:
    """The series, each after those that lead to it; fails where there is a cycle."""
    into: dict[int, set[int]] = {end: set() for edge in found.edges for end in edge}
    for edge in found.edges:
        into[edge.target].add(edge.source)
    order: list[int] = []
    while into:
        free = [end for end, sources in into.items() if not sources & into.keys()]
        assert free, "there is a cycle"
        order += free
        into = {end: sources for end, sources in into.items() if end not in free}
    return order


def test_passes_stand_in_the_order_in_which_they_ran(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, 3, **EVERYTHING):
        first = model(X).square().sum()
        second = model(X).square().sum()
        first.backward()
        third = model(X).square().sum()
        second.backward()
        third.backward()
        optimizer.step()
    passes = [Pass(True, 0, 0), Pass(True, 0, 1), Pass(False, 0, 0), Pass(True, 0, 2), Pass(False, 0, 1), Pass(False, 0, 2)]
    assert list(flow_of(output)[1].passes) == passes


def test_chunks_have_passes_and_edges_of_their_own(output: Output) -> None:
    torch.manual_seed(0)
    chunks = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizer = SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
    with attached(output, chunks, optimizer, **EVERYTHING):
        chunks[1](chunks[0](X)).sum().backward()
        optimizer.step()
    series, found = flow_of(output)
    assert list(found.passes) == [Pass(True, 0, 0), Pass(True, 1, 0), Pass(False, 1, 0), Pass(False, 0, 0)]
    crossing = {
        (series[e.source], series[e.target]) for e in found.edges if series[e.source].vpp_stage != series[e.target].vpp_stage
    }
    assert (Series("actv", 0, ".output"), Series("actv", 1, ".input")) in crossing
    assert {source.kind for source, _ in crossing} | {target.kind for _, target in crossing} == {"actv", "actv_grad"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_change_nothing(output: Output, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Linear(4, 4), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, self.embed(x), use_reentrant=reentrant)

    edges = recorded(output, Checkpointed())
    assert of_kind("actv", "embed.output > block.input", "block.norm.output > block.mlp.input") <= edges
    assert list(flow_of(output)[1].passes) == [Pass(True, 0, 0), Pass(False, 0, 0)]
    ascending(flow_of(output)[1])


@pytest.mark.parametrize(("steps", "joined"), [(1, False), (2, True)])
def test_moments_that_only_the_second_step_has_are_joined_then(output: Output, steps: int, joined: bool) -> None:
    edges = recorded(output, small_model(), steps)
    assert (("exp_avg 0.norm.bias", "param_updated 0.norm.bias") in edges) == joined


def test_without_activations_parameters_have_edges_alone(output: Output) -> None:
    edges = recorded(output, small_model(), xy_distribution=False, mv_distribution=False)
    assert {(source.split()[0], target.split()[0]) for source, target in edges} == {
        ("grad_unreduced", "grad_reduced"),
        ("grad_reduced", "param_updated"),
        ("param_origin", "param_updated"),
    }
    assert flow_of(output)[1].passes == ()


def test_there_is_a_bound_and_the_manifest_says_that_it_was_met(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (observing, series_file):
        monkeypatch.setattr(module, "MOST_EDGES", 3)
    recorded(output, small_model(), wg_distribution=False, param_distribution=False, mv_distribution=False)
    _, found = flow_of(output)
    assert (len(found.edges), found.cut) == (3, True)
    assert "edges between series are kept" in output.manifest()["notes"]["flow"]


def test_only_the_first_collected_step_is_looked_at(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    observed = observing.observed_dataflow

    def counted(*args: Any) -> Flow:
        looked.append(1)
        return observed(*args)

    monkeypatch.setattr("monitor.recording.attachment.observed_dataflow", counted)
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **{**EVERYTHING, "start_step": 2}):
        train(model, optimizer, 6, X)
    assert looked == [1]
    assert any(a.startswith("actv ") for a, _ in named(output))


def test_edges_go_with_the_order_of_the_first_steps_rows(output: Output) -> None:
    """In each kind's file: of two rows that an edge joins, the source stands first."""
    recorded(output, small_model())
    edges = named(output)
    for kind in ("actv", "actv_grad"):
        names = [f"{kind} {row.name}" for row in output.rows(kind)]
        assert not any((later, earlier) in edges for earlier, later in combinations(names, 2))
