"""MindSpore, start, stop, step: what is recorded when."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import pytest
from cells_to_dump import Convolutional, Dump, Transformer, input_of, seeded
from mindspore import Tensor, nn, ops

from monitor.mindspore import PrecisionDebugger


def test_segments_of_a_step_are_in_one_file_and_what_lies_between_is_not(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    x = Tensor([-1.0, 2.0])
    for _ in range(2):
        debugger.start()
        ops.relu(x)
        debugger.stop()
        ops.square(x)
    debugger.step()
    assert list(Dump(tmp_path).data) == ["Functional.relu.0.forward", "Functional.relu.1.forward"]


def test_a_cell_is_still_counted_in_the_next_segment(tmp_path: Path) -> None:
    network = nn.SequentialCell(nn.ReLU())
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    for _ in range(2):
        debugger.start(network)
        network(Tensor([-1.0, 2.0]))
        debugger.stop()
        network(Tensor([-3.0, 2.0]))
    debugger.step()
    assert list(Dump(tmp_path).data) == ["Cell.0.ReLU.forward.0", "Cell.0.ReLU.forward.1"]


@pytest.mark.parametrize(
    ("level", "late"),
    [
        ("L0", "Cell.fc.Dense.parameters_grad.0"),
        ("L1", "Primitive.matmul.MatMul.0.backward"),
        ("mix", "Cell.conv1.Conv2d.backward.0"),
    ],
)
def test_gradients_come_in_after_stop_until_the_step_is_over(tmp_path: Path, level: str, late: str) -> None:
    network = seeded(Convolutional)
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    stopped: list[set[str]] = []

    def loss(x: Tensor) -> Tensor:
        y = network(x).sum()
        debugger.stop()
        stopped.append(set(Dump(tmp_path).data))
        return y

    debugger.start(network)
    ms.value_and_grad(loss, None, network.trainable_params())(input_of(network))
    debugger.step()
    assert not [name for name in stopped[0] if "backward" in name or "grad" in name]
    assert late in set(Dump(tmp_path).data) - stopped[0]


def test_a_range_of_tokens_is_a_range_of_forwards_of_a_loop_that_generates(tmp_path: Path) -> None:
    network = seeded(Transformer).set_train(False)
    debugger = PrecisionDebugger(dump_path=tmp_path, level="mix", task="tensor")
    debugger.start(network, token_range=[2, 3])
    text = ops.ones((1, 1), ms.int32)
    for _ in range(5):
        text = ops.concat([text, network(text)[:, -1:].argmax(-1).astype(ms.int32)], axis=1)
    debugger.stop()
    debugger.step()
    dump = Dump(tmp_path)
    given = [entry["input_args"][0] for name, entry in dump.data.items() if name.startswith("Cell.embedding.Embedding.forward")]
    assert [dump.tensor(one).tolist() for one in given] == [text[:, :length].asnumpy().tolist() for length in (2, 3)]
    assert not [name for name in dump.data if "concat" in name]


@pytest.mark.parametrize(
    ("level", "arguments", "said"),
    [
        ("L0", {}, r"level L0 needs the model: call start\(model\)"),
        ("L1", {"token_range": [1, 2]}, "token_range needs the model"),
        ("L1", {"rank_id": -1}, "rank_id is -1: expected a whole number from 0 on"),
    ],
)
def test_what_cannot_be_started_is_refused(tmp_path: Path, level: str, arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PrecisionDebugger(dump_path=tmp_path, level=level).start(**arguments)


def test_a_model_that_is_no_cell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model is a int: expected a mindspore\.nn\.Cell"):
        PrecisionDebugger(dump_path=tmp_path, level="L0").start(3)
