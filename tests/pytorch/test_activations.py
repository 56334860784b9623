"""Activations: which rows there are, what they are called, and the numbers in them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import io
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from observing import ACTIVATIONS, Observed, Residual, Twice, Witness, backward, observed, seeded, statistics
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call
from torch.masked import MaskedTensor
from torch.utils.checkpoint import checkpoint
from watching import Output, attached

from monitor import read_manifest, read_series
from monitor.failures import NOTHING_OF
from monitor.pytorch import modules
from monitor.stats.host.array_kernel import VARIABLE, NativeKernel, NumpyKernel
from monitor.stats.partials import TensorLayout


def values(*shape: int) -> Tensor:
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) * 1.7 + 0.3).view(shape)


def activations(output: Output, model: nn.Module, *inputs: Any, **config: Any) -> Observed:
    """One forward, without a backward."""
    return observed(output, model, lambda: model(*inputs), **config)


# Names and order.


def test_rows_stand_in_the_order_of_the_calls_under_the_names_of_the_modules(output: Output) -> None:
    found = activations(output, seeded(lambda: nn.Sequential(Residual(), nn.Tanh())), values(3, 4))

    assert found.names("actv") == [
        ".input",
        "0.input",
        "0.norm.input",
        "0.norm.output",
        "0.mlp.input",
        "0.mlp.0.input",
        "0.mlp.0.output",
        "0.mlp.1.input",
        "0.mlp.1.output",
        "0.mlp.2.input",
        "0.mlp.2.output",
        "0.mlp.output",
        "0.output",
        "1.input",
        "1.output",
        ".output",
    ]


def test_a_torch_whose_graphs_cannot_keep_operators_has_the_same_rows(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "TRACEABLE", False)
    found = activations(output, seeded(lambda: nn.Sequential(nn.Tanh())), values(3, 4))
    assert found.names("actv") == [".input", "0.input", "0.output", ".output"]


class Structured(nn.Module):
    """Takes and returns tensors in every kind of container."""

    @dataclasses.dataclass
    class Result:
        main: Tensor
        extras: dict[str, Any]
        note: str = "no tensor"

    def forward(self, pair: tuple[Tensor, Tensor], mask: Tensor | None = None, *, scale: Tensor) -> Result:
        del mask
        return self.Result(pair[0] * scale, {"sum": pair[0] + pair[1], "deep": [pair[1], {"er": pair[1] * 2}]})


def test_nested_results_and_keyword_arguments_are_walked_and_named(output: Output) -> None:
    """Fault 16 of the tool before: dicts and nested outputs were skipped, or became rows of nan."""
    module = Structured()
    a, b, scale = values(2, 3), values(2, 3) + 1, torch.full((1,), 2.0)

    found = observed(output, module, lambda: module((a, b), None, scale=scale))

    expected = statistics(".input_0_0", a) | statistics(".input_0_1", b) | statistics(".input_scale", scale)
    expected |= statistics(".output_main", a * 2) | statistics(".output_extras_sum", a + b)
    expected |= statistics(".output_extras_deep_0", b) | statistics(".output_extras_deep_1_er", b * 2)
    assert found.numbers("actv") == pytest.approx(expected, rel=1e-12)


class TupleOfTwo(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a - b


def test_several_tensors_are_numbered_and_a_lone_one_is_not(output: Output) -> None:
    assert activations(output, TupleOfTwo(), values(2), values(2)).names("actv") == [
        ".input_0",
        ".input_1",
        ".output_0",
        ".output_1",
    ]
    assert activations(output, nn.Tanh(), values(2)).names("actv") == [".input", ".output"]


def test_the_second_call_of_a_module_has_rows_of_its_own(output: Output) -> None:
    """Fault 8 of the tool before: a module called twice in a step kept only its last call."""
    model, x = seeded(Twice), values(3, 4)

    found = activations(output, model, x)

    once = model.layer(x)
    expected = statistics("layer.input", x) | statistics("layer.output", once)
    expected |= statistics("layer.input#1", torch.tanh(once)) | statistics("layer.output#1", model.layer(torch.tanh(once)))
    numbers = found.numbers("actv")
    assert {key: numbers[key] for key in expected} == pytest.approx(expected, rel=1e-12)
    assert found.names("actv").count("layer.input") == 1


class SharedUnderTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_module_under_two_names_is_called_by_the_first_of_them(output: Output) -> None:
    found = activations(output, seeded(SharedUnderTwoNames), values(3, 4))

    assert [name for name in found.names("actv") if "output" in name] == ["first.output", "first.output#1", ".output"]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(4, 4)
        self.odd = nn.Linear(4, 4)

    def forward(self, x: Tensor, number: int) -> Tensor:
        return (self.odd if number % 2 else self.even)(x)


def test_a_module_that_is_not_called_has_no_row_in_that_step(output: Output) -> None:
    """Fault 1 of the tool before: what did not run in step 1 was written again, with step 0's values."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, wg_distribution=True, **ACTIVATIONS):
        for step in range(4):
            model(torch.ones(2, 4), step).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    rows = [*output.rows("actv"), *output.rows("actv_grad"), *output.rows("grad_reduced")]
    assert {row.step for row in rows if row.name.startswith("even")} == {0, 2}
    assert {row.step for row in rows if row.name.startswith("odd")} == {1, 3}


def test_wrappers_leave_no_trace_in_names_and_are_recorded_once(output: Output) -> None:
    model = seeded(lambda: nn.Sequential(checkpoint_wrapper(Residual()), nn.Linear(4, 2)))

    found = observed(output, model, lambda: backward(model(values(3, 4))))

    twin = seeded(lambda: nn.Sequential(Residual(), nn.Linear(4, 2)))
    expected = observed(output, twin, lambda: backward(twin(values(3, 4))))
    for kind in ("actv", "actv_grad"):
        assert found.numbers(kind) == pytest.approx(expected.numbers(kind), rel=1e-12)


def test_squashed_names_begin_at_their_telling_part(output: Output) -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])})})
    found = observed(output, model, lambda: model["encoder"]["layers"][0](torch.ones(2, 4)), squash_name=True)

    assert found.names("actv") == ["0.input", "0.output"]


# Numbers.


def test_inputs_are_read_before_a_module_works_on_them_in_place(output: Output) -> None:
    x = values(3, 4)

    found = activations(output, nn.ReLU(inplace=True), x.clone())

    expected = statistics(".input", x) | statistics(".output", torch.relu(x))
    assert found.numbers("actv") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "x",
    [
        values(5, 7).float(),
        values(5, 7).bfloat16(),
        values(5, 7).half(),
        torch.arange(-3, 9),
        torch.tensor([True, False, False]),
        values(4, 6).t(),
        torch.tensor(2.5),
        values(3, 1).expand(3, 5),
        torch.tensor([1.0, math.inf, -2.0]),
    ],
    ids=["float32", "bfloat16", "float16", "integers", "bool", "transposed", "no dimensions", "expanded", "with inf"],
)
def test_rows_hold_what_the_ops_are_by_definition(x: Tensor, output: Output) -> None:
    found = activations(output, nn.Identity(), x)

    expected = statistics(".input", x) | statistics(".output", x)
    assert found.numbers("actv") == pytest.approx(expected, rel=2e-6, abs=1e-7, nan_ok=True)


class Returns(nn.Module):
    def __init__(self, *results: Tensor) -> None:
        super().__init__()
        self.results = results

    def forward(self) -> tuple[Tensor, ...]:
        return self.results


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_and_complex_tensors_have_numbers(output: Output) -> None:
    """Fault 16 of the tool before: nan. Sparse ones count their zeros, complex ones go by magnitude."""
    dense = torch.tensor([[0.0, 3.0], [4.0, 0.0]], dtype=torch.float64)
    complex_ = torch.tensor([3 + 4j, 0j])

    found = activations(output, Returns(dense.to_sparse(), dense.to_sparse_csr(), complex_)).numbers("actv")

    expected = statistics(".output_0", dense) | statistics(".output_1", dense) | statistics(".output_2", complex_.abs())
    assert found == pytest.approx(expected)


def test_a_jagged_tensor_has_the_numbers_and_the_shape_of_its_rows_together(output: Output) -> None:
    """Its own shape has a symbol that is new for each tensor and cannot be written to a manifest."""
    rows = [values(2, 3), values(4, 3)]
    jagged = [torch.nested.nested_tensor(rows, layout=torch.jagged) for _ in range(2)]

    found = activations(output, Returns(*jagged), ops=["norm", "shape"])

    norm = pytest.approx(torch.cat(rows).norm().item())
    assert [row.values for row in found.rows("actv")] == [{"norm": norm, "shape": "[6, 3]"}] * 2
    manifest = read_manifest(found.directory / "manifest.json")
    assert {one.layout for one in read_series(found.directory, manifest)} == {TensorLayout((6, 3), "torch.float64")}


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_jagged_tensor_with_lengths_has_no_numbers_of_what_lies_between_its_rows(
    output: Output, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, native)
    buffer, offsets, lengths = values(6, 3), torch.tensor([0, 2, 6]), torch.tensor([1, 3])
    rows = torch.cat([buffer[:1], buffer[2:5]])
    jagged = torch.nested.nested_tensor_from_jagged(buffer, offsets=offsets, lengths=lengths)
    narrowed = torch.nested.narrow(buffer.reshape(2, 3, 3), 1, torch.tensor([0, 1]), torch.tensor([1, 2]), layout=torch.jagged)

    found = activations(output, Returns(jagged, jagged.transpose(1, 2), narrowed), ops=["norm", "mean", "shape"])

    narrow = torch.cat([buffer[:1], buffer[4:6]])
    expected = [(rows, "[4, 3]"), (rows, "[3, 4]"), (narrow, "[3, 3]")]
    for row, (x, shape) in zip(found.rows("actv"), expected, strict=True):
        assert row.values == {"norm": pytest.approx(x.norm().item()), "mean": pytest.approx(x.mean().item()), "shape": shape}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("native", ["1", "0"])
def test_a_strided_nested_tensor_has_the_numbers_of_all_its_elements(
    output: Output, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, native)
    rows = [values(2, 3), values(4, 3)]
    nested = [torch.nested.nested_tensor(rows, layout=torch.strided, dtype=dtype) for dtype in (torch.float32, torch.float64)]

    found = activations(output, Returns(*nested), ops=["norm", "shape"])

    norm = pytest.approx(torch.cat(rows).norm().item())
    assert [row.values for row in found.rows("actv")] == [{"norm": norm, "shape": "[18]"}] * 2


def test_an_empty_tensor_is_measured_and_has_no_mean(output: Output) -> None:
    (row,) = activations(output, Returns(torch.empty(0, 3))).rows("actv")

    assert row.values == {"min": None, "max": None, "mean": None, "norm": 0, "zeros": None, "nans": 0, "infs": 0, "std": None}


def test_a_nan_is_counted_and_hides_nothing_of_other_rows(output: Output) -> None:
    poisoned = values(3, 4)
    poisoned[1, 2] = math.nan

    numbers = activations(output, TupleOfTwo(), values(3, 4), poisoned).numbers("actv")

    assert numbers[".input_0", "nans"] == 0
    assert [numbers[name, "nans"] for name in (".input_1", ".output_0", ".output_1")] == [1, 1, 1]
    assert math.isnan(numbers[".output_0", "norm"])


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_tensor_seen_by_several_hooks_is_read_once(output: Output, monkeypatch: pytest.MonkeyPatch, native: str) -> None:
    monkeypatch.setenv(VARIABLE, native)
    reads = 0

    def counting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal reads
            reads += 1
            return inner(*args)

        return call

    of, reduce = NativeKernel.of, NumpyKernel.reduce
    monkeypatch.setattr(NativeKernel, "of", lambda kernel, form: counting(of(kernel, form)))
    monkeypatch.setattr(NumpyKernel, "reduce", counting(reduce))
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Identity()), nn.ReLU(inplace=True))

    found = activations(output, model, torch.ones(2, 4))

    norms = found.norms("actv")
    the_input, the_product = (
        (".input", "0.input", "0.0.input"),
        ("0.0.output", "0.1.input", "0.1.output", "0.output", "1.input"),
    )
    after_it_was_changed_in_place = ("1.output", ".output")
    groups = [{norms[name] for name in group} for group in (the_input, the_product, after_it_was_changed_in_place)]
    assert [len(group) for group in groups] == [1, 1, 1]
    assert len(norms) == 10
    assert reads == 3


# When rows are recorded.


def test_evaluation_records_nothing_and_a_warning_says_so(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    assert activations(output, seeded(Residual).eval(), values(3, 4)).rows("actv") == []
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [one for one in said if "no row of actv. Modules in evaluation mode, or called without gradients, have none." in one]


def test_a_frozen_part_in_evaluation_mode_has_no_rows(output: Output) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
    model[1].eval()

    assert {name.split(".")[0] for name in activations(output, model, torch.ones(2, 4)).names("actv")} == {"", "0", "2"}


def test_a_forward_without_gradients_records_nothing(output: Output) -> None:
    model = seeded(Residual)

    def run() -> None:
        with torch.no_grad():
            model(values(3, 4))
        with torch.inference_mode():
            model(values(3, 4))

    assert observed(output, model, run).rows("actv") == []


def test_a_part_that_runs_without_gradients_within_training_is_recorded(output: Output) -> None:
    class FrozenFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.encoder(x)
            return self.head(x)

    model = FrozenFirst()
    found = observed(output, model, lambda: model(torch.ones(2, 4)).sum().backward())

    assert {"encoder.input", "encoder.output"} <= set(found.names("actv"))
    assert set(found.names("actv_grad")) == {".output", "head.output"}


class Agent(nn.Module):
    """Never called as a whole, as agents of reinforcement learning are not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.actor = nn.Linear(4, 2)

    def act(self, x: Tensor) -> Tensor:
        result: Tensor = self.actor(self.body(x))
        return result


def as_they_are(agent: Agent) -> Agent:
    return agent


def compiled(agent: Agent) -> Agent:
    agent.body.compile(backend="aot_eager")
    return agent


@pytest.mark.parametrize("made", [as_they_are, compiled])
def test_parts_of_a_model_that_run_without_gradients_record_nothing(made: Callable[[Agent], Agent], output: Output) -> None:
    """As the collection of experience between two updates. Parts that train are named as without it."""
    agent = made(seeded(Agent))

    def run(*, collect: bool) -> None:
        if collect:
            with torch.no_grad():
                agent.act(values(7, 4) * 100)
        agent.act(values(3, 4)).sum().backward()

    expected = observed(output, agent, lambda: run(collect=False))
    found = observed(output, agent, lambda: run(collect=True))

    assert found.numbers("actv") == expected.numbers("actv")
    assert {"body.0.input", "body.1.output", "actor.output"} <= set(found.names("actv"))


def test_a_part_that_is_called_alone_and_whose_activations_are_checkpointed_is_recorded(output: Output) -> None:
    """Its first forward is without gradients, inside a function of autograd."""
    agent = seeded(Agent)

    def run(call: Callable[..., Tensor]) -> None:
        agent.actor(call(agent.body, values(3, 4).requires_grad_())).sum().backward()

    expected = observed(output, agent, lambda: run(lambda body, x: body(x)))
    found = observed(output, agent, lambda: run(functools.partial(checkpoint, use_reentrant=True)))

    assert found.numbers("actv") == expected.numbers("actv")


def test_evaluation_in_the_middle_of_training_disturbs_nothing(output: Output) -> None:
    model = seeded(Residual)

    def run(*, evaluate: bool) -> None:
        result = model(values(3, 4))
        if evaluate:
            model.eval()
            model(values(5, 4))
            with torch.no_grad():
                model.train()(values(5, 4))
        backward(result)

    expected = observed(output, model, lambda: run(evaluate=False))
    found = observed(output, model, lambda: run(evaluate=True))

    assert found.numbers("actv") == expected.numbers("actv")
    assert found.numbers("actv_grad") == expected.numbers("actv_grad")


def test_switching_off_and_on_again_continues_in_the_same_rows(output: Output) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, **ACTIVATIONS) as monitor:
        before_it_was_off = model[0](values(3, 4))
        for wanted in (False, True):
            with pytest.deprecated_call():
                monitor.reload_xy(wanted)
        model[0](2 * values(3, 4))
        before_it_was_off.sum().backward()
        optimizer.step()

    norms = [(row.name, row.values["norm"]) for row in output.rows("actv")]
    assert norms == [
        ("0.input", pytest.approx((2 * values(3, 4)).norm().item())),
        ("0.output", pytest.approx(model[0](2 * values(3, 4)).norm().item())),
    ]
    assert output.rows("actv_grad") == []


# What there are no numbers of.


def test_tensors_without_data_have_no_rows_and_hold_up_no_others(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    found = activations(output, Returns(torch.empty(3, device="meta"), torch.ones(4)), ops=["norm"])

    assert found.norms("actv") == {".output_1": 2.0}
    with FakeTensorMode():
        fake = torch.empty(3, device="cuda")
    assert activations(output, Returns(fake, torch.ones(4))).names("actv") == [".output_1"]
    assert all("no row of actv_grad" in record.message for record in caplog.records if record.levelname == "WARNING")


def test_tensors_whose_elements_only_their_class_finds_have_no_rows_and_a_warning_names_it_once(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    """To read one below its class would end the process: it has a shape, and its address is 0."""
    masked = MaskedTensor(torch.ones(4), torch.tensor([True, False, True, True]))
    found = activations(output, Returns(masked, torch.ones(4), masked), ops=["norm"])

    assert found.norms("actv") == {".output_1": 2.0}
    (warning,) = [record.message for record in caplog.records if "MaskedTensor" in record.message]
    assert warning.startswith(
        "Tensors of these classes have no rows, since only the class knows where their elements are: Mask"
    )
    assert read_manifest(found.directory / "manifest.json").notes["unreadable_tensors"] == warning


def test_transforms_of_torch_func_are_undisturbed_and_not_recorded(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(Residual)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).square().sum()

    def transformed() -> tuple[dict[str, Tensor], Tensor]:
        return torch.func.grad(loss)(parameters, values(3, 4)), torch.vmap(loss, (None, 0))(parameters, values(5, 3, 4))

    expected, results = transformed(), []

    found = observed(output, model, lambda: results.append(transformed()))

    assert all(torch.equal(expected[0][name], gradient) for name, gradient in results[0][0].items())
    assert torch.equal(expected[1], results[0][1])
    assert found.rows("actv") == found.rows("actv_grad") == []
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert all("xy_distribution is on, and step 0 has no row of" in one for one in said), "that nothing came, and no failure"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_is_left_out_with_a_warning(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 2))

    found = activations(output, model, torch.ones(2, 4), stack_info=True)

    assert found.names("actv") == [".input", "1.input", "1.output", ".output"]
    said, *_ = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "'0' is a RecursiveScriptModule, which takes no hooks" in said
    (directory,) = output.directories()
    assert all(cause.startswith(NOTHING_OF) for cause in read_manifest(directory / "manifest.json").failures)
    assert activations(output, torch.jit.script(nn.Linear(4, 4)), torch.ones(2, 4)).rows("actv") == []


def plus_one(module: nn.Module, given: tuple[Tensor], result: Tensor) -> Tensor:  # noqa: ARG001
    return result + 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_is_scripted_with_the_hooks_of_the_user_and_without_those_of_the_monitor(output: Output) -> None:
    gc.collect()
    original = vars(torch.jit._recursive)["create_script_module"]
    model, scripted = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())), []
    handle = model[1].register_forward_hook(plus_one)

    def script() -> None:
        scripted.extend(map(torch.jit.script, (model, copy.deepcopy(model))))
        with pytest.raises(AttributeError):  # a hook of the user that no compiler takes
            torch.jit.script(nn.Sequential(nn.Tanh(), refusing))
        model(values(3, 4))

    refusing = nn.Tanh()
    refusing.register_forward_hook(functools.partial(print))
    found = observed(output, model, script)

    assert torch.equal(scripted[0](values(3, 4)), model(values(3, 4)))
    assert torch.equal(scripted[1](values(3, 4)), model(values(3, 4)))
    assert found.names("actv") == [".input", "0.input", "0.output", "1.input", "1.output", ".output"]
    handle.remove()
    assert [*model[1]._forward_hooks] == []
    gc.collect()
    assert vars(torch.jit._recursive)["create_script_module"] is original


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_holds_nothing_of_the_monitor(output: Output) -> None:
    model, traces = seeded(Residual), []
    expected = torch.jit.trace(model, values(3, 4)).graph

    found = observed(output, model, lambda: traces.append(torch.jit.trace(model, values(3, 4)).graph))

    assert [node.kind() for node in traces[0].nodes()] == [node.kind() for node in expected.nodes()]
    assert found.rows("actv") == []


# What goes wrong in the user's code.


class Fails(nn.Module):
    """Raises ``error`` once, after its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.inner = nn.Linear(4, 4)
        self.error: Exception | None = None

    def raise_once(self, *_: object) -> None:
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        self.raise_once()
        return self.inner(x)


class FailsInItsHook(Fails):
    """Raises it from a hook of its own, when all layers have run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(type(self).raise_once)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))


class FailsInItsPreHook(FailsInItsHook):
    """Raises it before any layer has run, and before the monitor's hooks have."""

    def __init__(self) -> None:
        Fails.__init__(self)
        self.register_forward_pre_hook(type(self).raise_once)


@pytest.mark.parametrize("retry_while_handling", [False, True])
@pytest.mark.parametrize("build", [Fails, FailsInItsHook, FailsInItsPreHook])
def test_an_exception_arrives_unchanged_and_the_retry_is_as_if_first(
    build, retry_while_handling: bool, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(build)

    def two_micro_batches() -> None:
        backward(model(values(3, 4)))
        backward(model(2 * values(3, 4)))

    expected = observed(output, model, two_micro_batches, grad_acc_steps=2)
    error = model.error = ValueError("the user's own")
    caught: list[Exception] = []

    def run() -> None:
        try:
            model(values(3, 4))
        except ValueError as raised:
            caught.append(raised)
            if retry_while_handling:
                two_micro_batches()
        if not retry_while_handling:
            two_micro_batches()

    found = observed(output, model, run, grad_acc_steps=2)

    assert caught == [error]
    assert error.__cause__ is error.__context__ is None
    for kind in ("actv", "actv_grad"):
        assert sorted(found.rows(kind)) == sorted(expected.rows(kind))
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_failed_forward_keeps_no_graph_alive(output: Output) -> None:
    """Code that catches an out-of-memory error needs that memory at once."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Fails()))
    nodes: list[weakref.ref[Witness]] = []
    model[0].register_forward_hook(lambda *call: nodes.append(Witness.of(call[-1])))
    model[1].error = ValueError()

    def run() -> None:
        gc.disable()
        try:
            with contextlib.suppress(ValueError):
                model(values(3, 4))
            assert [node() for node in nodes] == [None]
        finally:
            gc.enable()

    observed(output, model, run)


def test_an_exception_that_the_model_itself_handles_leaves_its_rows_right(output: Output) -> None:
    class FallsBack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Fails()

        def forward(self, x: Tensor) -> Tensor:
            self.part.error = ValueError()
            with contextlib.suppress(ValueError):
                self.part(x)
            return self.part(2 * x)

    model = seeded(FallsBack)
    found = observed(output, model, lambda: model(values(3, 4)).sum().backward()).norms("actv")

    assert found["part.input#1"] == pytest.approx(2 * found["part.input"])
    assert found["part.output#1"] == found[".output"]
    assert "part.output" not in found


# Which tensors are asked for.


def targeted(output: Output, targets: dict[str, Any], **config: Any) -> set[str]:
    """The names recorded, of activations and (marked with ``d``) their gradients, for a residual block."""
    model = seeded(lambda: nn.Sequential(Residual(), TwoFromOne()))
    found = observed(output, model, lambda: model(values(3, 4))[0].sum().backward(), targets=targets, **config)
    return {*found.names("actv"), *(f"d {name}" for name in found.names("actv_grad"))}


class TwoFromOne(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(x), torch.cos(x)


def test_a_target_covers_its_own_inputs_outputs_and_gradients(output: Output) -> None:
    found = targeted(output, {"0.norm": {}}, all_xy=False)

    # The input of the model needs no gradient, so neither has the norm's.
    assert found == {"0.norm.input", "0.norm.output", "d 0.norm.output"}


def test_a_target_may_name_sides_and_elements(output: Output) -> None:
    targets = {
        "0.norm": {"output": "tensor"},
        "0.mlp.0": {"input": "tuple[1]:0", "input_grad": "tuple[1]:0"},
        "1": {"output": "tuple[2]:1", "output_grad": "tuple[2]:0"},
    }

    found = targeted(output, targets, all_xy=False)

    assert found == {"0.norm.output", "0.mlp.0.input", "d 0.mlp.0.input", "1.output_1", "d 1.output_0"}


def test_all_xy_adds_the_modules_that_no_target_names(output: Output) -> None:
    found = targeted(output, {"1": {"output": "tuple[2]:1"}}, all_xy=True)

    assert {name for name in found if name.startswith(("1.", "d 1."))} == {"1.output_1"}
    assert {".input", "0.input", "0.mlp.2.output", "d 0.mlp.2.output"} <= found


def test_another_length_than_the_target_says_is_warned_about_once_and_all_is_recorded(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = TwoFromOne()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    config = {**ACTIVATIONS, "all_xy": False, "targets": {"": {"output": "tuple[3]:2", "input": "tuple[2]:1"}}}
    with attached(output, model, optimizer, **config):
        for _ in range(3):
            model(values(2))
            optimizer.step()

    assert [row.name for row in output.rows("actv")] == [".input", ".output_0", ".output_1"] * 3
    said = [record.message for record in caplog.records if "targets expects" in record.message]
    assert len(said) == 2
    assert "expects 2 elements in input of '', but there is 1. All" in said[0]
    assert "3 elements in output" in said[1]
    assert "there are 2" in said[1]


def test_an_element_of_a_lone_list_is_chosen_as_its_argument(output: Output) -> None:
    class TakesList(nn.Module):
        def forward(self, xs: list[Tensor]) -> Tensor:
            return xs[0] + xs[1]

    found = activations(output, TakesList(), [values(2), values(2)], all_xy=False, targets={"": {"input": "tuple[1]:0"}})

    assert found.names("actv") == [".input_0", ".input_1"]


def test_forward_only_and_backward_only_leave_the_other_side_out(output: Output) -> None:
    model = seeded(Residual)

    def kinds(**config: Any) -> set[str]:
        found = observed(output, model, lambda: backward(model(values(3, 4))), **config)
        return {kind for kind in ("actv", "actv_grad") if found.rows(kind)}

    assert kinds(forward_only=True) == {"actv"}
    assert kinds(backward_only=True) == {"actv_grad"}


def test_forward_only_and_backward_only_together_leave_no_activations_and_say_so(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Residual)
    found = observed(
        output, model, lambda: backward(model(values(3, 4))), forward_only=True, backward_only=True, wg_distribution=True
    )

    assert found.rows("actv") == found.rows("actv_grad") == []
    assert len(found.rows("grad_reduced")) == 6
    assert sum("forward_only and backward_only are both true" in record.message for record in caplog.records) == 1


# Copies of a model that is monitored.


def test_a_deep_copy_made_while_monitored_is_inert(output: Output) -> None:
    """Fault 13 of the tool before: a monitored model could not be saved."""
    model = seeded(Residual)
    copies: list[nn.Module] = []

    def run() -> None:
        copies.append(copy.deepcopy(model))
        backward(model(values(3, 4)))
        backward(copies[0](values(5, 4)))

    expected = observed(output, model, lambda: backward(model(values(3, 4))))
    found = observed(output, model, run)

    assert found.numbers("actv") == expected.numbers("actv")
    assert found.numbers("actv_grad") == expected.numbers("actv_grad")
    assert torch.equal(copies[0](values(2, 4)), model(values(2, 4)))


def test_a_shallow_copy_is_not_taken_for_the_model(output: Output) -> None:
    """It shares the hooks, as the replicas of ``nn.DataParallel`` do."""
    model = seeded(lambda: nn.Linear(4, 4))

    def run() -> None:
        copy.copy(model)(values(5, 4))
        model(values(3, 4))

    assert observed(output, model, run).rows("actv") == activations(output, model, values(3, 4)).rows("actv")


def test_a_model_saved_while_monitored_loads_and_does_not_record(output: Output) -> None:
    model = seeded(Residual)
    saved = io.BytesIO()

    def run() -> None:
        result = model(values(3, 4))
        torch.save(model, saved)
        backward(result)

    expected = observed(output, model, lambda: backward(model(values(3, 4))))
    found = observed(output, model, run)

    assert found.numbers("actv") == expected.numbers("actv")
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    again = observed(output, model, lambda: (loaded(values(5, 4)), model(values(3, 4))))
    assert again.numbers("actv") == expected.numbers("actv")
    assert torch.equal(loaded(values(2, 4)), model(values(2, 4)))


WITHOUT_THE_MONITOR = """
import sys

class NotInstalled:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "monitor":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
import torch
print(torch.load(sys.argv[1], weights_only=False)(torch.ones(1, 2)).item())
"""


def test_a_model_saved_while_monitored_loads_where_the_monitor_is_not_installed(output: Output, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    expected = model(torch.ones(1, 2)).item()
    observed(output, model, lambda: torch.save(model, tmp_path / "model.pt"))

    command = [sys.executable, "-c", WITHOUT_THE_MONITOR, str(tmp_path / "model.pt")]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert ran.stderr == ""
    assert float(ran.stdout) == expected
