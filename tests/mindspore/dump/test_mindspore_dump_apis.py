"""MindSpore, levels L1, mix and debug: what is called, the same bits, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from cells_to_dump import Convolutional, Dump, Transformer, described, dumping, gradients_of, input_of, same, seeded
from dump_examples import RELU, Example, directory_of, same_to_the_letter, without_numbers
from mindspore import Tensor, mint, nn, ops
from mindspore.train import Model

from monitor.dump import load_tensor
from monitor.mindspore import MsprobeInitStep, MsprobeStep, PrecisionDebugger, seed_all
from monitor.mindspore.dump.apis import PLACES


def test_relu_stands_in_the_file_as_the_reference_has_it(tmp_path: Path) -> None:
    """Names and keys, each and in its order."""
    with dumping(tmp_path, task="tensor"):
        ms.grad(ops.relu)(ops.sin(ops.ones(RELU)))
    expected = Example("mindspore", "Cell", "mindspore.Tensor", "Float32").relu(directory_of(tmp_path))
    told = without_numbers(tmp_path, expected)
    told["data"] = {name: entry for name, entry in told["data"].items() if ".relu." in name}
    assert same_to_the_letter(told, expected)


def test_the_backward_of_an_api_has_the_gradients_of_both_sides(tmp_path: Path) -> None:
    a, b = Tensor([1.0, -2.0]), Tensor([3.0, 5.0])
    with dumping(tmp_path):
        ms.grad(lambda a, b: ops.mul(a, b).sum(), (0, 1))(a, b)
    entry = Dump(tmp_path).data["Functional.mul.0.backward"]
    assert same(entry, {"input": [described(Tensor([1.0, 1.0]))], "output": [described(b), described(a)]})


def test_apis_have_the_prefix_of_their_place(tmp_path: Path) -> None:
    x = Tensor([1.0, 2.0])
    with dumping(tmp_path):
        mint.add(x, x)
        mint.nn.functional.relu(x)
        ops.relu(x)
        x + x
        x.sum()
    assert list(Dump(tmp_path).data) == [
        "Mint.add.0.forward",
        "MintFunctional.relu.0.forward",
        "Functional.relu.0.forward",
        "Tensor.__add__.0.forward",
        "Tensor.sum.0.forward",
    ]


@pytest.mark.parametrize("with_model", [False, True])
def test_primitives_are_seen_where_a_model_is_passed(tmp_path: Path, with_model: bool) -> None:
    network = seeded(Convolutional)
    with dumping(tmp_path, network if with_model else None):
        network(input_of(network))
    names = [name for name in Dump(tmp_path).data if name.startswith("Primitive")]
    assert ("Primitive.conv2d.Conv2D.0.forward" in names) is with_model
    assert bool(names) is with_model


def test_mix_places_apis_below_the_cells_that_call_them_and_has_none_of_our_own(tmp_path: Path) -> None:
    network = seeded(Convolutional)
    with dumping(tmp_path, network, level="mix"):
        gradients_of(network)
    dump = Dump(tmp_path)
    construct = dump.read("construct.json")
    assert construct["Primitive.conv2d.Conv2D.0.forward"] == "Cell.conv1.Conv2d.forward.0"
    assert construct["Primitive.conv2d.Conv2D.0.backward"] == "Cell.conv1.Conv2d.backward.0"
    assert not [name for name in dump.data if name.startswith("Tensor.view")]


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("kind", [Convolutional, Transformer])
def test_a_run_that_is_dumped_computes_the_same_bits(kind: type[nn.Cell], level: str, task: str, tmp_path: Path) -> None:
    def bits(loss: Tensor, gradients: tuple[Tensor, ...]) -> list[bytes]:
        return [one.asnumpy().tobytes() for one in (loss, *gradients)]

    expected = bits(*gradients_of(seeded(kind)))
    network = seeded(kind)
    with dumping(tmp_path, network, level=level, task=task):
        found = bits(*gradients_of(network))
    assert found == expected


def tables(network: nn.Cell) -> dict[Any, dict[str, Any]]:
    """Everything that could have been replaced: functions, methods, calls of primitives."""
    primitives = [one for _, cell in network.cells_and_names() for one in (*vars(cell).values(), *cell._primitives.values())]
    classes = {base for one in primitives if isinstance(one, ms.ops.Primitive) for base in type(one).__mro__}
    assert {ms.ops.Primitive, ms.ops.MatMul} <= classes
    return {place: dict(vars(place)) for place in (*PLACES.values(), *classes, nn.Cell)}


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("kind", [Convolutional, Transformer])
def test_what_mindspore_is_made_of_is_the_same_after_a_dump(tmp_path: Path, kind: type[nn.Cell], level: str) -> None:
    network = seeded(kind)
    before = tables(network)
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    debugger.start(network)
    assert (tables(network) == before) is (level == "L0")
    gradients_of(network)
    debugger.stop()
    assert tables(network) == before
    debugger.step()


def test_cells_have_no_hooks_after_a_dump(tmp_path: Path) -> None:
    def hooks(network: nn.Cell) -> list[int]:
        return [len(one._forward_hook) + len(one._forward_pre_hook) for _, one in network.cells_and_names()]

    network = seeded(Convolutional)
    with dumping(tmp_path, network, level="mix"):
        assert any(hooks(network))
        gradients_of(network)
    assert not any(hooks(network))


@pytest.mark.parametrize("kind", [nn.Adam, nn.SGD, nn.AdamWeightDecay])
def test_optimizers_that_are_compiled_work_within_a_dump_and_after_it(tmp_path: Path, kind: type[nn.Optimizer]) -> None:
    def trained(*, dump: bool) -> list[bytes]:
        network = seeded(Convolutional)
        optimizer = kind(network.trainable_params(), learning_rate=0.1)
        debugger = PrecisionDebugger(dump_path=tmp_path)
        for n in range(2):
            if dump and n == 0:
                debugger.start(network)
            optimizer(gradients_of(network)[1])
            debugger.step()
        return [parameter.asnumpy().tobytes() for parameter in network.get_parameters()]

    assert trained(dump=True) == trained(dump=False)


def test_a_function_that_is_compiled_within_a_dump_computes_what_it_did(tmp_path: Path) -> None:
    @ms.jit
    def compiled(x: Tensor) -> Tensor:
        return ops.relu(x) + mint.exp(x).sum()

    x = Tensor([-1.0, 2.0])
    with dumping(tmp_path):
        found = compiled(x).asnumpy()
    assert np.allclose(found, np.maximum([-1.0, 2.0], 0) + np.exp([-1.0, 2.0]).sum())
    assert np.array_equal(found, compiled(x).asnumpy())


def test_bfloat16_is_stored_bit_for_bit(tmp_path: Path) -> None:
    x = Tensor([1.0, -2.5, 3.140625], ms.bfloat16)
    with dumping(tmp_path, task="tensor"):
        x.reshape(3, 1)
    dump = Dump(tmp_path)
    leaf = dump.data["Tensor.reshape.0.forward"]["input_args"][0]
    assert (leaf["dtype"], leaf["Max"]) == ("BFloat16", 3.140625)
    assert load_tensor(dump.directory / "dump_tensor_data" / leaf["data_name"]).tolist() == [1.0, -2.5, 3.140625]


def test_an_error_of_the_programs_own_reaches_it(tmp_path: Path) -> None:
    """There is no kernel on a CPU for this, which shows when something waits for it: here the dump."""
    with dumping(tmp_path), pytest.raises(TypeError, match="Unsupported data type"):
        ops.abs(Tensor([1.0], ms.bfloat16)).asnumpy()
    with dumping(tmp_path / "again"):
        ops.relu(Tensor([1.0]))
    assert list(Dump(tmp_path / "again").data) == ["Functional.relu.0.forward"]


def test_single_values_and_their_gradients_are_saved_by_name(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path, level="debug")

    def forward(x: Tensor) -> Tensor:
        y = x * 2
        debugger.save(y, "y")
        return (y * y).sum()

    ms.grad(forward)(Tensor([1.0, 2.0]))
    debugger.step()
    data = Dump(tmp_path, name="debug.json").data
    assert list(data) == ["y.0.debug", "y_grad.0.debug"]
    assert same(data["y_grad.0.debug"], described(Tensor([4.0, 8.0])))


@pytest.mark.parametrize("passed", [False, True])
def test_model_dumps_each_of_its_steps_by_a_callback(tmp_path: Path, passed: bool) -> None:
    network = seeded(Convolutional)
    batch = (input_of(network).asnumpy(), np.zeros((2, 3), np.float32))
    data = ms.dataset.GeneratorDataset([batch, batch], ["x", "y"], shuffle=False)
    model = Model(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.01))
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    if passed:
        debugger.start(network)
    model.train(1, data, callbacks=[MsprobeInitStep(debugger), MsprobeStep(debugger)], dataset_sink_mode=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step0", "step1"]
    for step in range(2):
        names = set(Dump(tmp_path, step).data)
        assert {"Cell.conv1.Conv2d.forward.0", "Cell.conv1.Conv2d.parameters_grad.0"} <= names


def test_a_prefix_of_the_users_goes_before_that_of_the_list_until_it_is_restored(tmp_path: Path) -> None:
    x = ops.ones((2, 2))
    original = ops.matmul
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.register_custom_api(ops, "matmul", "Mine")
    debugger.start()
    ops.matmul(x, x)
    debugger.restore_custom_api(ops, "matmul")
    ops.matmul(x, x)
    debugger.register_custom_api(ops, "matmul", "Again")
    ops.matmul(x, x)
    debugger.stop()
    debugger.step()
    debugger.close()
    assert ops.matmul is original
    assert list(Dump(tmp_path).data) == ["Mine.matmul.0.forward", "Functional.matmul.0.forward", "Again.matmul.0.forward"]


def test_a_list_may_name_modules_as_mindspore_does(tmp_path: Path) -> None:
    lists = {"ops": ["relu"], "mint": ["sin"], "mint.nn.functional": ["relu"], "tensor": ["sum"]}
    (tmp_path / "apis.yaml").write_text("".join(f"{key}:\n- {one}\n" for key, (one,) in lists.items()))
    (tmp_path / "config.json").write_text(json.dumps({"api_list": str(tmp_path / "apis.yaml")}))
    x = Tensor([1.0, 2.0])
    with dumping(tmp_path / "out", config_path=tmp_path / "config.json"):
        for call in (ops.relu, mint.sin, mint.nn.functional.relu, ops.sin, Tensor.sum):
            call(x)
    expected = ["Functional.relu", "Mint.sin", "MintFunctional.relu", "Tensor.sum"]
    assert list(Dump(tmp_path / "out").data) == [f"{name}.0.forward" for name in expected]


def test_the_class_represents_the_debugger_that_was_made_last(tmp_path: Path) -> None:
    PrecisionDebugger(dump_path=tmp_path)
    PrecisionDebugger.start()
    ops.abs(ops.ones((2,)))
    PrecisionDebugger.stop()
    PrecisionDebugger.step()
    assert "Functional.abs.0.forward" in Dump(tmp_path).data


def test_a_seed_repeats_random_numbers() -> None:
    found = []
    for _ in range(2):
        seed_all(7)
        found.append((np.random.rand(), ops.rand(3).asnumpy().tolist()))
    assert found[0] == found[1]


def test_writing_into_a_tensor_is_a_call(tmp_path: Path) -> None:
    x = Tensor([1.0, 2.0])
    with dumping(tmp_path):
        x[0] = 5.0
    assert Dump(tmp_path).data["Tensor.__setitem__.0.forward"]["input_args"][0]["Max"] == 2.0
    assert x.asnumpy().tolist() == [5.0, 2.0]
