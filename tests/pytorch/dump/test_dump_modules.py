"""Level L0: every value is what one computes by hand."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from dump_examples import INPUT, Example, directory_of, same_to_the_letter, without_numbers
from dumping import Convolutional, Dump, Transformer, described, dumping, images, loss_of, same, seeded
from torch import Tensor, nn


def observed_by_hand(network: nn.Module) -> dict[str, dict[str, Any]]:
    """Inputs, outputs and gradients of each module of a run, as torch's own hooks bring them."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in network.named_modules():
        if module is network:
            continue
        seen = found[f"Module.{name}.{type(module).__name__}"] = {}

        def forward(_: nn.Module, args: Any, result: Any, seen: dict[str, Any] = seen) -> None:
            seen["input"], seen["output"] = described(args[0]), described(result)

        def backward(_: nn.Module, given: Any, taken: Any, seen: dict[str, Any] = seen) -> None:
            seen["given"] = [None if one is None else described(one) for one in given]
            seen["taken"] = [described(one) for one in taken]

        module.register_forward_hook(forward)
        module.register_full_backward_hook(backward)
    loss_of(network).backward()
    return {name: seen for name, seen in found.items() if seen}


pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


@pytest.fixture(params=[Convolutional, Transformer])
def kind(request: pytest.FixtureRequest) -> type[nn.Module]:
    return request.param


def dumped(tmp_path: Path, kind: type[nn.Module], **arguments: Any) -> tuple[Dump, nn.Module]:
    network = seeded(kind)
    with dumping(tmp_path, network, level="L0", **arguments):
        loss_of(network).backward()
    return Dump(tmp_path), network


def test_forwards_are_what_hooks_of_ones_own_see(tmp_path: Path, kind: type[nn.Module]) -> None:
    dump, _ = dumped(tmp_path, kind)
    for name, seen in observed_by_hand(seeded(kind)).items():
        entry = dump.data[f"{name}.forward.0"]
        assert same(entry["input_args"], [seen["input"]])
        assert same(entry["output"], [seen["output"]])


def test_backwards_are_what_hooks_of_ones_own_see(tmp_path: Path, kind: type[nn.Module]) -> None:
    dump, _ = dumped(tmp_path, kind)
    for name, seen in observed_by_hand(seeded(kind)).items():
        entry = dump.data[f"{name}.backward.0"]
        assert same(entry["input"], seen["taken"])
        assert same(entry["output"][: len(seen["given"])], seen["given"])


def test_parameters_and_their_gradients_are_those_of_the_network(tmp_path: Path, kind: type[nn.Module]) -> None:
    dump, network = dumped(tmp_path, kind)
    for name, module in network.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or module is network:
            continue
        base = f"Module.{name}.{type(module).__name__}"
        assert same(dump.data[f"{base}.forward.0"]["parameters"], {key: described(p) for key, p in own.items()})
        gradients = {key: [described(p.grad)] for key, p in own.items()}
        assert same({key: dump.data[f"{base}.parameters_grad.0"][key] for key in own}, gradients)


def test_tensors_are_stored_bit_for_bit(tmp_path: Path) -> None:
    dump, network = dumped(tmp_path, Convolutional, task="tensor")
    entry = dump.data["Module.conv1.Conv2d.forward.0"]
    assert dump.tensor(entry["input_args"][0]).tobytes() == images().numpy().tobytes()
    assert dump.tensor(entry["parameters"]["weight"]).tobytes() == network.conv1.weight.detach().numpy().tobytes()
    (gradient,) = dump.data["Module.conv1.Conv2d.parameters_grad.0"]["weight"]
    assert dump.tensor(gradient).tobytes() == network.conv1.weight.grad.numpy().tobytes()


def test_a_convolution_stands_in_the_file_as_the_reference_has_it(tmp_path: Path) -> None:
    """Names and keys, each and in its order."""
    network = nn.Sequential(OrderedDict(conv2=nn.Conv2d(16, 32, 5)))
    with dumping(tmp_path, network, level="L0", task="tensor"):
        network(torch.ones(INPUT, requires_grad=True)).sum().backward()
    expected = Example("pytorch", "Module", "torch.Tensor", "torch.float32").convolution(directory_of(tmp_path))
    assert same_to_the_letter(without_numbers(tmp_path, expected), expected)


def test_the_header_says_what_was_asked_for(tmp_path: Path) -> None:
    dump, _ = dumped(tmp_path, Convolutional)
    header = {key: value for key, value in dump.whole.items() if key != "data"}
    assert header == {"task": "statistics", "level": "L0", "framework": "pytorch", "dump_data_dir": None}


def test_the_hierarchy_names_the_module_around_each(tmp_path: Path) -> None:
    construct = dumped(tmp_path, Transformer)[0].construct
    assert construct["Module.blocks.1.norm.LayerNorm.forward.0"] == "Module.blocks.1.Block.forward.0"
    assert construct["Module.blocks.1.norm.LayerNorm.backward.0"] == "Module.blocks.1.Block.backward.0"
    assert construct["Module.blocks.1.Block.forward.0"] is None


def test_every_call_has_the_stack_that_it_came_from(tmp_path: Path) -> None:
    dump, _ = dumped(tmp_path, Convolutional)
    (frames,) = [stack for names, stack in dump.stack.values() if "Module.fc.Linear.forward.0" in names]
    assert "in forward, \n return self.fc(" in frames[0]
    assert not [frame for frame in frames if "/monitor/" in frame or "nn/modules/module.py" in frame]


def test_a_list_of_models_numbers_them(tmp_path: Path) -> None:
    chunks = [seeded(Convolutional), nn.Sequential(nn.Linear(3, 2))]
    with dumping(tmp_path, chunks, level="L0"):
        chunks[1](chunks[0](images())).sum().backward()
    names = set(Dump(tmp_path).data)
    assert {"Module.0.fc.Linear.forward.0", "Module.1.0.Linear.backward.0"} <= names


def test_calls_of_one_module_are_counted(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.linear(x))

    network = Twice()
    with dumping(tmp_path, network, level="L0"):
        for _ in range(2):
            network(torch.ones(1, 3)).sum().backward()
    names = [name.removeprefix("Module.linear.Linear.") for name in Dump(tmp_path).data]
    assert sorted(names) == [
        *(f"backward.{n}" for n in range(4)),
        *(f"forward.{n}" for n in range(4)),
        "parameters_grad.0",
        "parameters_grad.1",
    ]


def test_an_input_is_read_before_the_module_changes_it(tmp_path: Path) -> None:
    network = nn.Sequential(nn.ReLU(inplace=True))
    with dumping(tmp_path, network, level="L0"):
        network(torch.tensor([-2.0, 1.0]))
    entry = Dump(tmp_path).data["Module.0.ReLU.forward.0"]
    assert (entry["input_args"][0]["Min"], entry["output"][0]["Min"]) == (-2.0, 0.0)


def test_what_is_no_tensor_stands_with_its_type_and_value(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor, *_: Any, **__: Any) -> dict[str, Any]:
            return {"x": x, "n": None}

    network = nn.Sequential()
    network.odd = Odd()
    with dumping(tmp_path, network, level="L0", task="tensor"):
        network.odd(torch.ones(2), 3, [True, torch.zeros(1)], mode="up", at=slice(1, None))
    entry = Dump(tmp_path).data["Module.odd.Odd.forward.0"]
    assert entry["input_args"][1] == {"type": "int", "value": 3}
    assert entry["input_args"][2][0] == {"type": "bool", "value": True}
    assert entry["input_args"][2][1]["data_name"] == "Module.odd.Odd.forward.0.input.2.1.npy"
    assert entry["input_kwargs"] == {
        "mode": {"type": "str", "value": "up"},
        "at": {"type": "slice", "value": [1, None, None]},
    }
    assert list(entry["output"][0]) == ["x", "n"]
    assert entry["output"][0]["n"] is None


def test_a_number_that_is_none_is_written_as_such(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Identity())
    with dumping(tmp_path, network, level="L0"):
        network(torch.tensor([1.0, float("nan"), float("inf")]))
    (leaf,) = Dump(tmp_path).data["Module.0.Identity.forward.0"]["output"]
    assert [str(leaf[key]) for key in ("Max", "Min", "Mean", "Norm")] == ["nan"] * 4


def test_an_empty_tensor_has_a_norm_and_nothing_else(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Identity())
    with dumping(tmp_path, network, level="L0"):
        network(torch.ones(0, 3))
    (leaf,) = Dump(tmp_path).data["Module.0.Identity.forward.0"]["output"]
    assert [leaf[key] for key in ("shape", "Max", "Min", "Mean", "Norm")] == [[0, 3], None, None, None, 0.0]


class GivesNothing(nn.Module):
    def __init__(self, error: type[Exception] | None) -> None:
        super().__init__()
        self.inner = nn.ReLU()
        self._error = error

    def forward(self, x: torch.Tensor) -> None:
        self.inner(x)
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, KeyError])
def test_a_module_that_gives_nothing_has_an_entry_as_what_it_calls_names_it(
    tmp_path: Path, error: type[Exception] | None
) -> None:
    network = nn.ModuleList([GivesNothing(error)])
    with dumping(tmp_path, network, level="L0"), suppress(KeyError):
        network[0](torch.ones(2))
    dump = Dump(tmp_path)
    assert dump.data["Module.0.GivesNothing.forward.0"]["output"] == [None]
    assert dump.construct == {
        "Module.0.inner.ReLU.forward.0": "Module.0.GivesNothing.forward.0",
        "Module.0.GivesNothing.forward.0": None,
    }


class Waits(nn.Module):
    """Ten times what it is given. The call with a 1 begins first, and ends first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.over = (threading.Event() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if x.item() == 1:
            self.first.set()
            assert self.second.wait(30)
        else:
            self.second.set()
            assert self.over.wait(30)
        return 10 * x


def test_two_threads_that_call_a_module_have_each_their_own_values(tmp_path: Path) -> None:
    network = nn.Sequential(Waits())

    def first() -> None:
        network(torch.tensor(1.0))
        network[0].over.set()

    with dumping(tmp_path, network, level="L0"):
        other = threading.Thread(target=first)
        other.start()
        assert network[0].first.wait(30)
        network(torch.tensor(2.0))
        other.join()
    pairs = {(entry["input_args"][0]["Max"], entry["output"][0]["Max"]) for entry in Dump(tmp_path).data.values()}
    assert pairs == {(1.0, 10.0), (2.0, 20.0)}


class Passing(nn.Module):
    """Uses ``b`` three times over, and gives it back."""

    def forward(self, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 3 * b, b


class Weighs(nn.Module):
    """Two of the first and half of the second."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 2 * a + 0.5 * b


class Shares(nn.Module):
    """Gives one tensor to all, and uses it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.passing, self.weighs, self.same = nn.Linear(2, 2), Passing(), Weighs(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.make(x)
        passed, b = self.passing(x, y)
        return (passed + 10 * b + self.weighs(y, y) + self.weighs(y, y.view(2)) + self.same(y)).sum()


def test_a_module_hands_an_input_what_its_own_uses_bring(tmp_path: Path) -> None:
    model = Shares()
    with dumping(tmp_path, model, level="L0", task="tensor"):
        model(torch.ones(2)).backward()
    dump = Dump(tmp_path)

    def gradients(name: str) -> list[float | None]:
        return [None if one is None else dump.tensor(one).tolist()[0] for one in dump.data[name]["output"]]

    assert gradients("Module.passing.Passing.backward.0") == [None, 3.0]
    assert gradients("Module.same.Identity.backward.0") == [None]
    assert gradients("Module.weighs.Weighs.backward.0") == [None, None]
    shared = dump.data["Module.weighs.Weighs.backward.0"]["output_shared"]
    assert {name: dump.tensor(one).tolist()[0] for name, one in shared.items()} == {"0+1": 2.5}
    assert gradients("Module.weighs.Weighs.backward.1") == [2.0, 0.5]
    assert "output_shared" not in dump.data["Module.weighs.Weighs.backward.1"]


class Bag:
    """An object of no class that the monitor knows."""

    def __init__(self, y: Any) -> None:
        self.y = y


class Hiding(nn.Module):
    """Uses ``b`` once for what it returns as a tensor, and three times for what it returns out of sight."""

    def __init__(self, put: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.put = put

    def forward(self, x: torch.Tensor, b: torch.Tensor) -> Any:
        return (x + b, x), self.put(3 * b)


@pytest.mark.parametrize(
    ("put", "take", "expected"),
    [(Bag, lambda bag: bag.y, 4.0), (lambda y: iter([y]), next, None)],
    ids=["in an object", "in an iterator"],
)
def test_what_a_module_returns_out_of_sight_is_among_its_uses_or_there_is_no_gradient(
    put: Callable[[torch.Tensor], Any], take: Callable[[Any], torch.Tensor], expected: float | None, tmp_path: Path
) -> None:
    make = nn.Linear(2, 2)
    model = nn.ModuleDict({"make": make, "hiding": Hiding(put)})
    with dumping(tmp_path, model, level="L0", task="tensor"):
        (y, _), bag = model["hiding"](x := torch.ones(2, requires_grad=True), make(x))
        (y + take(bag)).sum().backward()
    dump = Dump(tmp_path)
    output = dump.data["Module.hiding.Hiding.backward.0"]["output"]
    assert [None if one is None else dump.tensor(one).tolist()[0] for one in output][1:] == [expected]
