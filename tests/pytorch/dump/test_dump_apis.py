"""Level L1 and mix: calls of torch's functions and methods."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import dumping as module
import pytest
import torch
import torch.nn.functional as F
from dump_examples import RELU, Example, directory_of, same_to_the_letter, without_numbers
from dumping import Convolutional, Dump, Transformer, described, dumping, images, loss_of, same, seeded
from torch import nn

from monitor.config import ConfigError
from monitor.pytorch import PrecisionDebugger, TrainerMon


def test_relu_stands_in_the_file_as_the_reference_has_it(tmp_path: Path) -> None:
    """Names and keys, each and in its order."""
    x = torch.ones(RELU, requires_grad=True)
    with dumping(tmp_path, task="tensor"):
        y = F.relu(x)
        torch.autograd.backward(y, torch.cos(x.detach()))
    expected = Example("pytorch", "Module", "torch.Tensor", "torch.float32").relu(directory_of(tmp_path))
    told = without_numbers(tmp_path, expected)
    told["data"] = {name: entry for name, entry in told["data"].items() if ".relu." in name}
    assert same_to_the_letter(told, expected)


def test_the_backward_of_relu_has_the_gradients_of_both_sides(tmp_path: Path) -> None:
    x = images().requires_grad_()
    weights = torch.cos(images())
    with dumping(tmp_path):
        torch.sum(F.relu(x) * weights).backward()
    entry = Dump(tmp_path).data["Functional.relu.0.backward"]
    assert same(entry, {"input": [described(weights)], "output": [described(x.grad)]})


def test_functions_methods_and_operators_have_the_prefix_of_their_place(tmp_path: Path) -> None:
    x = torch.ones(2, 2)
    with dumping(tmp_path):
        torch.matmul(x, x)
        x @ x
        x.add(x)
        x + 1
        F.softmax(x, dim=-1)
    assert list(Dump(tmp_path).data) == [
        "Torch.matmul.0.forward",
        "Tensor.matmul.0.forward",
        "Tensor.add.0.forward",
        "Tensor.add.1.forward",
        "Functional.softmax.0.forward",
    ]


def test_each_input_of_an_operation_has_its_own_gradient(tmp_path: Path) -> None:
    a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 5.0], requires_grad=True)
    with dumping(tmp_path, task="tensor"):
        torch.sum(a.mul(b)).backward()
    dump = Dump(tmp_path)
    gradients = dump.data["Tensor.mul.0.backward"]["output"]
    assert [dump.tensor(one).tolist() for one in gradients] == [[3.0, 5.0], [1.0, 2.0]]


def test_a_tensor_that_is_given_twice_has_one_gradient_under_a_name_of_both_places(tmp_path: Path) -> None:
    a = torch.tensor([1.0, 2.0], requires_grad=True)
    with dumping(tmp_path, task="tensor"):
        torch.sum(torch.mul(a, a)).backward()
    dump = Dump(tmp_path)
    entry = dump.data["Torch.mul.0.backward"]
    assert entry["output"] == [None, None]
    assert {name: dump.tensor(one).tolist() for name, one in entry["output_shared"].items()} == {"0+1": [2.0, 4.0]}
    assert entry["output_shared"]["0+1"]["data_name"] == "Torch.mul.0.backward.output.0+1.npy"


def test_a_function_that_returns_its_argument_hands_it_no_gradient_of_its_own(tmp_path: Path) -> None:
    a = torch.tensor([1.0, 2.0], requires_grad=True)
    with dumping(tmp_path, task="tensor"):
        (torch.nn.functional.dropout(a, 0.0) * 3 + a).sum().backward()
    entry = Dump(tmp_path).data["Functional.dropout.0.backward"]
    assert entry["output"] == [None]


def test_gradients_of_keyword_arguments_come_behind_those_of_the_others(tmp_path: Path) -> None:
    a, b = torch.ones(1, requires_grad=True), torch.full((1,), 3.0, requires_grad=True)
    with dumping(tmp_path, task="tensor"):
        torch.mul(a, other=b).backward()
    dump = Dump(tmp_path)
    gradients = dump.data["Torch.mul.0.backward"]["output"]
    assert [dump.tensor(one).tolist() for one in gradients] == [[3.0], [1.0]]


@pytest.mark.parametrize("kind", [Convolutional, Transformer])
def test_mix_places_apis_below_the_modules_that_call_them(tmp_path: Path, kind: type[nn.Module]) -> None:
    network = seeded(kind)
    with dumping(tmp_path, network, level="mix"):
        loss_of(network).backward()
    construct = Dump(tmp_path).construct
    last = "fc" if kind is Convolutional else "head"
    number = 0 if kind is Convolutional else 4
    assert construct[f"Functional.linear.{number}.forward"] == f"Module.{last}.Linear.forward.0"
    assert construct[f"Functional.linear.{number}.backward"] == f"Module.{last}.Linear.backward.0"
    assert construct["Functional.cross_entropy.0.forward"] is None


@pytest.mark.parametrize("kind", [Convolutional, Transformer])
def test_apis_of_a_network_have_the_values_of_its_modules(tmp_path: Path, kind: type[nn.Module]) -> None:
    network = seeded(kind)
    with dumping(tmp_path, network, level="mix"):
        loss_of(network).backward()
    data = Dump(tmp_path).data
    last = "fc" if kind is Convolutional else "head"
    number = 0 if kind is Convolutional else 4
    for direction in ("forward", "backward"):
        api, module = data[f"Functional.linear.{number}.{direction}"], data[f"Module.{last}.Linear.{direction}.0"]
        assert api["output"][0] == module["output"][0]
    assert (
        data[f"Functional.linear.{number}.backward"]["output"][1]
        == data[f"Module.{last}.Linear.parameters_grad.0"]["weight"][0]
    )


def test_the_hierarchy_of_apis_alone_is_empty(tmp_path: Path) -> None:
    with dumping(tmp_path):
        F.relu(torch.ones(1))
    assert Dump(tmp_path).construct == {}


def test_a_list_of_ones_own_replaces_that_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "apis.json").write_text(json.dumps({"Torch": ["add"]}))
    (tmp_path / "config.json").write_text(json.dumps({"api_list": str(tmp_path / "apis.json")}))
    with dumping(tmp_path / "out", config_path=tmp_path / "config.json"):
        F.relu(torch.add(torch.ones(1), 1))
    assert list(Dump(tmp_path / "out").data) == ["Torch.add.0.forward"]


def test_a_list_may_be_yaml(tmp_path: Path) -> None:
    (tmp_path / "apis.yaml").write_text("Torch:  # of the package torch\n- add\n")
    (tmp_path / "config.json").write_text(json.dumps({"api_list": str(tmp_path / "apis.yaml")}))
    with dumping(tmp_path / "out", config_path=tmp_path / "config.json"):
        F.relu(torch.add(torch.ones(1), 1))
    assert list(Dump(tmp_path / "out").data) == ["Torch.add.0.forward"]


def test_yaml_that_cannot_be_read_is_refused_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "apis.yaml").write_text("Torch: [add\n")
    (tmp_path / "config.json").write_text(json.dumps({"api_list": str(tmp_path / "apis.yaml")}))
    with pytest.raises(ConfigError, match=r"apis\.yaml: while parsing(?s:.*)line 2"):
        PrecisionDebugger(tmp_path / "config.json", dump_path=tmp_path).start()


def test_the_level_of_kernels_is_refused_with_the_reason(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L2")
    with pytest.raises(ValueError, match="L2 is not recorded: kernels can be recorded only by the dump tools of an Ascend"):
        debugger.start(nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []


def test_a_list_with_an_unknown_prefix_is_refused_before_anything_is_attached(tmp_path: Path) -> None:
    (tmp_path / "apis.json").write_text(json.dumps({"torch": ["add"]}))
    (tmp_path / "config.json").write_text(json.dumps({"api_list": str(tmp_path / "apis.json")}))
    debugger = PrecisionDebugger(tmp_path / "config.json", dump_path=tmp_path)
    with pytest.raises(ConfigError, match='"torch" is not known: expected Functional, Torch, Tensor, Distributed'):
        debugger.start()


def test_a_list_with_something_else_than_names_is_refused_before_anything_is_attached(tmp_path: Path) -> None:
    (tmp_path / "apis.json").write_text(json.dumps({"Torch": ["add", 3]}))
    (tmp_path / "config.json").write_text(json.dumps({"api_list": str(tmp_path / "apis.json")}))
    debugger = PrecisionDebugger(tmp_path / "config.json", dump_path=tmp_path)
    with pytest.raises(ConfigError, match=r"apis.json: 3 is not allowed: expected the name of an API"):
        debugger.start()


def test_an_api_of_the_users_is_recorded_until_it_is_restored(tmp_path: Path) -> None:
    original = module.described
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.register_custom_api(module, "described", "Mine")
    debugger.start()
    module.described(torch.ones(2))
    debugger.restore_custom_api(module, "described")
    assert module.described is original
    debugger.stop()
    debugger.step()
    assert "Mine.described.0.forward" in Dump(tmp_path).data


def test_a_prefix_of_the_users_goes_before_that_of_the_list_until_it_is_restored(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.register_custom_api(torch, "matmul", "Mine")
    debugger.register_custom_api(F, "relu", "Mine")
    debugger.start()
    x = torch.ones(2, 2)
    torch.matmul(x, x), F.relu(x)
    debugger.restore_custom_api(torch, "matmul")
    debugger.restore_custom_api(F, "relu")
    torch.matmul(x, x), F.relu(x)
    debugger.stop()
    debugger.step()
    forwards = [name for name in Dump(tmp_path).data if name.endswith("forward")]
    assert forwards == ["Mine.matmul.0.forward", "Mine.relu.0.forward", "Torch.matmul.0.forward", "Functional.relu.0.forward"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_so_it_does_where_the_list_has_the_function_patched(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        debugger = PrecisionDebugger(dump_path=tmp_path)
        debugger.register_custom_api(torch.distributed, "all_reduce", "Mine")
        debugger.start()
        torch.distributed.all_reduce(torch.ones(2))
        debugger.restore_custom_api(torch.distributed, "all_reduce")
        torch.distributed.all_reduce(torch.ones(2))
        debugger.stop()
        debugger.step()
    finally:
        torch.distributed.destroy_process_group()
    assert list(Dump(tmp_path).data) == ["Mine.all_reduce.0.forward", "Distributed.all_reduce.0.forward"]


def test_tensors_say_whether_they_require_gradients(tmp_path: Path) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with dumping(tmp_path, level="L1"):
        y = torch.mul(x, torch.ones(2, 2))
        torch.sum(y).backward()
    entry, backward = (Dump(tmp_path).data[f"Torch.mul.0.{way}"] for way in ("forward", "backward"))
    assert [leaf["requires_grad"] for leaf in (*entry["input_args"], *entry["output"])] == [True, False, True]
    assert [leaf["requires_grad"] for leaf in backward["input"]] == [False]


def test_an_api_that_is_not_there_cannot_be_registered(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'torch' has no function 'mutmal'"):
        PrecisionDebugger(dump_path=tmp_path).register_custom_api(torch, "mutmal", "Torch")


def test_a_call_that_raises_leaves_no_entry_and_the_next_one_is_recorded(tmp_path: Path) -> None:
    with dumping(tmp_path):
        with pytest.raises(RuntimeError):
            torch.matmul(torch.ones(2), torch.ones(3))
        torch.matmul(torch.ones(2), torch.ones(2))
    assert list(Dump(tmp_path).data) == ["Torch.matmul.1.forward"]


def test_checksums_are_those_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"statistics": {"summary_mode": "md5"}}))
    x = torch.arange(6.0).view(2, 3).t()
    with dumping(tmp_path / "out", config_path=tmp_path / "config.json"):
        F.relu(x)
    (leaf,) = Dump(tmp_path / "out").data["Functional.relu.0.forward"]["input_args"]
    assert leaf["md5"] == f"{zlib.crc32(x.contiguous().numpy().tobytes()):08x}"
    assert list(leaf) == ["type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad", "md5"]


def test_a_tuple_with_names_is_several_outputs(tmp_path: Path) -> None:
    with dumping(tmp_path, task="tensor"):
        torch.max(torch.ones(2, 3), 1)
    (entry,) = Dump(tmp_path).data.values()
    assert [leaf["data_name"] for leaf in entry["output"]] == [f"Torch.max.0.forward.output.{i}.npy" for i in range(2)]


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize(
    "transformed",
    [torch.vmap(torch.relu), torch.func.grad(lambda x: torch.relu(x).sum()), torch.func.jacfwd(torch.relu)],
    ids=["vmap", "grad", "jacfwd"],
)
def test_a_tensor_that_is_many_at_once_is_described_without_numbers(tmp_path: Path, transformed: Any, task: str) -> None:
    with dumping(tmp_path, task=task):
        transformed(torch.ones(3))
    dump = Dump(tmp_path)
    (leaf,) = dump.data["Torch.relu.0.forward"]["input_args"]
    assert [leaf[key] for key in ("dtype", "Max", "Norm")] == ["torch.float32", None, None]
    assert not (dump.directory / "dump_error_info.log").exists()


def test_what_a_monitor_computes_meanwhile_is_not_in_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "monitored"))
    recorded = dict.fromkeys(["xy_distribution", "wg_distribution", "param_distribution", "mv_distribution"], True)
    (tmp_path / "monitor.json").write_text(json.dumps({"targets": {}, **recorded, "ops": ["norm", "max", "zeros"]}))

    def names(out: Path, *, monitored: bool) -> list[str]:
        network = seeded(Convolutional)
        optimizer = torch.optim.Adam(network.parameters())
        if monitored:
            monitor = TrainerMon(tmp_path / "monitor.json", params_have_main_grad=False)
            monitor.set_monitor(network, grad_acc_steps=1, optimizer=optimizer)
        with dumping(out, network, level="mix"):
            loss_of(network).backward()
            optimizer.step()
        if monitored:
            monitor.close()
        return list(Dump(out).data)

    assert names(tmp_path / "with", monitored=True) == names(tmp_path / "without", monitored=False)
