"""The configuration of training metrics: the sections of a training YAML, their fields and how the file is read."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from monitor.config.jsonc import MAX_DEPTH, Path, explain, nearest, shown
from monitor.config.loading import content_of, decoded, unusable, unused_warning, without
from monitor.config.model import Patterns, Positive
from monitor.failures import LOGGER

TENSORBOARD: Final = "tensorboard"
LOG: Final = "log"
DESTINATIONS: Final = (LOG, TENSORBOARD)

_ALLOWED: Final = '"log", "tensorboard", a list of these, or null'


def _destinations(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or any(name not in DESTINATIONS for name in names):
        raise ValueError(f"expected {_ALLOWED}")
    return tuple(dict.fromkeys(names))


def _text(path: str) -> str:
    if not path.strip():
        raise ValueError("expected a path")
    return path


Destinations = Annotated[
    tuple[str, ...],
    BeforeValidator(_destinations),
    WithJsonSchema({"type": "string or list", "allowed": _ALLOWED}),
]
"""The destinations of a metric. Empty: the metric is not shown."""

Directory = Annotated[str, AfterValidator(_text), Field(json_schema_extra={"allowed": "a path"})]


def _or_default(default: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value)


class _MetricsSection(BaseModel):
    """Types are checked strictly, except that an integer is accepted as a float."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra={"documented": "docs/training-metrics.md"},
    )


class MonitorSection(_MetricsSection):
    """``monitor_config``: what ``TrainingStateMonitor`` shows."""

    monitor_on: bool = False
    """Whether anything in this section has an effect."""
    dump_path: Annotated[Directory, _or_default("./dump")] = "./dump"
    """Where numbers are kept as files. Nothing that was not written by the monitor is ever deleted there."""
    target: Annotated[Patterns, _or_default((".*",))] = (".*",)
    """Regular expressions: parameters whose name has a match somewhere are shown in `local_norm`, `adam_m_norm` and
    `adam_v_norm`."""
    invert: bool = False
    """Show the parameters that `target` does not match instead."""
    step_interval: Positive = 1
    """Show the metrics of this section every so many steps."""
    local_loss_format: Destinations = ()
    """Where `local_loss` is shown."""
    device_local_loss_format: Destinations = ()
    """Where `device_accum_local_loss` is shown."""
    local_norm_format: Destinations = ()
    """Where `local_norm` is shown."""
    device_local_norm_format: Destinations = ()
    """Where `device_local_norm` is shown."""
    optimizer_state_format: Destinations = ()
    """Where `adam_m_norm` and `adam_v_norm` are shown."""
    weight_state_format: Destinations = ()
    """Where `weight_norm` is shown."""
    throughput_baseline: Annotated[float, Field(gt=0)] | None = None
    """Samples per second and device that `throughput_linearity` is the ratio to. Null: it is not shown. It is shown in
    TensorBoard and in the log."""
    print_struct: bool = False
    """Print the names of all trainable parameters when the first step begins, and end the run when it ends."""


class TensorBoardSection(_MetricsSection):
    """``tensorboard``: the files of events."""

    tensorboard_dir: Directory
    """Where the directories `rank_{id}` are made."""
    tensorboard_queue_size: Positive = 10
    """How many events are held before they are written."""
    log_loss_scale_to_tensorboard: bool = False
    """Whether `loss-scale` is shown."""
    log_timers_to_tensorboard: bool = False
    """Whether `iteration-time`, `throughput` and `B-samples-per-day` are shown."""
    log_expert_load_to_tensorboard: bool = False
    """Whether `expert_load` is caught, and shown there and in the log."""


class LossMonitor(_MetricsSection):
    """``MFLossMonitor``: what is shown of the run as a whole."""

    per_print_times: Positive = 1
    """Every so many steps."""


class StateMonitor(_MetricsSection):
    """``TrainingStateMonitor``: implied by ``monitor_on: true``."""


class BiasBalance(_MetricsSection):
    """``TopkBiasBalanceCallback``: shows the load of experts. It does not balance them: a monitor changes nothing."""


class Callbacks(_MetricsSection):
    """The entries of ``callbacks`` that are about metrics."""

    MFLossMonitor: LossMonitor | None = None
    """The run as a whole."""
    TrainingStateMonitor: StateMonitor | None = None
    """The norms and losses of `monitor_config`."""
    TopkBiasBalanceCallback: BiasBalance | None = None
    """The load of experts."""


class TrainingConfig(_MetricsSection):
    """The metrics configuration of a training YAML.

    Attributes:
        document: The YAML file as it was read, with the defaults of these sections, for TensorBoard's page of texts.
    """

    monitor_config: Annotated[MonitorSection, _or_default(MonitorSection())] = MonitorSection()
    """What is shown of the state of training."""
    tensorboard: TensorBoardSection | None = None
    """The files of events. Null: what would go there goes to the log."""
    callbacks: Callbacks = Callbacks(MFLossMonitor=LossMonitor())
    """What is shown of the run as a whole."""
    document: Annotated[Mapping[str, Any], Field(exclude=True, repr=False)] = {}
    """The whole file."""

    def shown(self, wanted: Collection[str]) -> frozenset[str]:
        """The destinations of a metric. Without a ``tensorboard`` section, the log replaces TensorBoard."""
        if self.tensorboard is None and TENSORBOARD in wanted:
            wanted = {*wanted, LOG} - {TENSORBOARD}
        return frozenset(wanted)

    def wants(self, field: str) -> frozenset[str]:
        """The destinations of a field ``*_format``; none if ``monitor_on`` is false."""
        section = self.monitor_config
        return self.shown(getattr(section, field)) if section.monitor_on else frozenset()

    @property
    def baseline(self) -> float:
        """``throughput_baseline``; NaN if it is not set or ``monitor_on`` is false."""
        section = self.monitor_config
        wanted = section.throughput_baseline if section.monitor_on else None
        return math.nan if wanted is None else wanted

    @property
    def shows_expert_load(self) -> bool:
        """Whether the load of experts is recorded."""
        return self.tensorboard is not None and self.tensorboard.log_expert_load_to_tensorboard


# --- Parse a YAML file into plain values, with the line of each value.


class YamlError(ValueError):
    """The text is not valid YAML, or not valid as a configuration. The message names the line where it is known."""


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A parsed file.

    Attributes:
        value: The parsed values, as PyYAML's safe loader returns them.
        lines: The line of every name and list element, by its path.
    """

    value: Any
    lines: dict[Path, int]


def parse(text: str) -> YamlDocument:
    """Parse a file that holds one document.

    Raises:
        YamlError: The text does not hold one document, a tag is unknown, or a mapping has a key twice.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        lines = {} if node is None else dict(_lines(node, (), frozenset()))
        return YamlDocument(None if node is None else loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        raise YamlError(_message(error)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlError(str(error) or "nested too deeply") from None
    finally:
        loader.dispose()


def _lines(node: yaml.Node, path: Path, around: frozenset[int]) -> Iterator[tuple[Path, int]]:
    if len(path) > MAX_DEPTH or id(node) in around:
        raise YamlError(f"line {_line(node)}: nested more than {MAX_DEPTH} levels deep, or within itself")
    for name, anchor, value in _members(node):
        yield (*path, name), _line(anchor)
        yield from _lines(value, (*path, name), around | {id(node)})


def _members(node: yaml.Node) -> Iterator[tuple[str | int, yaml.Node, yaml.Node]]:
    if isinstance(node, yaml.SequenceNode):
        for index, one in enumerate(node.value):
            yield index, one, one
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise YamlError(f'line {_line(key)}: "{name}" appears twice in the same mapping')
            seen.add(name)
            yield name, key, value


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _message(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{error.problem or error.context}"


# --- Fields of MindSpore Transformers in these sections that have no effect on training metrics.
#
# Source: its page about monitoring (1.6 to 1.9) and the arguments of its callbacks, which a training YAML may set.
# A name that is in neither is a typo, and an error.

_OF_RUNS: Final = (
    *("origin_epochs", "dataset_size", "initial_epoch", "initial_step", "global_batch_size"),
    *("micro_batch_num", "check_for_nan_in_loss_and_grad"),
)
"""Arguments that its trainer passes to both of its monitors."""

OF_SECTIONS: Final[dict[Path, tuple[str, ...]]] = {
    ("monitor_config",): (
        *("check_for_global_norm", "global_norm_spike_threshold", "global_norm_spike_count_threshold"),
        *("stable_rank_config", "use_skip_data_by_global_norm"),
    ),
    ("callbacks", "MFLossMonitor"): (
        *_OF_RUNS,
        *("learning_rate", "micro_batch_interleave_num", "gradient_accumulation_steps"),
        *("calculate_per_token_loss", "print_separate_loss", "enable_tensorboard", "tensorboard_path"),
    ),
    ("callbacks", "TrainingStateMonitor"): (
        *_OF_RUNS,
        *("config", "step_interval", "tensor_model_parallel_size", "use_skip_data_by_global_norm", "embedding_size"),
        "use_local_norm",
    ),
    ("callbacks", "TopkBiasBalanceCallback"): (
        *("balance_via_topk_bias", "topk_bias_update_rate", "num_layers", "mtp_depth", "expert_num"),
        *("micro_batch_num", "gradient_accumulation_steps"),
    ),
}

UNUSED: Final[frozenset[Path]] = frozenset((*section, name) for section, names in OF_SECTIONS.items() for name in names)

# --- Read a training YAML into a ``TrainingConfig``, or raise one error that lists every problem.

SECTIONS: Final = ("monitor_config", "tensorboard", "callbacks")
CALLBACKS: Final = tuple(Callbacks.model_fields)


def load_training_config(path: str | os.PathLike[str]) -> TrainingConfig:
    """Read a training YAML. Sections that are not about metrics are ignored.

    Fields of MindSpore Transformers that have no effect here are ignored, with a warning.

    Args:
        path: A leading ``~`` is the home directory.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or has a value that is not allowed.
    """
    name = os.path.expanduser(os.fsdecode(path))
    return training_config_in(name, decoded(name, content_of(name, "a YAML file")))


def training_config_in(name: str, text: str) -> TrainingConfig:
    """Parse and validate the text of a training YAML.

    Args:
        name: The name of the file that the text was read from, for the messages.

    Raises:
        ConfigError: The text is not YAML, or has a value that is not allowed.
    """
    try:
        document = parse(text)
    except YamlError as error:
        raise unusable(name, str(error)) from None
    if document.value is None:
        document = YamlDocument({}, {})
    if not isinstance(document.value, dict):
        raise unusable(name, f"expected a mapping of sections, found {shown(document.value)}")
    return _validated(name, document)


def _validated(name: str, document: YamlDocument) -> TrainingConfig:
    sections, lines, problems = _sections(document)
    sections, unused = without(sections, UNUSED)
    try:
        config = TrainingConfig.model_validate(sections)
    except ValidationError as error:
        raise unusable(name, *problems, *explain(TrainingConfig, error, lines)) from None
    if problems:
        raise unusable(name, *problems)
    if unused:
        LOGGER.warning("%s: %s", name, unused_warning(unused))
    return config.model_copy(update={"document": {**document.value, **_with_defaults(config)}})


def _with_defaults(config: TrainingConfig) -> dict[str, Any]:
    """The sections of training metrics, with their defaults filled in."""
    sections = {"monitor_config": config.monitor_config, "tensorboard": config.tensorboard}
    return {name: section.model_dump(mode="json") for name, section in sections.items() if section is not None}


def _sections(document: YamlDocument) -> tuple[dict[str, Any], dict[Path, int], list[str]]:
    """The metrics sections of a file (callbacks by their type), the line of each field, and problems found on the way."""
    value, lines = document.value, dict(document.lines)
    problems = [problem for key in value if (problem := _misspelled(key, value, lines)) is not None]
    sections = {key: value[key] for key in SECTIONS if key in value}
    if sections.get("callbacks", ()) is None:
        del sections["callbacks"]
    if isinstance(sections.get("callbacks"), list):
        sections["callbacks"], more = _by_type(sections["callbacks"], lines)
        problems += more
    elif "callbacks" in sections:
        problems.append(
            f"callbacks: {shown(sections.pop('callbacks'))} is not allowed: expected a list, each item with a `type`"
        )
    return sections, lines, problems


def _misspelled(key: Any, value: Mapping[Any, Any], lines: Mapping[Path, int]) -> str | None:
    """A message if a key looks like a misspelled section that is missing. Other unknown keys belong to other programs."""
    near = None if key in SECTIONS else nearest(str(key), [one for one in SECTIONS if one not in value])
    return None if near is None or near[0] != str(key)[:1] else f"{_at(lines.get((str(key),)))}{key}: did you mean `{near}`?"


def _by_type(callbacks: list[Any], lines: dict[Path, int]) -> tuple[dict[str, Any], list[str]]:
    """The callbacks that are about metrics, by type, and the problems found. Adds the lines of their fields to ``lines``."""
    found: dict[str, Any] = {}
    problems = []
    for index, one in enumerate(callbacks):
        kind = one.get("type") if isinstance(one, dict) else None
        if kind not in CALLBACKS:
            problems += _unknown_type(kind, lines.get(("callbacks", index)))
        elif kind in found:
            problems.append(f"{_at(lines.get(('callbacks', index)))}callbacks: {kind} appears twice")
        else:
            found[kind] = {key: value for key, value in one.items() if key != "type"}
            at = ("callbacks", index)
            lines.update({("callbacks", kind, *path[2:]): line for path, line in list(lines.items()) if path[:2] == at})
    return found, problems


def _at(line: int | None) -> str:
    """The prefix that names a line; empty for a key that a merge key (``<<``) has brought in."""
    return "" if line is None else f"line {line}: "


def _unknown_type(kind: object, line: int | None) -> list[str]:
    """Ignore a callback of another program; report one that is nearly a known name."""
    if not isinstance(kind, str):
        return [f"{_at(line)}callbacks: each item needs a `type`, such as `MFLossMonitor`"]
    by_lower = {one.lower(): one for one in CALLBACKS}
    near = nearest(kind, by_lower)
    return [] if near is None else [f"{_at(line)}callbacks: {kind}: did you mean `{by_lower[near]}`?"]
