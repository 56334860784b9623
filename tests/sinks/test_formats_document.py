"""What ``docs/formats.md`` shows is what the sink writes, and its examples run."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sink_rows import Measured, Rank

from monitor.formats import FORMATS
from monitor.series import KINDS
from monitor.sinks.csv import CsvSink
from monitor.sinks.hdf5 import Hdf5Sink
from monitor.sinks.parquet import ParquetSink
from monitor.stats.features import FEATURES
from monitor.stats.ops import OPS

TEXT = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
DIRECTORY = Path("monitor_output/Dec03_21-34-40-rank0-1a2b3c4d")

HIDDEN_STATE = [-0.5, 2.0, 0.0, 1.25]
ACTIVATIONS = [
    Measured("embed.output", HIDDEN_STATE, 0, shape=(2, 2)),
    Measured("layers.0.mlp.input", HIDDEN_STATE, 0, shape=(2, 2)),
    Measured("layers.0.mlp.output", [3.125e-7, 1.25e-3], 0),
    Measured("head.output", [1.0, math.nan], 0),
    Measured("odd,name", [], 0, shape=(0,)),
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.fixture
def _recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's output, in the working directory."""
    monkeypatch.chdir(tmp_path)
    rank = Rank(DIRECTORY)
    sink = CsvSink(rank.context)
    for step in range(10):
        sink.write(rank.step(step, {"actv": ACTIVATIONS}, ("min", "max", "mean", "norm", "zeros", "nans", "shape")))
    sink.close()
    shards = Rank(DIRECTORY, steps_per_record=100)
    for sink in (Hdf5Sink(shards.context), ParquetSink(shards.context)):
        for step in range(10):
            gradient = Measured("w", [3.0, 4.0], histogram=[1, 2, 3, *[0] * 123, 5, 7])  # 5 of up to 2^-24
            sink.write(shards.step(step, {"actv": ACTIVATIONS, "grad_reduced": [gradient]}, ("norm",)))
        sink.close()
    gradients = Rank(DIRECTORY.with_name("Dec03_21-34-40-rank0-5e6f7a8b"))
    other = CsvSink(gradients.context)
    for step in range(10):
        rows = {"grad_reduced": [Measured("w", [float(step)]), Measured("b", [1.0])]}
        other.write(gradients.step(step, rows, ("min", "max", "mean", "norm")))
    other.close()


@pytest.mark.usefixtures("_recorded")
def test_the_file_that_is_shown_is_the_file_that_is_written() -> None:
    (shown,) = blocks("csv")
    assert (DIRECTORY / "actv_0-4.csv").read_text().startswith(shown)


@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize("example", blocks("python"))
def test_an_example_runs(example: str) -> None:
    found: dict[str, object] = {}
    exec(example, found)
    if "frame" in found:
        assert len(found["frame"]) == 20
    if "norms" in found:
        assert [name for name, _ in found["norms"]] == [one.name for one in ACTIVATIONS] * 5


@pytest.mark.usefixtures("_recorded")
def test_the_example_with_this_package_finds_the_nan(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("python")[0], {})
    assert capsys.readouterr().out == f"{[{'name': 'head.output', 'step': step, 'nans': 1} for step in range(5)]}\n"


@pytest.mark.usefixtures("_recorded")
def test_the_example_with_plain_h5py_prints_norms(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (text for text in blocks("python") if '"sumsq"' in text)
    exec(example, {})
    assert capsys.readouterr().out == "".join(f"w {step} 5.0\n" for step in range(10))


@pytest.mark.usefixtures("_recorded")
def test_the_example_with_histograms_prints_how_many_gradients_are_small(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (text for text in blocks("python") if "histogram" in text)
    exec(example, {})
    assert capsys.readouterr().out == f"[{' '.join(['10'] * 10)}]\n"


@pytest.mark.usefixtures("_recorded")
def test_the_example_with_our_reader_derives_ops_that_were_not_configured(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (text for text in blocks("python") if "read_hdf5" in text)
    exec(example, {})
    assert capsys.readouterr().out == f"{[{'name': 'head.output', 'step': step, 'nans': 1} for step in range(10)]}\n"


@pytest.mark.usefixtures("_recorded")
def test_the_example_with_polars_prints_the_norms_of_one_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (text for text in blocks("python") if "scan_parquet" in text)
    exec(example, {})
    assert capsys.readouterr().out == f"{[5.0] * 10}\n"


@pytest.mark.usefixtures("_recorded")
@pytest.mark.skipif(shutil.which("awk") is None, reason="there is no awk")
def test_the_example_for_the_shell_prints_the_large_norms() -> None:
    (example,) = blocks("sh")
    lines = subprocess.run(["sh", "-c", example], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == [f"{step} w {step}.000000" for step in range(3, 10)]


@pytest.mark.parametrize("word", [*KINDS, *OPS, *FEATURES, *FORMATS])
def test_every_kind_op_and_format_that_exists_is_explained(word: str) -> None:
    assert f"`{word}`" in TEXT
