"""The examples of the reference's page on dumps of MindSpore, run as written but for import paths and the device.

``EXAMPLES`` names all of them: an example that the page has and the table lacks fails the first test.
"""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
import pytest
from dump_examples import NUMBERS, Example, same_to_the_letter
from mindspore import Tensor, nn, ops
from reference_examples import DUMP, WITHOUT, accepts, code_in, moved, objects_in, prototypes_in, text_of

import monitor.mindspore as ours
from monitor.mindspore.dump.apis import PLACES, SECTIONS

PAGE = text_of(DUMP)

pytestmark = pytest.mark.skipif(not PAGE, reason=WITHOUT)

BEGINS = re.compile(r"^(import mindspore as ms|from vllm import )")
CODE = re.compile(
    r"^(import |from |#|debugger|model|trainer|for |grad_net|output|loss|ms\.|set_device|seed_all|prompts|sampling|llm|$)"
)

GRAPH = "GRAPH_MODE: only the dump tools of an Ascend device can dump it"
KERNELS = "level L2 is not recorded: kernels can be recorded only by the dump tools of an Ascend device"


class Outcome(NamedTuple):
    """The levels at which an example is run, and why it is refused there; empty if it dumps."""

    levels: tuple[str, ...]
    refused: str = ""


EXAMPLES = {
    "static graph, cells, a loop": Outcome(("L0",), GRAPH),
    "static graph, cells, Model.train": Outcome(("L0",), GRAPH),
    "static graph, kernels": Outcome(("L2",), KERNELS),
    "dynamic graph, a loop": Outcome(("L1",)),
    "dynamic graph, Model.train": Outcome(("L0", "L1", "mix")),
    "dynamic graph, a block of code": Outcome(("L1",)),
    "dynamic graph, kernels, a loop": Outcome(("L2",), KERNELS),
    "dynamic graph, kernels, Model.train": Outcome(("L2",), KERNELS),
    "inference, a range of tokens": Outcome(("L0", "L1", "mix")),
}
FOUND = code_in(PAGE, BEGINS, CODE)
BY_NAME = dict(zip(EXAMPLES, FOUND, strict=False))
DUMPING = [(name, level) for name, one in EXAMPLES.items() if not one.refused for level in one.levels]
REFUSED = [(name, level) for name, one in EXAMPLES.items() if one.refused for level in one.levels]

PROTOTYPES = {
    "seed_all": ours.seed_all,
    "PrecisionDebugger": ours.PrecisionDebugger,
    **{name: getattr(ours.PrecisionDebugger, name) for name in ("start", "stop", "step", "save", "set_init_step")},
    "debugger.register_custom_api": ours.PrecisionDebugger.register_custom_api,
    "debugger.restore_custom_api": ours.PrecisionDebugger.restore_custom_api,
    "MsprobeStep": ours.MsprobeStep,
    "MsprobeInitStep": ours.MsprobeInitStep,
}


class Network(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(3, 2)
        self.relu = nn.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        return ops.abs(self.relu(self.fc(x)))


class Loss:
    """Of a framework in front of MindSpore, whose tensors have ``backward``."""

    def __init__(self, model: nn.Cell, given: Tensor) -> None:
        self.model, self.given = model, given

    def backward(self) -> None:
        ms.grad(lambda x: self.model(x).sum())(self.given)


class Engine:
    """Of a suite that generates tokens, each by a forward of the model."""

    TOKENS = 5

    def __init__(self, model: str) -> None:
        assert model == "..."
        self.model = Network()
        runner = types.SimpleNamespace(get_model=lambda: self.model)
        worker = types.SimpleNamespace(model_runner=runner)
        executor = types.SimpleNamespace(driver_worker=types.SimpleNamespace(worker=worker))
        self.llm_engine = types.SimpleNamespace(model_executor=executor)

    def generate(self, prompts: list[str], sampling_params: Any) -> list[Tensor]:
        del prompts, sampling_params
        return [self.model(ops.ones((1, 3))) for _ in range(self.TOKENS)]


def namespace() -> dict[str, Any]:
    """What the examples leave out. Their ``Network()`` is the model that the optimizer was made for."""
    x, y = np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)
    model = Network()
    batches = ms.dataset.GeneratorDataset([(row, label) for row, label in zip(x, y, strict=True)], ["x", "y"]).batch(2)
    return {
        "Network": lambda: model,
        "model": model,
        "data_loader": [(Tensor(x), Tensor(y))] * 2,
        "loss": Loss(model, Tensor(x)),
        "loss_fn": nn.MSELoss(),
        "optimizer": nn.SGD(model.trainable_params(), 0.01),
        "train_dataset": batches,
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    vllm: Any = types.ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = Engine, types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return tmp_path


def run(code: str, here: Path, level: str) -> dict[str, Any]:
    """Run an example with a ``config.json`` of this level."""
    (here / "config.json").write_text(json.dumps({"level": level, "extra_info": True, "acc_check": {}}))
    # A device can be set once in a process, before anything runs: the CPU is set already.
    code = re.sub(r"^set_device\(.*\)$", "", moved(code), flags=re.MULTILINE)
    names = namespace()
    exec(compile(code, "example", "exec"), names)
    return names


def with_model(code: str) -> str:
    """The variant that a comment of the example shows: the model is passed."""
    return re.sub(r"^( *)debugger\.start\(\).*\n *# (debugger\.start\(model\))", r"\1\2", code, flags=re.MULTILINE)


def entries(here: Path, step: int = 0) -> dict[str, Any]:
    (path,) = here.glob(f"dump_path/step{step}/*/dump.json")
    return json.loads(path.read_text())["data"]


def test_the_table_has_every_example_of_the_page() -> None:
    """And nothing that looks like code is outside of them."""
    assert len(FOUND) == len(EXAMPLES)
    graph = ["GRAPH_MODE" in one for one in FOUND]
    assert graph == [name.startswith("static") for name in EXAMPLES]
    imports = [line for line in PAGE.splitlines() if re.match(r"^from msprobe", line)]
    assert sorted(imports) == sorted(line for one in FOUND for line in one.splitlines() if line.startswith("from msprobe"))


@pytest.mark.parametrize(("name", "level"), DUMPING)
def test_those_of_the_dynamic_graph_dump(name: str, level: str, here: Path) -> None:
    run(BY_NAME[name], here, level)["debugger"].close()
    kinds = {entry.partition(".")[0] for entry in entries(here)}
    assert ("Cell" in kinds) is (level in ("L0", "mix"))
    assert bool(kinds - {"Cell"}) is (level in ("L1", "mix"))


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_loop_may_pass_the_model_as_its_comment_says(level: str, here: Path) -> None:
    code = BY_NAME["dynamic graph, a loop"]
    assert with_model(code) != code
    run(with_model(code), here, level)["debugger"].close()
    kinds = {entry.partition(".")[0] for entry in entries(here, step=1)}
    assert ("Cell" in kinds) is (level != "L1")
    assert ("Primitive" in kinds) is (level != "L0")


def test_a_range_of_tokens_has_the_forwards_of_the_range(here: Path) -> None:
    run(BY_NAME["inference, a range of tokens"], here, "L0")["debugger"].close()
    calls = [name for name in entries(here) if name.startswith("Cell.fc.Dense.forward.")]
    assert calls == [f"Cell.fc.Dense.forward.{call}" for call in range(3)]


@pytest.mark.parametrize(("name", "level"), REFUSED)
def test_those_that_need_ascend_are_configured_and_refused_with_the_reason(name: str, level: str, here: Path) -> None:
    try:
        with pytest.raises(ValueError, match=EXAMPLES[name].refused) as refusal:
            run(BY_NAME[name], here, level)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert "\n" not in str(refusal.value)
    assert not (here / "dump_path").exists()


def test_a_rank_that_the_program_knows_names_the_directory(here: Path) -> None:
    (call,) = {line.strip() for line in PAGE.splitlines() if re.match(r"^debugger\.start\(rank_id=", line.strip())}
    debugger = ours.PrecisionDebugger(dump_path=here / "dump_path")
    exec(call, {"debugger": debugger, "self": types.SimpleNamespace(gpu_id=5)})
    ops.relu(ops.ones((2,)))
    debugger.close()
    assert [path.name for path in (here / "dump_path" / "step0").iterdir()] == ["rank5"]


def test_every_prototype_is_ours() -> None:
    found = list(prototypes_in(PAGE))
    assert [one.partition("(")[0] for one in found] == list(PROTOTYPES)
    assert [one for one in found if not accepts(PROTOTYPES[one.partition("(")[0]], one)] == []


def test_the_list_of_functions_is_read_as_the_page_edits_it(here: Path) -> None:
    (block,) = re.findall(r"^ops:\n(?:- \w+\n?)+", PAGE, flags=re.MULTILINE)
    listed = re.findall(r"- (\w+)", block)
    (here / "support_wrap_ops.yaml").write_text(f"{block.rstrip()}\n- relu\n")
    (here / "config.json").write_text(json.dumps({"api_list": "support_wrap_ops.yaml"}))
    debugger = ours.PrecisionDebugger("config.json")
    debugger.start()
    ops.adaptive_avg_pool2d(ops.relu(ops.ones((1, 1, 4, 4))), 2)
    ops.sin(ops.ones((1,)))
    debugger.close()
    assert list(entries(here)) == ["Functional.relu.0.forward", "Functional.adaptive_avg_pool2d.0.forward"]
    assert all(callable(getattr(PLACES[SECTIONS["ops"]], name)) for name in listed)


def test_the_files_that_the_page_shows_are_the_examples_that_dumps_are_compared_with() -> None:
    """Their names, keys and shapes; ``test_mindspore_dump_cells.py`` and ``..._apis.py`` compare dumps with them."""
    shown = [one for one in objects_in(PAGE) if '"data"' in one]
    example = Example("mindspore", "Cell", "mindspore.Tensor", "Float32")
    for text, expected in zip(shown, [example.convolution("/dump/path"), example.relu("/dump/path")], strict=True):
        assert same_to_the_letter(_without_numbers(json.loads(text)), expected)


def test_the_trees_of_files_are_three() -> None:
    """Of kernels, which need Ascend; of the dynamic graph; of a cell with a compiled ``construct``."""
    assert PAGE.count("├── dump_path") == 3


class AlexNet(nn.Cell):
    """As the page's example of a compiled cell is called."""

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return ops.relu(x) * 2


@pytest.mark.parametrize("level", ["L0", "mix", "L1"])
def test_a_compiled_cell_has_the_files_that_the_page_shows(level: str, here: Path) -> None:
    """At L0 and mix two directories with the same files, at L1 an entry among the functions."""
    model = nn.SequentialCell(AlexNet(), nn.ReLU())
    debugger = ours.PrecisionDebugger(task="tensor", level=level, dump_path="dump_path")
    debugger.start(model, rank_id=0)
    model(ops.ones((2, 3)))
    debugger.close()
    parts = [""] if level == "L1" else ["graph", "pynative"]
    assert sorted(path.name for path in (here / "dump_path").iterdir()) == (parts if all(parts) else ["step0"])
    files = {"dump_tensor_data", "dump.json", "stack.json", "construct.json"}
    for part in parts:
        rank = here / "dump_path" / part / "step0" / "rank0"
        assert {path.name for path in rank.iterdir()} == files
        assert all(name in PAGE for name in (part, *files))
    name = "Jit.AlexNet.0.forward.input.0.npy"
    assert name in PAGE
    assert (rank / "dump_tensor_data" / name).exists() is (level != "L0")


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "a number" if key in NUMBERS else _without_numbers(one) for key, one in value.items()}
    return [_without_numbers(one) for one in value] if isinstance(value, list) else value
