"""What must hold with every version of PyTorch that the project supports: ``python tools/contract/with_torch.py``.

It needs the installed package and torch, nothing else. A small GPT-like model is trained without a monitor, with one, and
observed by hooks of this script. ``checks.py`` says what is printed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checks import Heard, SkippedError, run_checks
from model_of_torch import Net, observed, train
from rows import Arrays, Rows, compare, compare_everything, merge, opened, recorded, same_bits, written_config

from monitor.pytorch import TrainerMon
from monitor.pytorch.compiled.operators import NOT_OBSERVED
from monitor.pytorch.fast_path import IN_C
from monitor.pytorch.hooks import TRACEABLE

OF_PARAMETERS = {"grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq"}
RANKS = 2


def training_is_the_same_bits(directory: Path) -> None:
    """Losses, weights, moments and random state."""
    same_bits(train(), monitored(directory))


def rows_equal_float64_references(directory: Path) -> str:
    """Rows of all kinds in all formats, merged and not."""
    monitored(directory)
    compare_everything(directory / "monitor_output", observed())
    return "ordinary tensors are recorded in C" if IN_C else "tensors are recorded in Python, not in C"


def compiled_code_has_the_rows_of_eager_code(directory: Path) -> str | None:
    """For a compiler that computes the bits of eager code. Rows of parameters are there with every version of torch."""
    compile_with = compiler("aot_eager")
    same_bits(train(compile_with), monitored(directory, compile_with))
    rows, tensors = recorded(directory / "monitor_output")["csv"], observed()
    missing = {series for series in tensors if TRACEABLE or series.kind in OF_PARAMETERS} - set(rows)
    assert not missing, f"series without a row: {missing}"
    compare(rows, {series: tensors[series] for series in rows}, "csv")
    return None if TRACEABLE else "compiled code has rows of parameters only; a warning says so"


def inductor_trains_under_the_monitor(directory: Path) -> None:
    """Losses agree to rounding: what the monitor reads is not fused."""
    compile_with = compiler("inductor")
    given, expected = monitored(directory, compile_with)["losses"], train(compile_with)["losses"]
    assert np.allclose(given, expected, rtol=1e-3, atol=1e-5), f"losses {given} for {expected}"
    rows = recorded(directory / "monitor_output")["csv"]
    assert {series.kind for series in rows} >= OF_PARAMETERS


def two_ranks_of_DDP_merge_to_one_run(directory: Path) -> None:  # noqa: N802
    """With the bits of the unmonitored job; the merged gradients are those of the whole job."""
    launch(directory, "plain")
    launch(directory, "monitored")
    for rank in range(RANKS):
        plain, with_monitor = (dict(np.load(directory / f"{way}-{rank}.npz")) for way in ("plain", "monitored"))
        same_bits(plain, with_monitor)
    output = directory / "monitor_output"
    everything = [recorded(output, rank)["hdf5"] for rank in range(RANKS)]
    check_ranks(everything, opened(merge(output), {"grad_reduced", "param_updated"}, per_rank=False))


def check_ranks(ranks: list[Rows], whole: Rows) -> None:
    """Unreduced gradients differ between ranks, and one rank writes what all hold: so does the merged set."""
    reduced = [{series for series in rows if series.kind == "grad_reduced"} for rows in ranks]
    assert sum(map(len, reduced)) == len(set().union(*reduced)) > 0, "reduced gradients were written twice or not at all"
    assert {series for series in whole if series.kind == "grad_reduced"} == set().union(*reduced)
    local = [{s: row["norm"] for s, row in rows.items() if s.kind == "grad_unreduced"} for rows in ranks]
    assert local[0].keys() == local[1].keys()
    assert all(local[0][series] != local[1][series] for series in local[0])


def launch(directory: Path, way: str) -> None:
    """Train on two gloo ranks; each saves its arrays as ``WAY-RANK.npz``."""
    script = str(Path(__file__).with_name("ranks_of_torch.py"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    done = subprocess.run([*launcher, script, str(directory), way], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"the job {way} ended with status {done.returncode}: {done.stderr[-2000:]}"


def compiler(backend: str) -> Callable[[Net], Any]:
    """A function that compiles a model from scratch. Raises ``SkippedError`` if torch refuses to compile under this Python."""
    try:
        torch.compile(torch.sin, backend=backend)
    except RuntimeError as error:
        raise SkippedError(str(error)) from error

    def compile_with(net: Net) -> Any:
        torch._dynamo.reset()  # code of an unmonitored model would have no hooks
        return torch.compile(net, backend=backend)

    return compile_with


def monitored(directory: Path, compile_with: Callable[[Net], Any] | None = None) -> Arrays:
    """A run with the monitor. It warns of nothing, except of compiled code if this version of torch cannot observe that."""
    monitor = TrainerMon(written_config(directory), params_have_main_grad=False)
    with Heard() as heard, monitor:
        trained = train(compile_with, lambda net, optimizer: monitor.set_monitor(net, grad_acc_steps=1, optimizer=optimizer))
    if compile_with is None or TRACEABLE:
        assert heard.warnings == [], f"the monitor warned: {heard.warnings}"
    else:
        assert NOT_OBSERVED in "".join(heard.warnings), f"no warning says that compiled code has no rows: {heard.warnings}"
    return trained


if __name__ == "__main__":
    sys.exit(
        run_checks(
            training_is_the_same_bits,
            rows_equal_float64_references,
            compiled_code_has_the_rows_of_eager_code,
            inductor_trains_under_the_monitor,
            two_ranks_of_DDP_merge_to_one_run,
        )
    )
