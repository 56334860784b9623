"""Every field of the configuration: its type, default, bounds, meaning and the capability it belongs to.

The docstring below a field is its entry in ``docs/configuration.md``. A capability in the annotation covers the field and all
below it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from monitor.formats import FORMATS

# --- The types of field values: their bounds, and how they are parsed from JSON.
#
# A target names a module's tensors as ``tensor``, ``tuple[2]``, ``tuple[2]:0`` or ``all``.

_NUMBER: Final = r"(0|[1-9][0-9]{0,5})"
_TUPLE: Final = re.compile(rf"tuple\[{_NUMBER}\](?::{_NUMBER})?")

SPELLINGS: Final = '"tensor", "tuple[N]", "tuple[N]:i" with i below N, or "all"'


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The expected structure of one side of a module, and the element to record.

    Attributes:
        length: Number of tensors in the tuple; None for a single tensor.
        index: The element to record; None if the text names none: then the first element of a tuple is recorded.
        every: Whether all tensors are recorded, however many there are. Then the others are None.
    """

    length: int | None = None
    index: int | None = None
    every: bool = False

    @classmethod
    def parse(cls, text: object) -> TensorSpec:
        """Parse the text of a specification. A ``TensorSpec`` is returned as it is.

        Raises:
            ValueError: The text has none of the allowed forms, or the index is out of range.
        """
        if isinstance(text, TensorSpec):
            return text
        if text == "tensor":
            return cls()
        if text == "all":
            return cls(every=True)
        match = _TUPLE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"expected {SPELLINGS}")
        length, index = int(match[1]), None if match[2] is None else int(match[2])
        if index is not None and index >= length:
            raise ValueError(f"a tuple of {length} has no element {index}, elements are counted from 0")
        return cls(length, index)

    def __str__(self) -> str:
        if self.length is None:
            return "all" if self.every else "tensor"
        return f"tuple[{self.length}]" + ("" if self.index is None else f":{self.index}")


INT64_MAX: Final = 2**63 - 1
DAY_SECONDS: Final = 86_400

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TIMESTAMP: Final = re.compile(r"([A-Z][a-z]{2})([0-9]{2})_([0-9]{2})-([0-9]{2})-([0-9]{2})")


def _timestamp(text: str) -> str:
    if not _is_timestamp(text):
        raise ValueError("expected a timestamp like Dec03_21-34-40, with an English month")
    return text


def _is_timestamp(text: str) -> bool:
    """Whether ``text`` is a timestamp. Not by ``strptime``, which reads month names in the language of the locale."""
    match = _TIMESTAMP.fullmatch(text)
    if match is None or match[1] not in _MONTHS:
        return False
    day, hour, minute, second = (int(part) for part in match.groups()[1:])
    try:
        # A timestamp has no year; a leap year has every day that a timestamp can name.
        datetime(2000, _MONTHS.index(match[1]) + 1, day, hour, minute, second)
    except ValueError:
        return False
    return True


def _none_or_two(range_: tuple[str, ...]) -> tuple[str, ...]:
    if len(range_) not in (0, 2):
        raise ValueError('expected "auto", [] or two timestamps, the first and the last to continue')
    return range_


AUTO: Final = ("auto",)
"""``append_output`` as ``"auto"``, in the form of the field's other values."""

_APPENDED: Final = '"auto", [] or two timestamps like Dec03_21-34-40'


def _auto_or_range(value: object, check: ValidatorFunctionWrapHandler) -> tuple[str, ...]:
    range_: tuple[str, ...] = AUTO if value in (AUTO[0], AUTO) else check(value)
    return range_


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not a regular expression: {error}") from None
    return text


_FORMATS_ALLOWED: Final = ", ".join([*(f'"{name}"' for name in FORMATS), "or a list of some of them"])


def _formats(value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or any(name not in tuple(FORMATS) for name in names):
        raise ValueError(f"expected {_FORMATS_ALLOWED}")
    if len(set(names)) < len(names):
        raise ValueError("a format occurs twice")
    return tuple(names)


_CHECKED_ALLOWED: Final = 'true, false, "all" or null'


def _replica_check(value: object) -> object:
    if value is not None and value != "all" and not isinstance(value, bool):
        raise ValueError(f"expected {_CHECKED_ALLOWED}")
    return value


Step = Annotated[int, Field(ge=0, le=INT64_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT64_MAX)]
Rank = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Field(ge=0, le=DAY_SECONDS)]

# JSON has lists where the model has tuples. `strict=False` accepts lists, and does not apply to the elements.
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Ranks = Annotated[
    tuple[Rank, ...],
    Field(strict=False, json_schema_extra={"or": "null"}),
    BeforeValidator(lambda value: () if value is None else value),
]
Patterns = Annotated[tuple[Annotated[str, AfterValidator(_regular_expression)], ...], Field(strict=False)]
Appended = Annotated[
    tuple[Annotated[str, AfterValidator(_timestamp)], ...],
    Field(strict=False),
    AfterValidator(_none_or_two),
    WrapValidator(_auto_or_range),
    WithJsonSchema({"type": "string or list", "allowed": _APPENDED, "items": {"type": "string"}}),
]
ReplicaCheck = Annotated[
    bool | Literal["all"] | None,
    BeforeValidator(_replica_check),
    WithJsonSchema({"type": "boolean or string", "allowed": _CHECKED_ALLOWED}),
]
Formats = Annotated[
    tuple[str, ...],
    BeforeValidator(_formats),
    WithJsonSchema({"type": "string or list", "allowed": _FORMATS_ALLOWED}),
]
Side = Annotated[
    TensorSpec | None,
    PlainValidator(TensorSpec.parse),
    WithJsonSchema({"type": "string", "allowed": SPELLINGS}),
]

MIB: Final = 1 << 20
GIB: Final = 1 << 30

_LOW_PRECISION: Final = ("fp16", "bf16", "e4m3", "e5m2")
_PERCENTILES: Final = ("01", "05", "25", "50", "75", "95", "99", "999")
HISTOGRAM_OPS: Final = frozenset(
    {
        "magnitude_histogram",
        *(f"{lost}_{name}" for lost in ("underflow", "overflow") for name in _LOW_PRECISION),
        *(f"abs_p{digits}" for digits in _PERCENTILES),
    }
)
"""Ops that need a histogram of every tensor."""

HIGHER_OPS: Final = frozenset({"kurtosis", "skewness", "absmean", "smallest_nonzero"})
"""Ops that need the higher moments of every tensor, or what is measured with them, and so a second read."""

CHECKSUM: Final = "checksum"
"""The op that needs the check sums of every tensor."""

HISTOGRAM_FORMATS: Final = frozenset(name for name, one in FORMATS.items() if "signed" in one.bytes_per_histogram)


class Capability(str):
    """The capability that a field belongs to, for the documentation. It is part of the annotation and has no other effect."""

    __slots__ = ()


SELECTION = Capability("selection")
SCHEDULE = Capability("schedule")
ACTIVATIONS = Capability("activations")
GRADIENTS = Capability("weight gradients")
WEIGHTS = Capability("weights")
MOMENTS = Capability("optimizer moments")
UPDATES = Capability("updates")
COMMUNICATION = Capability("communication")
ALERTS = Capability("alerts")
FEATURES = Capability("features")
RUN = Capability("the run's own numbers")
STRUCTURE = Capability("structure")
STATISTICS = Capability("statistics")
OUTPUT = Capability("output")
DYNAMIC = Capability("dynamic")
RANKS = Capability("ranks")
LIMITS = Capability("limits")


class _StrictModel(BaseModel):
    """A model that converts no values: ``"1"`` is not 1, 1 is not true. An integer is accepted for a float."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Target(_StrictModel):
    """The tensors of one module to record. If no side is named, all sides are recorded."""

    input: Side = None
    """What the module is called with."""
    output: Side = None
    """What it returns."""
    input_grad: Side = None
    """The gradients of its inputs."""
    output_grad: Side = None
    """The gradients of its outputs."""

    @property
    def named(self) -> dict[str, TensorSpec]:
        """The sides that the target names, each with its spec; empty if it names none, which means all."""
        return {side: spec for side, spec in self if spec is not None}

    @model_serializer
    def _as_written(self) -> dict[str, str]:
        return {side: str(spec) for side, spec in self.named.items()}


class CcDistribution(_StrictModel):
    """Communication operators."""

    enable: bool = False
    """Record the tensors that go into and come out of communication operators."""
    cc_codeline: Patterns = ()
    """Record only calls whose stack holds a `file[line]` that one of these regular expressions finds. Empty: all calls."""
    cc_pre_hook: bool = False
    """Record what goes in, too."""
    cc_log_only: bool = False
    """Measure nothing: log every call site once, then end the run."""


class Intervals(_StrictModel):
    """For each switch, in every how many of the collected steps its tensors are recorded, counted from the first: 10 means
    steps 0, 10 and 20 if every step is collected.
    """

    xy_distribution: Positive = 1
    """Activations and their gradients."""
    wg_distribution: Positive = 1
    """Weight gradients. In the other steps the total norm is known only where the loop clips."""
    param_distribution: Positive = 1
    """Weights."""
    mv_distribution: Positive = 1
    """Moments of the optimizer."""
    ur_distribution: Positive = 1
    """Histograms of updates."""
    update_ratio: Positive = 1
    """Ratios of updates to weights."""
    optimizer_health: Positive = 1
    """Health of the optimizer."""
    mg_direction: Positive = 1
    """Agreement of gradients and momentum. With `wg_distribution`: a multiple of its interval."""
    cc_distribution: Positive = 1
    """Communication operators."""
    recording_l2_features: Positive = 1
    """Features of a higher order."""


class RuleArgs(_StrictModel):
    """Arguments of an alert rule."""

    threshold: Annotated[float, Field(ge=0)] | None = None
    """`AnomalyTurbulence` (required): the relative deviation of `norm` and `mean` from their running means that is still
    normal, up or down; 0.5 is 50 %, and from 1 on no fall of a norm is noticed. `AnomalyNan`: fire on magnitudes above this as
    well as on NaN and Inf."""


RULE_ARGUMENTS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "AnomalyTurbulence": (("threshold",), ()),
    "AnomalyNan": ((), ("threshold",)),
    "AnomalyBounds": ((), ()),
}
"""The fields of ``RuleArgs`` that each rule needs, and those that it may have besides."""


class AlertRule(_StrictModel):
    """One alert rule."""

    rule_name: Literal["AnomalyTurbulence", "AnomalyNan", "AnomalyBounds"]
    """The rule. `AnomalyBounds`: numbers that cross the bounds of the report."""
    args: RuleArgs = RuleArgs()
    """Its arguments."""

    @model_validator(mode="after")
    def _has_its_arguments(self) -> AlertRule:
        needed, optional = RULE_ARGUMENTS[self.rule_name]
        given = self.args.model_dump(exclude_none=True)
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f'{self.rule_name} needs "args": {{"{missing[0]}": ...}}')
        if unknown := [name for name in given if name not in (*needed, *optional)]:
            raise ValueError(f"{self.rule_name} has no argument {unknown[0]}")
        return self


class Alert(_StrictModel):
    """Alert rules, and what becomes of their events."""

    rules: Annotated[tuple[AlertRule, ...], Field(strict=False)] = ()
    """The rules, the most important first: where several fire on a tensor in a step, the events of the first one count."""
    dump: bool = False
    """Write the events into `anomaly_detected/`."""


class L2Targets(_StrictModel):
    """Modules of the features of a higher order, by the hook that computes them."""

    attention_hook: Strings = ()
    """Attention modules, by full or short name. Empty: none."""
    attention_head_hook: Strings = ()
    """Attention modules with a row for each head, by full or short name. Empty: none."""
    linear_hook: Strings | None = None
    """Modules with a weight matrix, by full or short name. Empty: every module that has one; null or left out: none."""
    moe_router_weight_hook: Strings = ()
    """Routers whose weights are compared, by full or short name. Empty: none."""
    moe_router_logit_hook: Strings = ()
    """Routers whose logits are looked at, by full or short name. Empty: none."""
    moe_router_load_hook: Strings = ()
    """Routers whose choices are counted, for each expert, by full or short name. Empty: none."""
    activation_hook: Strings = ()
    """Modules whose outputs are looked at, by full or short name. Empty: none."""


class Forward(_StrictModel):
    """Where numbers of each step are passed on to while training runs."""

    to: Literal["wandb", "prometheus", "opentelemetry"] | None = None
    """`wandb`: the run of this process. `prometheus`: a file or a port. `opentelemetry`: the global meter provider. Null:
    nowhere."""
    kinds: Strings = ()
    """Kinds, the most important first, such as `run` for loss, learning rates and total norms. Empty: all, `run` first."""
    names: Strings = ()
    """Names of tensors, or patterns with `*` as in `targets`. Empty: all. The run's own numbers are not tensors."""
    ops: Strings = ("norm",)
    """Statistics. They need not be among those of the configuration."""
    most: Annotated[int, Field(ge=1, le=10_000)] = 200
    """How many numbers of a step, at most: the first that fit. A warning says if there are more."""
    file: str = ""
    """With `prometheus`: the text file to write, for the node exporter. `{rank}` in it is replaced by the rank."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """With `prometheus`: the port of the loopback to serve on. `LOCAL_RANK` is added."""

    @model_validator(mode="after")
    def _has_a_place(self) -> Forward:
        places = [name for name in ("file", "port") if getattr(self, name)]
        if self.to == "prometheus" and len(places) != 1:
            raise ValueError('"prometheus" needs either "file" or "port"')
        if self.to != "prometheus" and places:
            raise ValueError(f'{places[0]} goes with "to": "prometheus"')
        return self


class Settings(_StrictModel):
    """Every field that an alert may switch, which is all but ``on_alert`` itself."""

    targets: Annotated[Mapping[str, Target], SELECTION] = Field(default_factory=dict)
    """Modules and parameters to watch, by name or by a pattern with `*`. Empty: all. `{}` as a module's value: its inputs,
    outputs and both gradients; otherwise only those named."""
    dynamic_on: Annotated[bool, DYNAMIC] = False
    """With the environment variable `DYNAMIC_MONITOR=True`: whether monitoring is on. Without it: ignored."""
    start_step: Annotated[Step, SCHEDULE] = 0
    """The first step to collect."""
    collect_times: Annotated[Step, SCHEDULE] = 100_000_000
    """How many steps to collect. 0: none."""
    step_interval: Annotated[Positive, SCHEDULE] = 1
    """Collect every n-th step, counted from `start_step`."""
    intervals: Annotated[Intervals, SCHEDULE] = Intervals()
    """Record what a switch asks for in every n-th collected step: with `{"xy_distribution": 10}` activations in every 10th."""
    print_struct: Annotated[bool, STRUCTURE] = False
    """Write the structure of every watched module after the first step, and end the run."""
    module_ranks: Annotated[Ranks, SELECTION] = ()
    """The ranks to monitor. Empty or null: all."""
    ur_distribution: Annotated[bool, UPDATES] = False
    """Record histograms of Adam's update and ratio vectors. Without `tensorboard`, `hdf5` or `parquet` among the formats they
    are left out with a warning."""
    xy_distribution: Annotated[bool, ACTIVATIONS] = False
    """Record the activations of the targets and their gradients."""
    all_xy: Annotated[bool, ACTIVATIONS] = False
    """With `xy_distribution`: record all modules; those in `targets` as described there."""
    forward_only: Annotated[bool, ACTIVATIONS] = False
    """With `xy_distribution`: no gradients of activations. With `backward_only` as well there are no activations at all."""
    backward_only: Annotated[bool, ACTIVATIONS] = False
    """With `xy_distribution`: gradients of activations alone."""
    mv_distribution: Annotated[bool, MOMENTS] = False
    """Record the optimizer's moments before each step."""
    param_distribution: Annotated[bool, WEIGHTS] = False
    """Record weights before and after each step."""
    wg_distribution: Annotated[bool, GRADIENTS] = False
    """Record weight gradients before and after aggregation over the data-parallel ranks."""
    monitor_mbs_grad: Annotated[bool, GRADIENTS] = False
    """With `wg_distribution`: a row for every micro-batch, holding the local gradient as accumulated so far."""
    wg_reduced_only: Annotated[bool, GRADIENTS] = False
    """With `wg_distribution`: only gradients after aggregation (`grad_reduced`). Half of the reads, and none in backward."""
    mg_direction: Annotated[bool, UPDATES] = False
    """Record the share of elements whose gradient and momentum agree in sign."""
    update_ratio: Annotated[bool, UPDATES] = False
    """Record the norm of each step's update over the norm of the weight. Keeps a copy of the targeted weights during the
    step."""
    optimizer_health: Annotated[bool, UPDATES] = False
    """Record whether rounding swallows the updates of each weight, and whether Adam's second moment fits its gradient. Keeps a
    copy of the targeted weights during the step, which `update_ratio` shares."""
    run_numbers: Annotated[bool | None, RUN] = None
    """Record the run's own numbers in each step: learning rates, the total norm of gradients before and after clipping, and
    what the loop passes to `TrainerMon.log`. Null: if nothing else is recorded, only what is passed to `log`."""
    cc_distribution: Annotated[CcDistribution, COMMUNICATION] = CcDistribution()
    """What to record of communication operators."""
    alert: Annotated[Alert, ALERTS] = Alert()
    """Alert rules, and whether their events are written."""
    format: Annotated[Formats, OUTPUT] = Field(default=("csv",), validate_default=True)
    """What the results are written as. `api`: kept in memory for the program to ask for."""
    ops: Annotated[Strings, STATISTICS] = ()
    """Statistics: `min`, `max`, `mean`, `norm`, `zeros`, `nans`, `infs`, `absmax`, `std`, `rms`, `absmean`, `smallest_nonzero`,
    `skewness`, `kurtosis`, `shape`, `dtype`, `checksum`; percentiles of magnitudes: `abs_p01`, `abs_p05`, `abs_p25`, `abs_p50`,
    `abs_p75`, `abs_p95`, `abs_p99`, `abs_p999`; `magnitude_histogram`; and the share that a format of low precision would lose:
    `underflow_fp16`, `overflow_fp16`, `underflow_bf16`, `overflow_bf16`, `underflow_e4m3`, `overflow_e4m3`, `underflow_e5m2`,
    `overflow_e5m2`. An unknown one is left out with a warning; none left: `norm`."""
    eps: Annotated[float, Field(gt=0), STATISTICS] = 1e-8
    """`zeros` is the share of elements whose magnitude is below this."""
    ndigits: Annotated[int, Field(ge=0, le=17), OUTPUT] = 6
    """Decimals of a value in CSV."""
    step_count_per_record: Annotated[Positive, OUTPUT] = 1
    """Steps in each file. Not set: 100 for `hdf5` and `parquet`."""
    append_output: Annotated[Appended, OUTPUT] = ()
    """Continue in the rank directories whose timestamps lie in this range, ends included. Empty: start new ones. `"auto"`:
    continue in the newest directory of the same model and number of ranks; a run that starts at step 0 begins a new one."""
    squash_name: Annotated[bool, OUTPUT] = False
    """Record short names: `63.mlp` for `module.encoder.layers.63.mlp`. Names that would share a short one stay full."""
    stack_info: Annotated[bool, STRUCTURE] = False
    """Write the call stack of every watched module in the first step to `stack_info.csv`."""
    recording_l2_features: Annotated[bool, FEATURES] = False
    """Record features of a higher order of the modules in `l2_targets`."""
    l2_targets: Annotated[L2Targets, FEATURES] = L2Targets()
    """The modules of each feature."""
    sa_order: Annotated[Literal["s,b,h,d", "b,s,h,d"], FEATURES] = "s,b,h,d"
    """The dimensions of an attention module's Q and K: sequence, batch, heads, head size."""
    sa_heads: Annotated[Step, FEATURES] = 1
    """The number of heads, from the first on, whose attention weights `attention_hook` looks at. 0: all."""
    sa_batch_rows: Annotated[Step, FEATURES] = 1
    """The number of rows of the batch, from the first on, that `attention_hook` and `attention_head_hook` look at. 0: all."""
    sa_logit_bound: Annotated[float, Field(gt=0), FEATURES] = 100.0
    """`heads_above` of `attention_head_hook` is the share of heads whose greatest attention score is above this."""
    sa_sink_tokens: Annotated[Positive, FEATURES] = 1
    """`sink` of `attention_head_hook` is the attention weight on this many keys, from the first on."""
    dead_after_steps: Annotated[Positive, FEATURES] = 10
    """A unit is dead for `activation_hook` if it was not active in this many collected steps."""
    micro_steps: Annotated[Literal["each", "combined"], ACTIVATIONS] = "each"
    """A row for each micro-step, or one for the step that combines them."""
    queue_bytes: Annotated[int, Field(ge=MIB, le=INT64_MAX), LIMITS] = 256 * MIB
    """Most memory that steps may take while they wait to be written."""
    queue_wait_seconds: Annotated[Seconds, LIMITS] = 1.0
    """How long training may wait, per incident, for room in a full queue before steps are dropped."""
    close_seconds: Annotated[Seconds, LIMITS] = 30.0
    """How long closing may take."""
    signal_seconds: Annotated[Seconds, LIMITS] = 5.0
    """How long SIGTERM may wait for what is queued to be written."""
    max_output_bytes: Annotated[Step, LIMITS] = 0
    """Most bytes of a rank's directory. When it is full, the oldest steps are thinned: every second step stays, then every
    fourth, and so on. Steps with alerts and the newest steps stay. Not with `tensorboard`. 0: no bound."""
    warn_rows_per_step: Annotated[Step, LIMITS] = 10_000_000
    """Rows a step, over the whole job, above which the start-up line is a warning."""
    warn_bytes_per_step: Annotated[Step, LIMITS] = GIB
    """The same for bytes."""
    warn_files_per_step: Annotated[Step, LIMITS] = 10_000
    """The same for files."""
    replica_check: Annotated[ReplicaCheck, RANKS] = None
    """Measure the replicas that another rank writes, too: alert rules judge them, and norms and checksums are compared while
    training runs and by a merge. `"all"`: also read the optimizer's moments after each step, to see what changes between steps.
    Null: only where there are alert rules."""

    @field_serializer("append_output")
    def _auto_as_written(self, range_: tuple[str, ...]) -> str | list[str]:
        return AUTO[0] if range_ == AUTO else list(range_)

    @property
    def checks_replicas(self) -> bool:
        """Whether a rank measures a replica that another rank writes."""
        return bool(self.alert.rules) if self.replica_check is None else bool(self.replica_check)

    @property
    def checks_moments_between_steps(self) -> bool:
        """Whether moments are read after each step, too."""
        return self.replica_check == "all"

    @property
    def counts_magnitudes(self) -> bool:
        """Whether an op is asked for that is derived from histograms of magnitudes."""
        return not HISTOGRAM_OPS.isdisjoint(self.ops)

    @property
    def measures_higher_moments(self) -> bool:
        """Whether an op is asked for that is derived from third and fourth powers."""
        return not HIGHER_OPS.isdisjoint(self.ops)

    @property
    def measures_check_sums(self) -> bool:
        """Whether the check sums of every tensor are asked for."""
        return CHECKSUM in self.ops

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats to write: at least one, each once."""
        return self.format

    def steps_per_record(self, format_name: str) -> int:
        """Steps in each file of a format: ``step_count_per_record``; if that was not set, the format's own default."""
        if "step_count_per_record" in self.model_fields_set:
            return self.step_count_per_record
        return FORMATS[format_name].steps_per_record

    @model_serializer(mode="wrap")
    def _keep_what_was_not_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an unset ``step_count_per_record``: a dumped default would count as set when it is read back."""
        fields: dict[str, Any] = dump(self)
        if "step_count_per_record" not in self.model_fields_set:
            fields.pop("step_count_per_record", None)
        return fields


class OnAlert(_StrictModel):
    """A deeper configuration for a few steps after an alert."""

    set: Settings
    """The fields to change, each with its temporary value."""
    steps: Positive
    """For how many steps."""

    @field_serializer("set")
    def _only_what_changes(self, changes: Settings) -> dict[str, Any]:
        return changes.model_dump(mode="json", exclude_unset=True)


class MonitorConfig(Settings):
    """The whole configuration, frozen.

    ``model_dump(mode="json")`` gives what ``load_config`` reads back as an equal configuration.

    Raises:
        pydantic.ValidationError: From the constructor; ``load_config`` explains it in a ``ConfigError``.
    """

    on_alert: Annotated[OnAlert | None, ALERTS] = None
    """What to switch on, on all ranks, for some steps when an alert rule fires on any of them, or `replica_check` finds wrong
    bits. Null: nothing."""
    forward: Annotated[Forward, OUTPUT] = Forward()
    """Numbers to pass on to a dashboard while training runs. Read at the start, also with dynamic monitoring."""

    def changes_on_alert(self) -> dict[str, Any]:
        """The fields of ``on_alert``, as JSON has them. What it switches on is recorded in each of its steps, unless it has
        ``intervals`` of its own.
        """
        fields: dict[str, Any] = {} if self.on_alert is None else self.on_alert.model_dump(mode="json")["set"]
        switched_on = [field for field in Intervals.model_fields if fields.get(field)]
        if switched_on and "intervals" not in fields:
            fields["intervals"] = {**self.intervals.model_dump(), **dict.fromkeys(switched_on, 1)}
        return fields

    @field_validator("replica_check")
    @classmethod
    def _has_what_to_compare(cls, wanted: ReplicaCheck, fields: ValidationInfo) -> ReplicaCheck:
        ops = fields.data.get("ops", ())
        if wanted and ops and "norm" not in ops:
            raise ValueError('replica_check compares norms and needs "norm" among the ops')
        if wanted == "all" and not fields.data.get("mv_distribution"):
            raise ValueError('"all" reads the optimizer\'s moments and needs "mv_distribution": true')
        return wanted

    @field_validator("wg_reduced_only")
    @classmethod
    def _has_no_rows_of_micro_batches(cls, wanted: bool, fields: ValidationInfo) -> bool:
        if wanted and fields.data.get("monitor_mbs_grad"):
            raise ValueError("monitor_mbs_grad asks for rows of gradients before aggregation. Set one of the two to false")
        return wanted

    @field_validator("mg_direction")
    @classmethod
    def _has_gradients_to_compare(cls, wanted: bool, fields: ValidationInfo) -> bool:
        of_gradients = fields.data["intervals"].wg_distribution if "intervals" in fields.data else 1
        if wanted and fields.data.get("wg_distribution") and fields.data["intervals"].mg_direction % of_gradients:
            raise ValueError(
                f"it compares gradients, and intervals.wg_distribution is {of_gradients}. Set intervals.mg_direction to "
                f"{of_gradients} or a multiple of it"
            )
        return wanted

    @field_validator("max_output_bytes")
    @classmethod
    def _can_be_thinned(cls, most: int, fields: ValidationInfo) -> int:
        written = [name for name in fields.data.get("format", ()) if FORMATS[name].bytes_per_row]
        if most and (unfit := [name for name in written if not FORMATS[name].merged]):
            raise ValueError(
                f"it needs csv, hdf5 or parquet: files of {unfit[0]} cannot be thinned. Remove {unfit[0]} from the formats, or "
                "leave max_output_bytes out"
            )
        return most

    @field_validator("format")
    @classmethod
    def _can_hold_histograms(cls, formats: tuple[str, ...], fields: ValidationInfo) -> tuple[str, ...]:
        if fields.data.get("ur_distribution") and HISTOGRAM_FORMATS.isdisjoint(formats):
            named = " or ".join(f'"{name}"' for name in sorted(HISTOGRAM_FORMATS, reverse=True))
            raise ValueError(f"ur_distribution needs {named} among the formats")
        return formats
