"""Start, stop, step: what is recorded when, and where it goes."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dumping import Convolutional, Dump, Transformer, loss_of, seeded, tokens
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from monitor.dump.cli import recover
from monitor.dump.files import FILE, Records
from monitor.pytorch import PrecisionDebugger


def steps_in(base: Path) -> list[str]:
    return sorted(path.name for path in base.iterdir())


def configured(tmp_path: Path, **fields: Any) -> PrecisionDebugger:
    (tmp_path / "config.json").write_text(json.dumps({"dump_path": str(tmp_path / "out"), **fields}))
    return PrecisionDebugger(tmp_path / "config.json")


def test_segments_of_a_step_are_in_one_file_and_what_lies_between_is_not(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    for _ in range(2):
        debugger.start()
        F.relu(torch.ones(1))
        debugger.stop()
        F.silu(torch.ones(1))
    debugger.step()
    assert list(Dump(tmp_path).data) == ["Functional.relu.0.forward", "Functional.relu.1.forward"]


@pytest.mark.parametrize(("level", "said"), [("L0", 1), ("L1", 0), ("mix", 1)])
def test_steps_without_a_call_of_the_model_are_said_once(
    level: str, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = seeded(Convolutional)
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    for called in (True, False, False):
        for _ in range(2):
            debugger.start(network)
            debugger.stop()
        debugger.start(network)
        if called:
            loss_of(network)
        debugger.stop()
        debugger.step()
    assert caplog.text.count("no module of the model was called in step 1, so none is dumped") == said
    assert caplog.text.count("so none is dumped") == said


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_gradients_come_in_after_stop_until_the_step_is_over(tmp_path: Path, level: str) -> None:
    network = seeded(Convolutional)
    debugger = PrecisionDebugger(dump_path=tmp_path, level=level)
    debugger.start(network)
    loss = loss_of(network)
    debugger.stop()
    before = set(Dump(tmp_path).data)
    loss.backward()
    debugger.step()
    late = set(Dump(tmp_path).data) - before
    expected = {
        "L0": "Module.fc.Linear.parameters_grad.0",
        "L1": "Functional.linear.0.backward",
        "mix": "Module.conv1.Conv2d.backward.0",
    }
    assert not [name for name in before if "backward" in name]
    assert expected[level] in late


def test_a_backward_after_its_step_is_not_recorded(tmp_path: Path) -> None:
    network = seeded(Convolutional)
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    debugger.start(network)
    loss = loss_of(network)
    debugger.stop()
    debugger.step()
    loss.backward()
    assert not [name for name in Dump(tmp_path).data if "backward" in name or "grad" in name]


def test_each_step_has_a_directory_and_counts_anew(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    for _ in range(2):
        debugger.start()
        F.relu(torch.ones(1))
        debugger.stop()
        debugger.step()
    assert [list(Dump(tmp_path, step).data) for step in (0, 1)] == [["Functional.relu.0.forward"]] * 2


def test_only_the_steps_that_are_chosen_are_recorded(tmp_path: Path) -> None:
    debugger = configured(tmp_path, step=[1, "3-4"])
    for _ in range(6):
        debugger.start()
        debugger.stop()
        debugger.step()
    assert steps_in(tmp_path / "out") == ["step1", "step3", "step4"]


@pytest.mark.parametrize(("last", "said"), [(2, 1), (4, 0)])
def test_steps_that_never_come_are_said_once(last: int, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    debugger = configured(tmp_path, step=[3])
    for _ in range(last):
        debugger.start()
        debugger.step()
    for _ in range(2):
        debugger.close()
    told = "the configuration chooses step 3, which did not come, so nothing was dumped. Steps count from 0 or "
    assert caplog.text.count(told) == said
    assert caplog.text.count("and the next would be 2") == said


def test_steps_are_counted_from_where_a_run_continues(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path, step=[7])
    debugger.set_init_step(7)
    debugger.start()
    debugger.step()
    assert steps_in(tmp_path) == ["step7"]


def test_a_rank_that_is_not_chosen_writes_nothing(tmp_path: Path) -> None:
    debugger = configured(tmp_path, rank=[1])
    debugger.start(rank_id=0)
    debugger.step()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("ranks", "chosen"), [([3], "3"), (["1-20"], "1, 2, 3, 4, 5, 6, 7, 8, …")])
def test_a_process_without_a_rank_that_is_not_chosen_is_said_once(
    ranks: list[Any], chosen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    debugger = configured(tmp_path, rank=ranks)
    for _ in range(2):
        debugger.start()
        F.relu(torch.ones(1))
        debugger.stop()
        debugger.step()
    assert not (tmp_path / "out").exists()
    assert caplog.text.count(f"chooses rank {chosen}. This process has no rank") == 1


def test_a_process_without_a_rank_counts_as_rank_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    debugger = configured(tmp_path, rank=["0-1"])
    debugger.start()
    F.relu(torch.ones(1))
    debugger.stop()
    assert Dump(tmp_path / "out").data
    assert "has no rank" not in caplog.text


def test_a_process_without_a_rank_is_named_by_its_number(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start()
    debugger.step()
    assert Dump(tmp_path).directory.name == f"proc{os.getpid()}"


def test_a_rank_id_names_the_directory(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start(rank_id=3)
    debugger.step()
    assert Dump(tmp_path).directory.name == "rank3"


def test_nothing_but_the_files_is_left_when_a_step_is_over(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start()
    debugger.stop()
    assert (Dump(tmp_path).directory / FILE).exists()
    debugger.step()
    assert steps_in(Dump(tmp_path).directory) == ["construct.json", "dump.json", "stack.json"]


def test_a_step_without_stop_is_complete(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start()
    F.relu(torch.ones(1))
    debugger.step()
    assert list(Dump(tmp_path).data) == ["Functional.relu.0.forward"]


def test_a_second_start_changes_nothing(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start()
    debugger.start()
    F.relu(torch.ones(1))
    debugger.step()
    assert list(Dump(tmp_path).data) == ["Functional.relu.0.forward"]


def test_a_range_of_tokens_is_a_range_of_forwards_of_the_model(tmp_path: Path) -> None:
    network = seeded(Transformer).eval()
    debugger = PrecisionDebugger(dump_path=tmp_path, level="mix")
    debugger.start(network, token_range=[2, 3])
    text = tokens()[:1, :1]
    with torch.no_grad():
        for _ in range(5):
            text = torch.cat([text, network(text)[:, -1:].argmax(-1)], dim=1)
    debugger.stop()
    debugger.step()
    data = Dump(tmp_path).data
    lengths = [entry["input_args"][0]["shape"][1] for name, entry in data.items() if name.startswith("Module.embedding")]
    assert lengths == [2, 3]
    assert not [name for name in data if name.startswith("Torch.cat")]


@pytest.mark.parametrize(
    ("level", "arguments", "said"),
    [
        ("L0", {}, r"level L0 needs the model: call start\(model\)"),
        ("mix", {}, "level mix needs the model"),
        ("L1", {"token_range": [1, 2]}, "token_range needs the model"),
        ("L1", {"rank_id": -1}, "rank_id is -1: expected a whole number from 0 on"),
        ("L1", {"model": nn.Identity(), "token_range": [3, 2]}, r"token_range is \[3, 2\]: expected two whole numbers"),
    ],
)
def test_what_cannot_be_started_is_refused(tmp_path: Path, level: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PrecisionDebugger(dump_path=tmp_path, level=level).start(**arguments)


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model is a int: expected a torch\.nn\.Module"):
        PrecisionDebugger(dump_path=tmp_path, level="L0").start(3)


def test_a_scope_leaves_out_what_lies_before_and_behind_it(tmp_path: Path) -> None:
    chosen = {"scope": ["Module.relu.ReLU.forward.0", "Module.conv2.Conv2d.forward.0"]}
    debugger = configured(tmp_path, level="L0", statistics=chosen)
    network = seeded(Convolutional)
    debugger.start(network)
    loss_of(network).backward()
    debugger.step()
    modules = {name.split(".")[1] for name in Dump(tmp_path / "out").data if "parameters_grad" not in name}
    assert modules == {"relu", "conv2"}


def test_a_list_leaves_out_what_is_not_in_it(tmp_path: Path) -> None:
    debugger = configured(tmp_path, level="mix", statistics={"list": ["blocks.1"]})
    network = seeded(Transformer)
    debugger.start(network)
    loss_of(network).backward()
    debugger.step()
    names = list(Dump(tmp_path / "out").data)
    assert not [name for name in names if name.startswith(("Module.embedding", "Module.blocks.0", "Module.head"))]
    assert "Functional.linear.2.forward" in names
    assert "Functional.linear.0.forward" not in names


@pytest.mark.parametrize(
    ("modes", "kept"),
    [
        (["forward"], {"forward": {"input_args", "input_kwargs", "output", "parameters"}}),
        (["backward"], {"backward": {"input", "output"}, "parameters_grad": {"weight", "bias"}}),
        (["forward", "output"], {"forward": {"output"}}),
        (["backward", "input"], {"backward": {"input"}}),
    ],
)
def test_a_data_mode_leaves_out_the_rest(tmp_path: Path, modes: list[str], kept: dict[str, set[str]]) -> None:
    debugger = configured(tmp_path, level="L0", statistics={"data_mode": modes})
    network = seeded(Convolutional)
    debugger.start(network)
    loss_of(network).backward()
    debugger.step()
    found = {name.split(".")[3]: set(entry) for name, entry in Dump(tmp_path / "out").data.items() if ".fc." in name}
    assert found == kept


def test_single_values_and_their_gradients_are_saved_by_name(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path, level="debug", task="tensor")
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    debugger.save({"x": [x, 3]}, "point")
    y = x * 2
    debugger.save(y, "point")
    debugger.save(y, "alone", save_backward=False)
    (y * y).sum().backward()
    debugger.step()
    dump = Dump(tmp_path, name="debug.json")
    assert list(dump.data) == ["point.0.debug", "point.1.debug", "alone.0.debug", "point_grad.1.debug", "point_grad.0.debug"]
    assert dump.data["point.0.debug"]["x"][1] == {"type": "int", "value": 3}
    assert dump.data["point.0.debug"]["x"][0]["data_name"] == "point.0.debug.x.0.npy"
    assert dump.tensor(dump.data["point_grad.1.debug"]).tolist() == [4.0, 8.0]
    assert dump.tensor(dump.data["point_grad.0.debug"]["x"][0]).tolist() == [8.0, 16.0]


def test_saving_at_another_level_saves_nothing(tmp_path: Path) -> None:
    PrecisionDebugger(dump_path=tmp_path, level="L1").save(torch.ones(1), "x")
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_saved_value_needs_a_name(tmp_path: Path, name: Any) -> None:
    with pytest.raises(TypeError, match=f"name is {name!r}: expected a text that names the value"):
        PrecisionDebugger(dump_path=tmp_path, level="debug").save(torch.ones(1), name)


def test_a_second_debugger_that_would_see_the_same_calls_is_refused_until_the_first_has_stopped(tmp_path: Path) -> None:
    first, second = (PrecisionDebugger(dump_path=tmp_path / name) for name in ("first", "second"))
    first.start()
    with pytest.raises(RuntimeError, match=r"another PrecisionDebugger records .*: call its stop\(\) before this start\(\)"):
        second.start()
    first.stop()
    second.start()
    F.relu(torch.ones(1))
    second.step()
    first.step()
    assert (list(Dump(tmp_path / "first").data), list(Dump(tmp_path / "second").data)) == ([], ["Functional.relu.0.forward"])


def test_tensors_whose_names_look_alike_have_a_file_each(tmp_path: Path) -> None:
    values = {
        "x/y": torch.tensor([1.0]),
        "x_y": torch.tensor([2.0]),
        "a.b": {"c": torch.tensor([3.0])},
        "a": {"b.c": torch.tensor([4.0])},
        1: torch.tensor([5.0]),
        "1": torch.tensor([6.0]),
    }
    debugger = PrecisionDebugger(dump_path=tmp_path, level="debug", task="tensor")
    debugger.save(values, "all")
    debugger.step()
    dump = Dump(tmp_path, name="debug.json")
    saved = dump.data["all.0.debug"]
    assert list(saved) == ["x/y", "x_y", "a.b", "a", "1", "'1'"]
    leaves = [saved["x/y"], saved["x_y"], saved["a.b"]["c"], saved["a"]["b.c"], saved["1"], saved["'1'"]]
    assert [dump.tensor(leaf).item() for leaf in leaves] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_what_a_killed_process_has_left_is_set_aside_and_can_be_recovered(tmp_path: Path) -> None:
    left = tmp_path / "step0" / "rank0"
    left.mkdir(parents=True)
    records = Records(left / FILE)
    records.append('{"entry": "Functional.silu.0.forward", "at": 0, "parent": null, "stack": null, "content": {}}')
    records.flush()
    records.close()
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start(rank_id=0)
    F.relu(torch.ones(1))
    debugger.step()
    assert [one.entries for one in recover(tmp_path)] == [1]
    assert list(Dump(tmp_path).data) == ["Functional.relu.0.forward"]
    assert "silu" in (tmp_path / "step0.left1" / "rank0" / "dump.json").read_text()


def test_a_directory_that_another_process_writes_to_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "step0" / "rank0"
    place.mkdir(parents=True)
    records = Records(place / FILE)
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start(rank_id=0)
    F.relu(torch.ones(1))
    debugger.step()
    records.close()
    assert (place / FILE).read_bytes() == b""
    assert "start(rank_id=...)" in (place / "dump_error_info.log").read_text()


def said_beside(base: Path) -> str:
    return (Dump(base).directory / "dump_error_info.log").read_text()


def test_a_stop_in_another_thread_records_nothing_more_and_is_reported(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)

    def begin() -> None:
        debugger.start()
        F.relu(torch.ones(1))
        started.set()
        assert stopped.wait(30)
        F.relu(torch.ones(1))

    started, stopped = threading.Event(), threading.Event()
    thread = threading.Thread(target=begin)
    thread.start()
    assert started.wait(30)
    debugger.stop()
    stopped.set()
    thread.join()
    debugger.start()
    F.silu(torch.ones(1))
    debugger.step()
    assert list(Dump(tmp_path).data) == ["Functional.relu.0.forward", "Functional.silu.0.forward"]
    assert "stop() was called in another thread than start()" in said_beside(tmp_path)


def test_what_a_stop_in_another_thread_leaves_is_taken_away_by_the_next_start(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start()
    other = threading.Thread(target=debugger.stop)
    other.start()
    other.join()
    debugger.start()
    assert len(_get_current_function_mode_stack()) == 1
    debugger.stop()
    assert _get_current_function_mode_stack() == []
    debugger.step()


def test_another_model_that_is_passed_before_stop_is_reported(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    first, second = (nn.Sequential(nn.ReLU()) for _ in range(2))
    debugger.start(first)
    debugger.start(first)
    assert not list(tmp_path.glob("step0/*/dump_error_info.log"))
    debugger.start(second)
    debugger.step()
    assert "with another model, which is not dumped" in said_beside(tmp_path)
    assert debugger.model is first


@pytest.mark.parametrize("chosen", [{"list": ["Relu"]}, {"scope": ["Functional.silu.0.forward", "Functional.silu.1.forward"]}])
def test_a_choice_that_chooses_nothing_is_reported(tmp_path: Path, chosen: dict[str, Any]) -> None:
    debugger = configured(tmp_path, statistics=chosen)
    debugger.start()
    F.relu(torch.ones(1))
    debugger.step()
    assert "select none of the calls of this step" in said_beside(tmp_path / "out")


def test_a_model_without_modules_below_it_is_reported(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path, level="L0")
    debugger.start(nn.ReLU())
    debugger.step()
    assert "no module was found below the model, and the model itself is not dumped" in said_beside(tmp_path)


def test_a_place_that_cannot_be_written_to_is_reported_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    debugger = PrecisionDebugger(dump_path=tmp_path / "file")
    debugger.start()
    debugger.step()
    assert "name a dump_path that can be written to" in caplog.text


def test_files_that_cannot_be_made_can_be_made_later(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start(rank_id=0)
    F.relu(torch.ones(1))
    place = tmp_path / "step0" / "rank0"
    (place / "dump.json").mkdir()
    debugger.step()
    assert f"run trainermon dump-recover {place}" in (place / "dump_error_info.log").read_text()
    (place / "dump.json").rmdir()
    assert [one.entries for one in recover(tmp_path)] == [1]


def test_the_class_represents_the_debugger_that_was_made_last(tmp_path: Path) -> None:
    PrecisionDebugger(dump_path=tmp_path / "first", level="L0")
    PrecisionDebugger(dump_path=tmp_path, level="mix")
    model = seeded(Convolutional)
    PrecisionDebugger.set_init_step(3)
    PrecisionDebugger.register_custom_api(torch, "matmul", api_prefix="Mine")
    PrecisionDebugger.start(model=model)
    loss_of(model).backward()
    torch.matmul(torch.ones(2, 2), torch.ones(2, 2))
    PrecisionDebugger.stop()
    PrecisionDebugger.step()
    assert steps_in(tmp_path) == ["step3"]
    assert {"Module.conv1.Conv2d.backward.0", "Mine.matmul.0.forward"} <= Dump(tmp_path, 3).data.keys()


def test_on_the_class_before_any_debugger_is_made_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrecisionDebugger, "_latest", None)
    with pytest.raises(RuntimeError, match=r"PrecisionDebugger.start\(\) needs a debugger: make one first"):
        PrecisionDebugger.start()


def test_saving_a_value_may_be_asked_of_the_class(tmp_path: Path) -> None:
    PrecisionDebugger(dump_path=tmp_path, level="debug")
    PrecisionDebugger.save(torch.ones(2), "ones")
    PrecisionDebugger.step()
    (path,) = tmp_path.glob("step0/*/debug.json")
    assert list(json.loads(path.read_text())["data"]) == ["ones.0.debug"]
