"""MindSpore, level L0: every value is what one computes by hand."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from cells_to_dump import Convolutional, Dump, Transformer, described, dumping, gradients_of, input_of, same, seeded
from dump_examples import INPUT, Example, directory_of, same_to_the_letter, without_numbers
from mindspore import Tensor, nn

from monitor.mindspore import PrecisionDebugger


@pytest.fixture(params=[Convolutional, Transformer])
def kind(request: pytest.FixtureRequest) -> type[nn.Cell]:
    return request.param


def dumped(tmp_path: Path, kind: type[nn.Cell], **arguments: Any) -> tuple[Dump, nn.Cell, tuple[Tensor, ...]]:
    network = seeded(kind)
    with dumping(tmp_path, network, level="L0", **arguments):
        _, gradients = gradients_of(network)
    return Dump(tmp_path), network, gradients


def names_of(network: nn.Cell) -> dict[str, nn.Cell]:
    cells = {f"Cell.{name}.{type(cell).__name__}": cell for name, cell in network.cells_and_names() if name}
    return {name: cell for name, cell in cells.items() if not isinstance(cell, nn.CellList)}


def test_forwards_are_what_hooks_of_ones_own_see(tmp_path: Path, kind: type[nn.Cell]) -> None:
    dump, _, _ = dumped(tmp_path, kind)
    network = seeded(kind)
    seen: dict[str, Any] = {}
    for name, cell in names_of(network).items():

        def keep(_: nn.Cell, args: Any, result: Any, name: str = name) -> None:
            seen[name] = [described(args[0])], [described(result)]

        cell.register_forward_hook(keep)
    network(input_of(network))
    found = {name: (dump.data[f"{name}.forward.0"]["input_args"], dump.data[f"{name}.forward.0"]["output"]) for name in seen}
    assert all(same(list(found[name]), list(seen[name])) for name in names_of(network))


def test_backwards_are_what_hooks_of_ones_own_see(tmp_path: Path, kind: type[nn.Cell]) -> None:
    dump, _, _ = dumped(tmp_path, kind)
    network = seeded(kind)
    seen: dict[str, Any] = {}
    cells = {
        name: cell for name, cell in names_of(network).items() if ".norm." in name or name.split(".")[1] in ("relu", "head")
    }
    for name, cell in cells.items():

        def keep(_: nn.Cell, given: Any, taken: Any, name: str = name) -> None:
            seen[name] = {"input": [described(taken[0])], "output": [described(given[0])]}

        cell.register_backward_hook(keep)
    gradients_of(network)
    assert set(seen) == set(cells)
    assert all(same(dump.data[f"{name}.backward.0"], expected) for name, expected in seen.items())


def test_parameters_and_their_gradients_are_those_of_the_network(tmp_path: Path, kind: type[nn.Cell]) -> None:
    dump, network, gradients = dumped(tmp_path, kind)
    found = {id(parameter): gradient for parameter, gradient in zip(network.trainable_params(), gradients, strict=True)}
    for name, cell in names_of(network).items():
        own = dict(cell._params.items())
        if own:
            assert same(dump.data[f"{name}.forward.0"]["parameters"], {key: described(one) for key, one in own.items()})
            expected = {key: [described(found[id(one)])] for key, one in own.items()}
            assert same(dump.data[f"{name}.parameters_grad.0"], expected)


def test_a_convolution_stands_in_the_file_as_the_reference_has_it(tmp_path: Path) -> None:
    """Names and keys, each and in its order."""
    network = nn.SequentialCell(OrderedDict(conv2=nn.Conv2d(16, 32, 5, pad_mode="valid", has_bias=True))).set_train(True)
    with dumping(tmp_path, network, level="L0", task="tensor"):
        # What is differentiated by alone has a gradient here: a tensor outside has none.
        ms.value_and_grad(lambda x: network(x).sum(), 0, network.trainable_params())(ms.ops.ones(INPUT))
    expected = Example("mindspore", "Cell", "mindspore.Tensor", "Float32").convolution(directory_of(tmp_path))
    assert same_to_the_letter(without_numbers(tmp_path, expected), expected)


def test_a_list_of_models_numbers_them(tmp_path: Path) -> None:
    chunks = [seeded(Convolutional), nn.SequentialCell(nn.Dense(3, 2))]
    with dumping(tmp_path, chunks, level="L0"):
        chunks[1](chunks[0](input_of(chunks[0])))
    assert {"Cell.0.fc.Dense.forward.0", "Cell.1.0.Dense.forward.0"} <= set(Dump(tmp_path).data)


def test_cells_inside_a_compiled_one_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Compiled(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Dense(3, 3)

        @ms.jit
        def construct(self, x: Tensor) -> Tensor:
            return self.inner(x)

    network = nn.SequentialCell(Compiled(), nn.ReLU())
    for _ in range(2):
        with dumping(tmp_path, network, level="L0"):
            network(ms.ops.ones((1, 3)))
    names = set(Dump(tmp_path / "pynative").data)
    assert {"Cell.0.Compiled.forward.0", "Cell.1.ReLU.forward.0"} == names
    assert "Cells inside '0' are compiled (@jit) and are not dumped" in caplog.text


class Doubling(nn.Cell):
    """Has a backward of its own, so MindSpore calls no hook after its forward."""

    def construct(self, x: Tensor) -> Tensor:
        return x * 2

    def bprop(self, _x: Tensor, _result: Tensor, gradient: Tensor) -> tuple[Tensor]:
        return (gradient * 2,)


def test_a_cell_that_takes_no_hooks_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    network = nn.SequentialCell(Doubling(), nn.ReLU())
    with dumping(tmp_path, network, level="L0"):
        network(ms.ops.ones((1, 3)))
    assert set(Dump(tmp_path).data) == {"Cell.1.ReLU.forward.0"}
    assert caplog.text.count("'0' is a Doubling, which takes no hooks: it is not dumped.") == 1


def test_the_mode_that_compiles_everything_is_refused(tmp_path: Path) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(
            ValueError,
            match="is not recorded in GRAPH_MODE: only the dump tools of an Ascend device can dump it",
        ):
            PrecisionDebugger(dump_path=tmp_path, level="L0").start(seeded(Convolutional))
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


class Raises(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise KeyError


class Catches(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.raises, self.last = Raises(), nn.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        for _ in range(2):
            with suppress(KeyError):
                self.raises(x)
        return self.last(x)


def test_a_cell_that_has_raised_is_the_parent_of_nothing_later_and_has_an_entry_as_in_pytorch(tmp_path: Path) -> None:
    network = nn.SequentialCell(Catches())
    with dumping(tmp_path, network, level="L0"):
        network(Tensor([1.0]))
    dump = Dump(tmp_path)
    construct = dump.read("construct.json")
    catches, raises = "Cell.0.Catches.forward.0", "Cell.0.raises.Raises.forward"
    assert construct["Cell.0.last.ReLU.forward.0"] == catches
    assert [construct[f"Cell.0.raises.inner.ReLU.forward.{n}"] for n in range(2)] == [f"{raises}.{n}" for n in range(2)]
    assert [construct[f"{raises}.{n}"] for n in range(2)] == [catches] * 2
    assert dump.data[f"{raises}.1"] == {"input_args": [described(Tensor([1.0]))], "input_kwargs": {}, "output": [None]}


def test_a_cell_that_has_raised_is_the_parent_of_no_function_that_is_called_later(tmp_path: Path) -> None:
    network = nn.CellList([Raises()])
    with dumping(tmp_path, network, level="mix"):
        with suppress(KeyError):
            network[0](Tensor([1.0]))
        ms.ops.square(Tensor([1.0]))
    construct = Dump(tmp_path).read("construct.json")
    assert construct["Functional.square.0.forward"] is None
    assert construct["Cell.0.Raises.forward.0"] is None


@pytest.mark.parametrize("raising", [False, True])
def test_a_cell_that_is_being_called_at_stop_has_no_entry_and_one_that_has_raised_has(tmp_path: Path, raising: bool) -> None:
    class Stops(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            if raising:
                raise KeyError
            debugger.stop()
            return x

    network = nn.CellList([Stops()])
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    debugger.start(network)
    with suppress(KeyError):
        network[0](Tensor([1.0]))
    debugger.stop()
    debugger.step()
    assert list(Dump(tmp_path).data) == (["Cell.0.Stops.forward.0"] if raising else [])
