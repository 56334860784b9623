"""The operator behind which every kernel stands."""

from __future__ import annotations

import torch
from reference import assert_agrees

from monitor.stats.partials import COLUMNS
from monitor.stats.torch.device_kernel import TorchDeviceKernel
from monitor.stats.torch.dispatch import reduce_into

EPS = 1e-8


def page() -> torch.Tensor:
    return torch.zeros(4, len(COLUMNS), dtype=torch.float64)


def test_the_operator_writes_the_row_of_its_micro_step() -> None:
    table, x = page(), torch.randn(100)
    reduce_into(x, table, 1, torch.tensor(2), EPS)
    assert_agrees(table[3].numpy(), x, EPS)
    assert not table[:3].any()


def test_a_device_kernel_adds_the_micro_step_without_looking_at_it() -> None:
    table, x = page(), torch.randn(100)
    assert TorchDeviceKernel(EPS).reduce_into(x, table, 1, torch.tensor(1))
    assert_agrees(table[2].numpy(), x, EPS)
    assert not table[[0, 1, 3]].any()


def test_observing_a_tensor_leaves_its_graph_alone() -> None:
    x = torch.randn(10, requires_grad=True)
    y = x * 2
    before = y.grad_fn
    reduce_into(y, page(), 0, None, EPS)
    assert y.grad_fn is before
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((10,), 2.0))


def test_compiled_code_holds_the_operator_without_a_graph_break_and_once_for_all_micro_steps() -> None:
    compilations = 0

    def count(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        nonlocal compilations
        compilations += 1
        return graph

    def step(x: torch.Tensor, table: torch.Tensor, micro_step: torch.Tensor) -> torch.Tensor:
        y = x.relu()
        reduce_into(y, table, 1, micro_step, EPS)
        return y + 1

    torch._dynamo.reset()
    compiled, table = torch.compile(step, backend=count, fullgraph=True), page()
    inputs = [torch.randn(50), torch.randn(50)]
    for micro_step, x in enumerate(inputs):
        compiled(x, table, torch.tensor(micro_step))
    for micro_step, x in enumerate(inputs):
        assert_agrees(table[1 + micro_step].numpy(), x.relu(), EPS)
    assert compilations == 1


def test_a_compiler_keeps_the_operator_although_nothing_reads_its_page() -> None:
    def step(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        reduce_into(x * 2, table, 0, None, EPS)
        return x + 1

    torch._dynamo.reset()
    table, x = page(), torch.randn(64)
    torch.compile(step, backend="aot_eager", fullgraph=True)(x, table)
    assert_agrees(table[0].numpy(), x * 2, EPS)


def test_fake_tensors_pass_through_the_operator() -> None:
    with torch._subclasses.FakeTensorMode():
        table = torch.zeros(4, len(COLUMNS), dtype=torch.float64)
        assert reduce_into(torch.empty(3), table, 0, None, EPS) is None
