"""How the examples of the reference's pages are found. The pages are not in the repository: without them tests are skipped.

Some pages have lost their indentation and the fences around code. So an example is found by how its lines begin.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from test_migration_document import MOVED

from monitor.config.jsonc import JsonError, parse

REFERENCE = Path(os.environ.get("MONITOR_REFERENCE", Path(__file__).resolve().parents[3] / "shared" / "reference"))
WITHOUT = f"the documents are not in {REFERENCE}: set MONITOR_REFERENCE"

DUMP, METRICS = "precision-dump-mindspore.en", "training-metrics-mindspore-transformers.zh"
MONITOR = ("training-monitor.en", "training-monitor.zh")

MOST_LINES = 400
"""Of one object."""
FIELD = re.compile(r'^"[\w:./]+": \{')
"""A field without the braces around it."""


def text_of(page: str) -> str:
    path = REFERENCE / f"{page}.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def moved(code: str) -> str:
    """With our import paths, and the device of this machine."""
    for theirs, ours in sorted(MOVED.items(), key=lambda pair: -len(pair[0])):
        (their_module, _, name), (our_module, _, _) = theirs.rpartition("."), ours.rpartition(".")
        code = re.sub(rf"from {re.escape(their_module)} import ((?:\w+, *)*{name}\b)", rf"from {our_module} import \1", code)
    return code.replace('"Ascend"', '"CPU"')


# --- Objects of JSON, each once: an object inside another one is a part of it.


def objects_in(text: str) -> list[str]:
    """Each object that begins a line. Fields without braces around them get theirs."""
    lines, found, number = text.splitlines(), [], 0
    while number < len(lines):
        line = lines[number].strip()
        whole = _whole(lines[number : number + MOST_LINES], line) if line == "{" or FIELD.match(line) else None
        if whole is not None:
            found.append(whole[0])
        number += 1 if whole is None else whole[1]
    return found


def _whole(lines: Sequence[str], first: str) -> tuple[str, int] | None:
    """The shortest beginning of these lines that is an object, and how many lines it has."""
    depth = 0
    for end, line in enumerate(lines, 1):
        depth += line.count("{") + line.count("[") - line.count("}") - line.count("]")
        if depth > 0:
            continue
        body = "\n".join(lines[:end]).strip().removesuffix(",")
        whole = body if first == "{" else f"{{{body}}}"
        try:
            parse(whole)
        except JsonError:
            return None
        return whole, end
    return None


# --- Code.


def code_in(text: str, begins: re.Pattern[str], continues: re.Pattern[str]) -> list[str]:
    """From each line that begins an example to the next line that is no code. What follows a ``for`` is in it."""
    lines, found = text.splitlines(), []
    for start in (number for number, line in enumerate(lines) if begins.match(line)):
        code: list[str] = []
        for line in lines[start:]:
            if not continues.match(line):
                break
            inside = any(one.startswith("for ") for one in code)
            code.append(f"    {line}" if inside else line)
        found.append("\n".join(code))
    return found


def fenced(text: str, language: str) -> list[str]:
    """The blocks of a language, without their common indentation."""
    return [textwrap.dedent(one) for one in re.findall(rf"^ *```{language} *\n(.*?)^ *```", text, re.M | re.S | re.I)]


# --- Prototypes.


def prototypes_in(text: str) -> Iterator[str]:
    """``start(model=None)`` under a heading, ``TrainerMon.set_monitor(model) -> None`` in a line of its own."""
    lines = text.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if before.strip() == "Prototype" or re.match(r"^(?:TrainerMon\.\w+|csv2\w+)\(.*\) -> ", line.strip()):
            yield line.strip().partition(" -> ")[0]


def accepts(function: Callable[..., Any], prototype: str) -> bool:
    """Whether a function has these parameters in this order, with these defaults. It may have more, with defaults."""
    (call,) = ast.parse(f"def {prototype.rpartition('.')[2].replace('__init__', 'f')}: ...").body
    assert isinstance(call, ast.FunctionDef)
    names = [one.arg for one in call.args.args]
    defaults = dict(zip(names[::-1], [ast.literal_eval(one) for one in call.args.defaults][::-1], strict=False))
    ours = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    same = [one.name for one in ours[: len(names)]] == names
    wanted = all(one.default == defaults[one.name] for one in ours if one.name in defaults)
    return same and wanted and all(one.default is not one.empty for one in ours[len(names) :])
