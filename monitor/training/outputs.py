"""Where training metrics are shown: event files for TensorBoard, and the log."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text import metadata
from tensorboard.util.tensor_util import make_tensor_proto

from monitor.failures import LOGGER
from monitor.sinks.csv import encodable
from monitor.sinks.files import AppendFile, opened
from monitor.sinks.tensorboard import FORMAT_VERSION, new_path, record
from monitor.training.config import TrainingConfig
from monitor.training.expert_load import Counts, load
from monitor.training.step import Scalar

AGAINST_SAMPLES: Final = "-vs-samples"


class EventWriter:
    """Writes ``events.out.tfevents.…`` into a directory, which is created with the first event. Every run has its own file.

    The file is not marked as a restart: TensorBoard would apply that to steps and samples alike, and hide scalars shown against
    samples.

    Args:
        directory: The directory of the rank.
        queue_size: The number of events that are buffered before they are written.

    Raises:
        OSError: From every method, if the disk refuses an operation. Events that could not be written are lost. Events in the
        file stay intact, and later events are written.
    """

    def __init__(self, directory: Path, queue_size: int) -> None:
        self._directory = directory
        self._queue_size = queue_size
        self._held: list[bytes] = []
        self._file: AppendFile | None = None

    def scalars(self, scalars: Sequence[Scalar]) -> None:
        """Add numbers, each against its step and, if it has ``samples``, against samples too."""
        now = time.time()
        against = [(one.samples, one.tag + AGAINST_SAMPLES, one.value) for one in scalars if one.samples is not None]
        steps = [(one.x, one.tag, one.value) for one in scalars]
        for x, group in groupby(sorted(steps + against, key=_x), key=_x):
            summary = Summary()
            for _, tag, value in group:
                summary.value.add(tag=encodable(tag), simple_value=value)
            self._hold(Event(wall_time=now, step=x, summary=summary))

    def texts(self, texts: Mapping[str, str]) -> None:
        """Add texts, which belong to no step."""
        described = metadata.create_summary_metadata(display_name=None, description=None)
        for tag, text in texts.items():
            summary = Summary()
            tensor = make_tensor_proto([encodable(text)])
            summary.value.add(tag=encodable(tag), metadata=described, tensor=tensor)
            self._hold(Event(wall_time=time.time(), step=0, summary=summary))

    def flush(self) -> None:
        """Write the buffered events."""
        held, self._held = self._held, []
        if not held:
            return
        file = self._open_file()
        try:
            for event in held:
                file.write(record(event))
        except BaseException:
            file.forget()
            raise
        file.keep()

    def close(self) -> None:
        """Write the buffered events and close the file."""
        try:
            self.flush()
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.release()

    def _hold(self, event: Event) -> None:
        self._held.append(event.SerializeToString())
        if len(self._held) > self._queue_size:
            self.flush()

    def _open_file(self) -> AppendFile:
        if self._file is None or self._file.gone():
            path = new_path(self._directory)
            self._file = AppendFile(path, opened(path, os.O_CREAT | os.O_EXCL))
            self._file.write(record(Event(wall_time=time.time(), file_version=FORMAT_VERSION).SerializeToString()))
        return self._file


def _x(one: tuple[int, str, float]) -> int:
    return one[0]


# --- Training metrics in the log: one line a step for the run, and one for each metric of the training state.

UNITS: Final = {
    "iteration-time": " s",
    "throughput": " samples/s/device",
    "model-flops-throughput-per-npu": " TFLOPS",
}
JUDGED: Final = ("loss", "grad-norm", "device_local_norm", "weight_norm", "device_accum_local_loss")
"""Metrics that are reported when they are not finite."""
MOST_NAMED: Final = 3
MOST_SHARES: Final = 16
"""Up to so many experts of a router, a line lists all shares; for more, only the least and the greatest."""


class LogWriter:
    """Writes to the monitor's logger.

    Args:
        total: The planned number of steps; 0 if it is not known.
    """

    def __init__(self, rank: int, total: int = 0) -> None:
        self._rank = rank
        self._total = total
        self._since: dict[str, int] = {}

    def run(self, step: int, scalars: Sequence[Scalar], since_last: float, reasons: Iterable[str] = ()) -> None:
        """Log one line for a step.

        Args:
            since_last: Seconds since the previous step ended.
            reasons: Why numbers are not finite; the line is then a warning.
        """
        shown = ", ".join(f"{one.tag} {_shown(one.value)}{UNITS.get(one.tag, '')}" for one in scalars)
        of = f" of {self._total}" if self._total else ""
        why = "".join(f"; {reason}" for reason in reasons)
        level = logging.WARNING if why else logging.INFO
        LOGGER.log(level, "[rank %d] step %d%s: %s; %.3g s since the last step%s", self._rank, step, of, shown, since_last, why)

    def state(self, scalars: Sequence[Scalar]) -> None:
        """Log a line for each metric, with its parameters."""
        for (metric, x), group in groupby(scalars, key=lambda one: (one.metric, one.x)):
            LOGGER.info("[rank %d] step %d: %s", self._rank, x, _joined(metric, list(group)))

    def load(self, step: int, tokens: Counts) -> None:
        """Log one line with the shares of experts, by router."""
        parts = [f"{name} {_shares(load(counts))}" for name, counts in tokens.items() if sum(counts)]
        if parts:
            LOGGER.info("[rank %d] step %d: expert_load %s", self._rank, step, "; ".join(parts))

    def reasons(self, step: int, scalars: Sequence[Scalar], local: Mapping[str, float], *, skipped: bool) -> list[str]:
        """Which metrics are not finite, since which step, and which gradients are affected first.

        Args:
            local: Norms of gradients, by parameter.
        """
        wrong = {one.tag: one.value for one in scalars if one.tag in JUDGED and not math.isfinite(one.value)}
        fine = {one.tag for one in scalars if one.tag not in wrong}  # a metric that is not shown in this step keeps its state
        self._since = {tag: since for tag, since in self._since.items() if tag not in fine}
        self._since.update({tag: step for tag in wrong if tag not in self._since})
        said = [f"{tag} is {_shown(value)}, since step {self._since[tag]}" for tag, value in wrong.items()]
        if said and (poisoned := [name for name, norm in local.items() if not math.isfinite(norm)]):
            more = f" and {len(poisoned) - MOST_NAMED} more" if len(poisoned) > MOST_NAMED else ""
            said.append(f"these gradients are not finite: {', '.join(poisoned[:MOST_NAMED])}{more}")
        return [*said, "the optimizer skipped the step"] if skipped else said


def _joined(metric: str, scalars: Sequence[Scalar]) -> str:
    if len(scalars) == 1 and scalars[0].tag == metric:
        return f"{metric} {_shown(scalars[0].value)}"
    return f"{metric} " + ", ".join(f"{one.tag.partition('/')[2]} {_shown(one.value)}" for one in scalars)


def _shares(shares: Sequence[float]) -> str:
    if len(shares) <= MOST_SHARES:
        return " ".join(map(_shown, shares))
    (least, fewest), (most, greatest) = (choose(enumerate(shares), key=itemgetter(1)) for choose in (min, max))
    return f"of {len(shares)} experts from {_shown(fewest)} (expert_{least}) to {_shown(greatest)} (expert_{most})"


def _shown(value: float) -> str:
    return f"{value:.6g}"


# --- The run's configuration as TensorBoard shows it: a text for each top-level key of the training YAML.

_PROFILE: Final = (
    "profile_communication",
    "profile_level",
    "profile_memory",
    "profile_start_step",
    "profile_stop_step",
    "profile_rank_ids",
    "profile_pipeline",
    "init_start_profile",
)
_EVALUATION: Final = ("eval_callbacks", "eval_step_interval", "eval_epoch_interval", "eval_dataset", "eval_dataset_task")
_CHECKPOINT: Final = ("load_ckpt_format", "auto_trans_ckpt", "load_ckpt_async")
_TRANSFORM: Final = ("transform_process_num", "src_strategy_path_or_dir")

DEPENDS: Final[Mapping[str, str]] = {
    "ignore_data_skip": "resume_training",
    **dict.fromkeys(_CHECKPOINT, "load_checkpoint"),
    **dict.fromkeys(_TRANSFORM, "auto_trans_ckpt"),
    **dict.fromkeys(_PROFILE, "profile"),
    **dict.fromkeys(_EVALUATION, "do_eval"),
    "lr_scale_factor": "lr_scale",
}
"""Keys that matter only if another key is shown and is neither false nor empty."""

DEPENDS_ON_FALSE: Final[Mapping[str, str]] = {"data_skip_steps": "ignore_data_skip"}
"""Keys that matter only if another key is shown and is false."""


def texts(config: TrainingConfig) -> dict[str, str]:
    """The texts by tag."""
    document: dict[str, Any] = {str(key): value for key, value in config.document.items()}
    return {key: _markdown(value) for key, value in document.items() if _is_shown(key, document)}


def _is_shown(key: str, document: Mapping[str, Any]) -> bool:
    if key not in document:
        return False
    if (needed := DEPENDS.get(key)) is not None:
        return bool(document.get(needed)) and _is_shown(needed, document)
    if (refuted := DEPENDS_ON_FALSE.get(key)) is not None:
        return document.get(refuted) is False and _is_shown(refuted, document)
    return True


def _markdown(value: Any) -> str:
    """Markdown, as TensorBoard shows it: mappings and lists become a block of YAML."""
    if isinstance(value, dict | list):
        block: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        return f"```\n{block}```"
    return str(value)
