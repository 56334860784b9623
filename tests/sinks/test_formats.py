from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sink_rows import Rank

import monitor.sinks
from monitor.sinks import FORMATS, make_sink
from monitor.sinks.csv import CsvSink
from monitor.sinks.memory import MemorySink


def test_each_format_has_its_sink(tmp_path: Path) -> None:
    context = Rank(tmp_path).context
    assert {"csv": CsvSink, "api": MemorySink} == {name: type(make_sink(name, context)) for name in FORMATS}


def test_a_format_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format 'xml' does not exist; there are csv, api"):
        make_sink("xml", Rank(tmp_path).context)


def test_arrow_is_loaded_only_by_a_sink_that_uses_it() -> None:
    program = "import sys, monitor.sinks, monitor.sinks.memory; sys.exit('pyarrow' in sys.modules)"
    root = Path(monitor.sinks.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
