"""``monitor.watch``: one line records what the three lines record; the first step too, if it has one micro-batch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from reading_back import EVERYTHING, Output
from torch import Tensor, nn

import monitor
from monitor import ConfigError, MonitorConfig
from monitor.merge.discovery import choose, discover
from monitor.merge.execution import MergeError
from monitor.pytorch import TrainerMon

STEPS = 4
DOCUMENT = (Path(__file__).parents[2] / "docs" / "attaching.md").read_text(encoding="utf-8")

Attach = Callable[[nn.Module, Any], Any]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))


def trained(attach: Attach, micro_batches: int, called: Callable[[nn.Module], Any] = lambda model: model) -> list[Tensor]:
    """Weights at the end of a short training, in which the model is also evaluated."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    calls = called(model)
    with attach(model, optimizer):
        for step in range(STEPS):
            with torch.no_grad():
                calls(torch.ones(2, 4))
            for number in range(micro_batches):
                calls(torch.full((2, 4), 1.0 + step + number)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def three_lines(micro_batches: int) -> Attach:
    def attach(model: nn.Module, optimizer: Any) -> TrainerMon:
        made = TrainerMon({**EVERYTHING, "monitor_mbs_grad": True}, params_have_main_grad=False)
        made.set_monitor(model, micro_batches, optimizer)
        return made

    return attach


def one_line(model: nn.Module, optimizer: Any) -> Any:
    return monitor.watch(model, optimizer, None, **EVERYTHING, monitor_mbs_grad=True)


def files(directory: Path) -> dict[str, str]:
    """Of the kinds that do not hold times."""
    return {path.name: path.read_text() for path in directory.glob("*.csv") if not path.name.startswith("run_")}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_first_step_shows_how_many_micro_batches_there_are(micro_batches: int, output: Output) -> None:
    trained(three_lines(micro_batches), micro_batches)
    (first,) = output.directories()
    trained(one_line, micro_batches)
    (second,) = set(output.directories()) - {first}

    expected = {name: text for name, text in files(first).items() if micro_batches == 1 or not name.endswith("_0-0.csv")}
    assert files(second) == expected
    assert f"expects {micro_batches} in each step" in json.loads((second / "manifest.json").read_text())["notes"]["micro_steps"]


def test_two_steps_that_agree_correct_a_first_step_with_a_forward_more(output: Output) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with one_line(model, optimizer):
        model(torch.ones(2, 4))  # a warm-up
        for _ in range(STEPS + 1):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (
        "Step 2 had 1 micro-batch (training forward of the model), so the monitor expects 1 in each step."
        in output.manifest()["notes"]["micro_steps"]
    )
    assert {row.step for row in output.rows("grad_reduced")} == {1, 2, 3, 4}
    assert {(row.step, row.micro_step) for row in output.rows("actv")} == {(step, 0) for step in (1, 2, 3, 4)}


@pytest.mark.parametrize("apart", [True, False])
def test_a_gan_without_a_fault_counts_no_failure(apart: bool, output: Output) -> None:
    generator, critic = net(), nn.Sequential(nn.Linear(1, 1))
    generators, critics = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (generator, critic))
    if apart:
        pairs: list[tuple[nn.Module, Any]] = [(generator, generators), (critic, critics)]
    else:
        pairs = [(nn.ModuleList([generator, critic]), [critics, generators])]
    watching = [monitor.watch(model, optimizer, "weight-gradients") for model, optimizer in pairs]
    for _ in range(STEPS):
        made = generator(torch.ones(2, 4))
        (critic(torch.ones(2, 1)) - critic(made.detach())).sum().backward()
        critics.step()
        generators.zero_grad()
        critic(made).sum().backward()
        generators.step()
        critics.zero_grad()
    for one in watching:
        one.close()
    manifests = [json.loads((directory / "manifest.json").read_text()) for directory in output.directories()]
    assert [one["failures"] for one in manifests] == [{}] * len(watching)


def test_the_jobs_of_two_models_of_a_process_are_told_apart_where_one_has_to_be_chosen(output: Output) -> None:
    models = [net(), net()]
    for one in [one_line(model, torch.optim.AdamW(model.parameters())) for model in models]:
        one.close()
    with pytest.raises(MergeError) as refused:
        choose(discover(output.base), None)
    pattern = r"torch Sequential AdamW trained \(number (\d+) in its process\)$"  # of all that the tests before had, too
    first, second = sorted(int(number) for number in re.findall(pattern, str(refused.value), re.MULTILINE))
    assert second == first + 1


def test_a_number_given_during_the_first_step_is_used(output: Output) -> None:
    def attach(model: nn.Module, optimizer: Any) -> Any:
        watching = monitor.watch(model, optimizer, "weight-gradients")
        watching.set_monitor(model, 2, optimizer)
        return watching

    trained(attach, 2)
    assert {row.step for row in output.rows("grad_reduced")} == set(range(STEPS))


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [({"collect_times": 2}, {11, 12}), ({"collect_times": 1, "step_interval": 2, "start_step": 11}, {11}), ({}, {11, 12, 13})],
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_first_step_without_rows_does_not_count_as_collected(
    micro_batches: int, schedule: dict[str, int], steps: set[int], output: Output
) -> None:
    def attach(model: nn.Module, optimizer: Any) -> Any:
        return monitor.watch(model, optimizer, None, start_iteration=10, wg_distribution=True, format="csv", **schedule)

    trained(attach, micro_batches)
    first = {10} if micro_batches == 1 and "start_step" not in schedule else set()
    kept = sorted(first | steps)[: schedule.get("collect_times", STEPS)]
    assert {row.step for row in output.rows("grad_reduced")} == set(kept)


@pytest.mark.parametrize("forwards", [1, 2])
def test_a_first_step_that_is_cut_off_has_rows_as_long_as_it_may_have_one_micro_batch(forwards: int, output: Output) -> None:
    model = net()
    with one_line(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        for _ in range(forwards):
            model(torch.ones(2, 4)).sum().backward()
    manifest = output.manifest()
    assert manifest["steps"]["written"]["count"] == (1 if forwards == 1 else 0)
    assert ("incomplete" in str(manifest["steps"])) or forwards == 2


def test_ops_changed_in_the_first_step_stay(output: Output) -> None:
    def attach(model: nn.Module, optimizer: Any) -> Any:
        watching = monitor.watch(model, optimizer, "weight-gradients")
        watching.ops = ["max"]
        return watching

    trained(attach, 1)
    assert {op for row in output.rows("grad_reduced") for op in row.values} == {"max"}


def test_a_model_compiled_before_has_the_rows_of_eager_code(output: Output) -> None:
    trained(one_line, 2)
    (first,) = output.directories()
    trained(one_line, 2, lambda model: torch.compile(model, backend="eager"))
    (second,) = set(output.directories()) - {first}

    assert files(second) == files(first)


def test_a_number_that_is_given_records_the_first_step(output: Output) -> None:
    trained(lambda model, optimizer: monitor.watch(model, optimizer, "weight-gradients", micro_batches=2), 2)
    assert {row.step for row in output.rows("grad_reduced")} == set(range(STEPS))


def test_what_the_first_step_shows_is_written(output: Output) -> None:
    with pytest.raises(SystemExit):
        trained(lambda model, optimizer: monitor.watch(model, optimizer, "print-structure"), 2)
    (path,) = output.base.rglob("module_struct.json")
    assert "0:0" in json.loads(path.read_text())


def test_training_is_the_same(output: Output) -> None:
    watched = trained(monitor.watch, 2)
    assert all(map(torch.equal, trained(lambda *_: nullcontext(), 2), watched))
    assert output.manifest()["config"]["replica_check"]


def test_fields_replace_those_of_the_preset_and_health_is_the_default(output: Output) -> None:
    trained(lambda model, optimizer: monitor.watch(model, optimizer, format="csv", param_distribution=False), 1)
    kinds = {path.name.rsplit("_", 1)[0] for path in output.directory().glob("*.csv")}
    assert kinds == {"actv", "grad_reduced", "run"}


@pytest.mark.parametrize(
    ("attach", "error", "said"),
    [
        (lambda m, o: monitor.watch(m, o, "helth"), ConfigError, "preset: 'helth' is not one of .*health"),
        (lambda m, o: monitor.watch(m, o, 3), TypeError, "preset: expected a name or None, got int"),
        (lambda m, o: monitor.watch(m, o, wg_distributin=True), ConfigError, "wg_distributin: unknown field"),
        (lambda m, o: monitor.watch(m, o, ops=3), ConfigError, "^configuration: ops: 3 is not allowed: expected a list"),
        (lambda _, o: monitor.watch(3, o), TypeError, r"model: expected torch\.nn\.Module or mindspore\.nn\.Cell"),
        (lambda m, _: monitor.watch(m, 3), TypeError, "optimizer is a int"),
        (lambda m, o: monitor.watch(m, o, micro_batches=0), ValueError, "micro_batches is 0"),
    ],
)
@pytest.mark.usefixtures("output")
def test_what_cannot_be_used_is_refused_in_one_sentence(attach: Attach, error: type[Exception], said: str) -> None:
    model = net()
    with pytest.raises(error, match=said) as refused:
        attach(model, torch.optim.AdamW(model.parameters()))
    assert "\n" not in str(refused.value)


def test_a_monitor_takes_a_file_a_dictionary_or_a_configuration(output: Output, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"wg_distribution": true}')
    configurations = [TrainerMon(one).config for one in (path, {"wg_distribution": True}, MonitorConfig(wg_distribution=True))]
    assert configurations[0] == configurations[1] == configurations[2]
    assert output.directories() == []


@pytest.mark.usefixtures("output")
def test_a_configuration_without_a_file_cannot_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    with pytest.raises(ConfigError, match="configuration: DYNAMIC_MONITOR follows the changes of a file: pass the path of one"):
        TrainerMon({"wg_distribution": True})


def test_the_examples_of_the_document_record(output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for example in re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL):
        before = len(output.directories())
        exec(compile(example, "attaching.md", "exec"), names)
        assert len(output.directories()) > before, example
    assert {path.suffix for path in output.base.rglob("*_[0-9]*.*")} == {".parquet"}


def test_nothing_is_said_of_a_compiled_model_when_the_first_step_shows_several(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    trained(one_line, 2, lambda model: torch.compile(model, backend="eager"))
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == []
    assert {row.step for row in output.rows("actv")} == {1, 2, 3}
