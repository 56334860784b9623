"""The documents of the tool this one replaces, taken literally: what they show is read from them and run.

They lie in a directory beside the project's where it is developed (``MONITOR_REFERENCE`` names another one), and nowhere else.
Only import paths are changed, by the table of ``docs/migrating-from-msprobe.md``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_migration_document import MOVED
from torch import nn

from monitor.config import ConfigError, MonitorConfig, load_config
from monitor.config.jsonc import JsonError, parse
from monitor.dump.config import load as load_dump_config
from monitor.pytorch import RunEnded, TrainerMon
from monitor.training.config import training_config_in

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = Path(os.environ.get("MONITOR_REFERENCE", ROOT.parent / "shared" / "reference"))

pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason=f"the documents are not in {REFERENCE}: set MONITOR_REFERENCE")

FRAGMENT = re.compile(r'^"[a-z_0-9]+": \{')
"""A field without the braces around it."""


def text_of(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text(encoding="utf-8") if REFERENCE.is_dir() else ""


def objects_in(text: str) -> Iterator[str]:
    """Each JSON object that begins a line, and each field that stands without braces around it."""
    lines = text.splitlines()
    for start, line in enumerate(map(str.strip, lines)):
        if line == "{" or FRAGMENT.match(line):
            found = _whole(lines[start:], braces=line == "{")
            if found is not None:
                yield found


def _whole(lines: list[str], *, braces: bool) -> str | None:
    """The shortest beginning of these lines that is an object."""
    for end in range(1, min(len(lines), 60) + 1):
        body = "\n".join(lines[:end]).strip().removesuffix(",")
        try:
            parse(body if braces else f"{{{body}}}")
        except JsonError:
            continue
        return body if braces else f"{{{body}}}"
    return None


def configurations(name: str) -> list[str]:
    """Of all objects those that have nothing but fields of a configuration."""
    found = [one for one in objects_in(text_of(name)) if parse(one).value.keys() <= MonitorConfig.model_fields.keys()]
    return list(dict.fromkeys(one for one in found if parse(one).value))


def snippets(name: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [textwrap.dedent(one) for one in re.findall(rf"^ *```{language} *\n(.*?)^ *```", text_of(name), re.M | re.S)]


def moved(code: str) -> str:
    """With our import paths."""
    for theirs, ours in sorted(MOVED.items(), key=lambda pair: -len(pair[0])):
        (their_module, _, name), (our_module, _, _) = theirs.rpartition("."), ours.rpartition(".")
        code = re.sub(rf"from {re.escape(their_module)} import ((?:\w+, *)*{name}\b)", rf"from {our_module} import \1", code)
    return code


class Attention(nn.Module):
    """As Megatron names its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_qkv(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention = Attention()
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.mlp(self.self_attention(x))
        return x, x.detach()


class Model(nn.Module):
    """With the layer that the documents name, ``language_model.encoder.layers.0``."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})
        self.language_model = nn.ModuleDict({"encoder": encoder})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.language_model["encoder"]["layers"]:
            x, _ = layer(x)
        return x


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "monitor_output"))
    monkeypatch.delenv("DYNAMIC_MONITOR", raising=False)


def trained(config: str, steps: int = 2) -> TrainerMon:
    """A monitor that has watched a model train with a configuration."""
    Path("monitor_config.json").write_text(config)
    monitor = TrainerMon(config_file_path="./monitor_config.json", params_have_main_grad=False)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return monitor


ALL = [(name, one) for name in ("training-monitor.en", "training-monitor.zh") for one in configurations(name)]


def test_the_configurations_were_found() -> None:
    for name in ("training-monitor.en", "training-monitor.zh"):
        found = [parse(one).value for one in configurations(name)]
        assert len(found) >= 13
        assert sum(len(one) > 20 for one in found) == 1
        assert {field for one in found for field in one} >= {
            "l2_targets",
            "alert",
            "monitor_mbs_grad",
            "print_struct",
            "ndigits",
        }


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("config", [one for _, one in ALL], ids=[f"{name[17:19]}-{i}" for i, (name, _) in enumerate(ALL)])
def test_every_configuration_trains(config: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    if parse(config).value.get("print_struct"):
        with pytest.raises(RunEnded):
            trained(config)
        return
    trained(config).close()
    assert not [one for one in caplog.messages if "failed" in one]


@pytest.mark.usefixtures("_here")
def test_the_l2_targets_find_their_modules() -> None:
    config = next(one for _, one in ALL if "l2_targets" in parse(one).value)
    trained(config).close()
    (path,) = Path("monitor_output").glob("*-rank0-*/linear_hook_0-0.csv")
    names = [f"language_model.encoder.layers.{i}.self_attention.linear_qkv.linear" for i in (0, 1)]
    assert all(name in path.read_text() for name in names)


@pytest.mark.usefixtures("_here")
def test_the_detailed_configuration_records_all_but_what_csv_cannot_hold() -> None:
    config = next(one for _, one in ALL if len(parse(one).value) > 20)
    Path("config.json").write_text(config)
    loaded, asked = load_config("config.json"), parse(config).value
    assert not loaded.ur_distribution
    kept = {name: value for name, value in asked.items() if isinstance(value, bool) and name != "ur_distribution"}
    assert {name: getattr(loaded, name) for name in kept} == kept


def test_a_field_that_no_one_knows_stays_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"wg_distribtion": true}')
    with pytest.raises(ConfigError, match="did you mean `wg_distribution`"):
        load_config(tmp_path / "config.json")


def test_every_import_of_the_documents_has_a_place_here() -> None:
    for name in (path.stem for path in REFERENCE.glob("*.*")):
        for module, names in re.findall(r"^\s*\+?\s*from (msprobe[\w.]*) import ([\w, ]+)", text_of(name), re.M):
            for one in names.split(","):
                assert f"{module}.{one.strip()}" in MOVED


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a recording whose timestamp is the one of the documents."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "monitor_output"))
    monkeypatch.chdir(tmp_path)
    trained(json.dumps({"param_distribution": True, "wg_distribution": True})).close()
    (rank,) = (tmp_path / "monitor_output").glob("*-rank0-*")
    rank.rename(rank.with_name("Dec03_21-34-41" + rank.name[14:]))
    return tmp_path / "monitor_output"


@pytest.mark.parametrize("call", ["csv2tensorboard_by_step", "csv2db"])
def test_the_conversions_run_as_they_stand(recorded: Path, call: str) -> None:
    (code,) = [one for one in snippets("training-monitor.zh", "python") if f"{call}(" in one and "import" in one]
    in_one_process = moved(code).replace("process_num=8", "process_num=1")
    exec(compile(in_one_process, call, "exec"), {"__name__": "script"})
    made = recorded.glob("*_csv2tensorboard_by_step") if call.startswith("csv2t") else recorded.glob("monitor_metrics.db")
    assert len(list(made)) == 1


@pytest.mark.usefixtures("_here")
def test_metrics_are_handed_over_as_the_documents_ask_for_them() -> None:
    monitor = trained(json.dumps({"wg_distribution": True, "xy_distribution": True, "format": "api"}))
    asked = [one for one in snippets("training-monitor.zh", "python") if re.search(r"= *monitor\.generate_\w+\(\)", one)]
    assert len(asked) == 2
    for code in asked:
        found: dict[str, Any] = {"monitor": monitor}
        exec(code, found)
        assert {"reduced", "unreduced"} <= found.keys() or {"actv", "actv_grad"} <= found.keys()
    monitor.close()


def test_the_yaml_of_the_training_metrics_is_read() -> None:
    whole, experts = snippets("training-metrics-mindspore-transformers.zh", "yaml")
    config = training_config_in("train.yaml", whole)
    assert config.monitor_config.monitor_on
    added = experts.replace("tensorboard:\n", "tensorboard:\n    tensorboard_dir: 'worker/tensorboard'\n")
    assert training_config_in("train.yaml", added).shows_expert_load


def test_the_examples_of_a_dump_are_no_configurations_and_its_configuration_is_the_default(tmp_path: Path) -> None:
    """The page shows no ``config.json``: the fields that it names are those of the default file."""
    named = set(re.findall(r"\b(task|level|dump_path|step|rank|summary_mode)\b", text_of("precision-dump-mindspore.en")))
    assert named == {"task", "level", "dump_path", "step", "rank", "summary_mode"}
    fields = {"task": "tensor", "level": "mix", "dump_path": "./dump_path", "step": [], "rank": []}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "statistics": {"summary_mode": "md5"}}))
    assert load_dump_config(tmp_path / "config.json", {}).level == "mix"
