"""The demo with a fault, run as its reader runs it, and ``docs/finding-the-first-fault.md``, which shows what it prints."""

from __future__ import annotations

import importlib
import json
import math
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from demo_runs import DEMO, ROOT, run_python
from torch import Tensor, nn
from two_ranks import TORCHRUN
from typer.testing import CliRunner

from monitor.anomalies.callbacks import AlertEvent
from monitor.anomalies.ranking import ranking
from monitor.anomalies.ranking.ranking import Cause
from monitor.cli import app
from monitor.config import load_config

DOCUMENT = (ROOT / "docs" / "finding-the-first-fault.md").read_text(encoding="utf-8")
COMMAND = "$ trainermon rank-anomalies"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, flags=re.DOTALL)


def told_anywhere(text: str, base: Path) -> list[str]:
    """Its lines without what another machine, another moment, or the text of another Python makes different."""
    for pattern, instead in (
        (re.escape(str(base)), "monitor_output"),
        (rf"\b{re.escape(socket.gethostname())}\b", "node7"),
        (r"loss \d.*", "loss"),
        (r"(tokens.weight/.*) Value \d+", r"\1 Value"),
        (r"  +", "  "),
    ):
        text = re.sub(pattern, instead, text)
    return [line.rstrip() for line in text.splitlines()]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the demo printed, and where it recorded."""
    base = tmp_path_factory.mktemp("fault")
    run = run_python(base, *TORCHRUN, str(DEMO / "find_fault.py"), together=True)
    assert run.returncode == 0, run.stdout
    return run.stdout, base


@pytest.fixture
def here(demo: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which the demo has recorded to ``monitor_output``."""
    shutil.copytree(demo[1], tmp_path / "monitor_output")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def find_fault(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module("find_fault")


def test_what_was_found_is_what_was_planted(demo: tuple[str, Path]) -> None:
    planted, found = demo[0].splitlines()[-2:]
    place = "rank 1, step 14, micro-step 1, actv module.h.2.mlp.1.output"
    assert (planted, found) == (f"Planted: {place}", f"Found:   {place}")


def test_no_rule_fires_while_training_is_healthy(demo: tuple[str, Path]) -> None:
    events = [json.loads(path.read_text()) for path in demo[1].glob("anomaly_detected/rank?/anomaly.json")]
    assert {event["step"] for rank in events for event in rank.values()} == {*range(14, 20)}
    assert {event["message"].split()[1] for rank in events for event in rank.values()} == {"AnomalyNan"}


def test_the_ranking_that_the_document_shows_is_what_the_demo_prints(demo: tuple[str, Path]) -> None:
    shown, printed = (text[text.index(COMMAND) :] for text in (blocks("text")[2], demo[0]))
    assert told_anywhere(shown, Path("nowhere")) == told_anywhere(printed, demo[1])


def test_the_report_has_the_sentence_of_the_ranking_and_begins_with_the_place(demo: tuple[str, Path]) -> None:
    page = (demo[1] / "report.html").read_text(encoding="utf-8")
    data = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])
    assert f"{data['verdict']['says']} {data['verdict']['then']}" in demo[0]
    assert (data["start"], data["atStep"]) == ({"kind": "actv", "tensor": "module.h.2.mlp.1.output", "rank": 1}, 14)
    assert data["events"][0]["origin"]


def test_the_alerts_that_the_document_shows_are_in_the_log_in_this_order_on_each_rank(demo: tuple[str, Path]) -> None:
    shown = [line for line in told_anywhere(blocks("text")[1], Path("nowhere")) if line != "..."]
    printed = told_anywhere(demo[0], demo[1])
    assert [line for line in shown if line not in printed] == []
    for writer in ("[rank 0]", "[rank 1]", "step "):
        places = [printed.index(line) for line in shown if writer in line[:30]]
        assert places == sorted(places)


def test_the_loss_turns_into_nan_after_the_step_in_which_it_began(demo: tuple[str, Path]) -> None:
    logged = dict(re.findall(r"^step +(\d+)  loss (\S+)$", demo[0], flags=re.MULTILINE))
    assert [step for step, loss in logged.items() if loss == "nan"] == ["16"]


def test_what_is_shown_of_the_files_is_there(here: Path) -> None:
    for path in re.findall(r"[─ ](\w+/\w+\.json|\w+\.json) ", blocks("text")[3]):
        assert list(here.glob(f"monitor_output/**/{path}"))


@pytest.mark.parametrize("line", "".join(blocks("sh")).splitlines())
def test_a_command_ranks(line: str, here: Path) -> None:
    command, *arguments = shlex.split(line, comments=True)
    assert command == "trainermon"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output  # a rule has fired
    output = next((here / name for name in arguments if name.endswith(".json")), None)
    assert output is None or len(json.loads(output.read_text())) == 300


def test_the_configuration_is_one(tmp_path: Path) -> None:
    (shown,) = blocks("json")
    (tmp_path / "config.json").write_text(shown)
    alert = load_config(tmp_path / "config.json").alert
    assert ([rule.rule_name for rule in alert.rules], alert.dump) == (["AnomalyNan", "AnomalyTurbulence"], True)


@pytest.mark.usefixtures("here")
def test_the_history_of_what_went_in_is_that_of_both_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    _, history, _ = blocks("python")
    exec(history, {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1:3] for line in printed] == [[str(step), str(micro)] for step in (12, 13, 14) for micro in (0, 1)] * 2
    assert {line[-1] for line in printed} == {"0"}


def test_code_that_acts_on_alerts_is_called_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    acting, _, _ = blocks("python")
    given: list[Callable[[Sequence[AlertEvent]], object]] = []
    exec(acting, {"monitor": SimpleNamespace(add_alert_callback=given.append)})
    event = AlertEvent(0, 14, "actv", "h.2.mlp", 1, "AnomalyNan", "nans", 1.0, "Rule AnomalyNan reports")
    with pytest.raises(SystemExit):
        given[0]([event])
    assert capsys.readouterr().out == "14 actv h.2.mlp Rule AnomalyNan reports\n"


def test_what_goes_into_a_module_is_kept_when_it_goes_wrong(
    find_fault: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = find_fault.GPT(find_fault.GPTConfig(vocabulary=4, context=2, layers=3, heads=1, width=2))
    _, _, keeping = blocks("python")
    exec(keeping, {"model": model})
    module = model.get_submodule("h.2.mlp.1")
    healthy, bad = torch.ones(2), torch.tensor([1.0, math.inf])
    module(healthy)
    assert not Path("first_fault.pt").exists()
    with pytest.raises(SystemExit, match=r"first_fault\.pt"):
        module(-bad)
    kept = torch.load("first_fault.pt", weights_only=True)
    assert torch.equal(kept["inputs"][0], -bad)
    assert kept["output"].isnan().tolist() == [False, True]


SAID = {
    Cause.INSIDE: "its ",
    Cause.BETWEEN: "between ",
    Cause.DATA: "in what the model was given: the batch",
    Cause.BEFORE: "between the batch and ",
    Cause.STAGES: ": the communication between the stages",
    Cause.SENT: ", to which this rank gave bad numbers",
    Cause.LOSS: "between the loss and the gradient of ",
    Cause.BEHIND: "after the watched part of the forward, in the loss, or before ",
    Cause.PASSES: "backward of the model. Gradients of activations around it were not recorded",
    Cause.PARAMETER: ", between the gradient of its output and that of its parameter",
    Cause.AGGREGATION: "in the aggregation of gradients over ",
    Cause.UNSEEN_RANKS: ", whose own gradient is not known, or ",
    Cause.GIVEN: ", to which no other rank gave bad numbers",
    Cause.CHANGED_GRADIENTS: ", where all were changed together, as by clipping: any of them may be the cause",
    Cause.MOMENTS: "in the optimizer's state, before step ",
    Cause.UPDATE: "in the optimizer's step ",
    Cause.UNSEEN_GRADIENTS: "not recorded: ",
    Cause.UNSEEN_UPDATES: "in gradients of earlier steps, which were not recorded, or ",
    Cause.WEIGHTS: "in the weights before step ",
    Cause.UNREAD_GRADIENTS: "Gradients before that were not recorded,",
    Cause.UNKNOWN: "the first event; its inputs are not known",
}
"""A part of each remark, which no name is in."""


@pytest.mark.parametrize("where", Cause)
def test_what_to_look_at_next_is_said_for_every_remark_that_there_is(where: Cause) -> None:
    assert SAID[where] in Path(ranking.__file__).read_text()
    remarks = re.findall(r"^\| (`.*?) \|", DOCUMENT, flags=re.MULTILINE)
    assert any(SAID[where].strip() in remark for remark in remarks)


def test_the_demo_is_a_target_that_help_names() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo-fault: environment\n\t.*tools/demo/find_fault\.py \$\(ARGS\)$", makefile, flags=re.MULTILINE)
    if shutil.which("make"):
        told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert "make demo-fault " in told


def test_it_fails_if_something_else_was_planted(here: Path, find_fault: ModuleType) -> None:
    elsewhere = find_fault.Place(rank=0, step=14, micro_step=1, kind="actv", tensor="module.h.2.mlp.1.output")
    with pytest.raises(SystemExit, match="has not found what was planted"):
        find_fault.conclude(elsewhere, here / "monitor_output" / "anomaly_detected")


def test_it_fails_if_there_is_nothing_to_rank(tmp_path: Path, find_fault: ModuleType) -> None:
    with pytest.raises(SystemExit, match="ended with status 2"):
        find_fault.conclude(find_fault.FAULT, tmp_path)


def test_a_seed_puts_the_fault_somewhere_else_and_always_there(find_fault: ModuleType) -> None:
    model = find_fault.GPT(find_fault.GPTConfig(width=8, context=4, heads=2, layers=1))
    drawn = [find_fault.drawn(seed, model, 2, find_fault.LATE, 2) for seed in range(50)]
    assert drawn == [find_fault.drawn(seed, model, 2, find_fault.LATE, 2) for seed in range(50)]
    assert {place.rank for place in drawn} == {0, 1}
    assert {place.step for place in drawn} == {13, 14, 15}
    assert {place.kind for place in drawn} == {"actv", "actv_grad"}
    assert len({place.tensor for place in drawn}) > 5


def outputs_and_gradients(find_fault: ModuleType, kind: str | None) -> list[tuple[Tensor, Tensor]]:
    """Of three calls of a linear layer; the second is to go wrong unless ``kind`` is ``None``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    if kind is not None:
        find_fault.plant(find_fault.Place(0, 0, 1, kind, "0.output"), model, micro_steps=3)
    found = []
    for _ in range(3):
        x = torch.randn(4, 3, requires_grad=True)
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        found.append((y.detach(), gradient))
    return found


@pytest.mark.parametrize(("kind", "output_nans", "gradient_nans"), [("actv", 1, 0), ("actv_grad", 0, 3)])
def test_one_element_of_one_call_goes_wrong_and_nothing_else(
    kind: str, output_nans: int, gradient_nans: int, find_fault: ModuleType
) -> None:
    healthy, broken = (outputs_and_gradients(find_fault, one) for one in (None, kind))
    for call in (0, 2):
        assert all(torch.equal(one, other) for one, other in zip(healthy[call], broken[call], strict=True))
    assert [int(one.isnan().sum()) for one in broken[1]] == [output_nans, gradient_nans]
