from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sink_rows import Rank

import monitor.sinks
from monitor.formats import FORMATS
from monitor.sinks import make_sink
from monitor.sinks.csv import CsvSink
from monitor.sinks.hdf5 import Hdf5Sink
from monitor.sinks.memory import MemorySink
from monitor.sinks.parquet import ParquetSink
from monitor.sinks.tensorboard import TensorBoardSink


def test_each_format_has_its_sink(tmp_path: Path) -> None:
    context = Rank(tmp_path).context
    sinks = {
        "csv": CsvSink,
        "hdf5": Hdf5Sink,
        "parquet": ParquetSink,
        "tensorboard": TensorBoardSink,
        "api": MemorySink,
    }
    assert sinks == {name: type(make_sink(name, context)) for name in FORMATS}


def test_a_format_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format 'xml' does not exist; the formats are csv, hdf5, parquet, tensorboard, api"):
        make_sink("xml", Rank(tmp_path).context)


@pytest.mark.parametrize(
    ("imported", "loaded"),
    [
        ("monitor.sinks, monitor.sinks.memory", []),
        ("monitor.sinks.csv", ["pyarrow"]),
        ("monitor.sinks.hdf5", ["h5py", "pyarrow"]),
        ("monitor.sinks.parquet", ["pyarrow"]),
        ("monitor.sinks.tensorboard", ["google.protobuf", "pyarrow", "tensorboard"]),
    ],
)
def test_a_library_is_loaded_only_by_a_sink_that_uses_it(imported: str, loaded: list[str]) -> None:
    libraries = ["google.protobuf", "h5py", "pyarrow", "tensorboard", "tensorflow", "torch"]
    program = f"import sys, {imported}; print([name for name in {libraries} if name in sys.modules])"
    root = Path(monitor.sinks.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True)
    assert f"{loaded}\n" == done.stdout
