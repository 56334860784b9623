"""Chooses numbers of each step on the writer thread, and hands them to wandb, Prometheus, OpenTelemetry or a function."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, final

from monitor.config.loading import ConfigError, config_of
from monitor.config.model import Forward
from monitor.coordinator.output import write_whole
from monitor.failures import LOGGER, Failures
from monitor.selection import pattern
from monitor.series import KINDS, MICRO_STEP_KINDS, RUN_KIND, SeriesTable
from monitor.stats.features import COLUMNS_OF
from monitor.stats.ops import NUMERIC_OPS, derive_all
from monitor.stats.partials import KindRows, combined_micro_steps
from monitor.stats.table import StepRows

# --- Where numbers are passed on to.

LOOPBACK: Final = "127.0.0.1"
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HEADER: Final = (
    "# HELP trainermon_step The last step whose numbers are shown.\n# TYPE trainermon_step gauge\n",
    "# HELP trainermon_value A statistic of a tensor, or a number of the run.\n# TYPE trainermon_value gauge\n",
)


class Number(NamedTuple):
    """What is passed on: a statistic of a series."""

    kind: str
    name: str
    op: str


class ForwardTarget(Protocol):
    """Takes the numbers of one step after the other, on the writer thread."""

    def put(self, step: int, numbers: Mapping[Number, float]) -> None:
        """Take the numbers of a step. May raise, which is reported once."""

    def close(self) -> None:
        """Nothing follows."""


def target_of(wanted: Forward, rank: int) -> ForwardTarget:
    """The target that a configuration names, with its library imported.

    Raises:
        ImportError: The library is not installed.
        OSError: The port cannot be used.
    """
    if wanted.to == "wandb":
        return Wandb(import_module("wandb"))
    if wanted.to == "opentelemetry":
        return OpenTelemetry(import_module("opentelemetry.metrics"), rank)
    if wanted.file:
        return PrometheusFile(Path(os.path.expanduser(wanted.file.replace("{rank}", str(rank)))), rank)
    return PrometheusServer(wanted.port + int(os.environ.get("LOCAL_RANK", "0")), rank)


@final
class Function:
    """Calls a function with a dictionary and the step."""

    def __init__(self, call: Callable[[dict[str, float], int], object]) -> None:
        self._call = call

    def put(self, step: int, numbers: Mapping[Number, float]) -> None:
        self._call(flat(numbers), step)

    def close(self) -> None:
        """Nothing to close."""


@final
class Wandb:
    """The run of Weights & Biases in this process, if there is one.

    The program counts the run's steps itself, and numbers come a little late. So they are added to what the program commits
    next, with a step of their own, ``monitor/step``.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._run: Any = None
        self._said = False

    def put(self, step: int, numbers: Mapping[Number, float]) -> None:
        run = self._library.run
        if run is None:
            if not self._said:
                self._said = True
                LOGGER.info('forward: there is no run of wandb in this process. Call wandb.init(), or leave "forward" out.')
            return
        if run is not self._run:
            self._run = run
            run.define_metric("monitor/*", step_metric="monitor/step")
        run.log({**flat(numbers), "monitor/step": step}, commit=False)

    def close(self) -> None:
        """The run is the program's."""


@final
class OpenTelemetry:
    """Gauges of the global meter provider, ``trainermon.value`` and ``trainermon.step``."""

    def __init__(self, metrics: Any, rank: int) -> None:
        meter = metrics.get_meter("trainermon")
        self._value = meter.create_gauge("trainermon.value", description="A statistic of a tensor, or a number of the run.")
        self._step = meter.create_gauge("trainermon.step", description="The last step whose numbers are shown.")
        self._rank = rank

    def put(self, step: int, numbers: Mapping[Number, float]) -> None:
        self._step.set(step, {"rank": self._rank})
        for number, value in numbers.items():
            self._value.set(value, {"rank": self._rank, **number._asdict()})

    def close(self) -> None:
        """The provider is the program's."""


@final
class PrometheusFile:
    """A text file for the textfile collector of Prometheus' node exporter. It is replaced in each step."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank

    def put(self, step: int, numbers: Mapping[Number, float]) -> None:
        write_whole(self._path, exposition(self._rank, step, numbers).encode())

    def close(self) -> None:
        """The file stays, with the last numbers."""


@final
class PrometheusServer:
    """``http://127.0.0.1:PORT/metrics`` with the numbers of the last step."""

    def __init__(self, port: int, rank: int) -> None:
        self._rank = rank
        self.text = ""
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = served.text.encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="monitor-metrics", daemon=True).start()

    def put(self, step: int, numbers: Mapping[Number, float]) -> None:
        self.text = exposition(self._rank, step, numbers)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def exposition(rank: int, step: int, numbers: Mapping[Number, float]) -> str:
    """The numbers in the text format of Prometheus."""
    lines = [f'{_HEADER[0]}trainermon_step{{rank="{rank}"}} {step}\n', _HEADER[1]]
    for number, value in numbers.items():
        labels = ",".join(f'{key}="{one.translate(_ESCAPES)}"' for key, one in number._asdict().items())
        lines.append(f'trainermon_value{{rank="{rank}",{labels}}} {_spelled(value)}\n')
    return "".join(lines)


def _spelled(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(str(value), repr(value))


def flat(numbers: Mapping[Number, float]) -> dict[str, float]:
    """The numbers by one name each: ``monitor/grad_reduced/layers.0.weight/norm``."""
    return {f"monitor/{'/'.join(number)}": value for number, value in numbers.items()}


# --- Which numbers are passed on.

LEFT_OUT: Final = (
    "forward: {left} numbers of step {step} are not passed on, because `most` is {most}. Choose by kinds, names and ops, "
    "or raise `most`."
)


@final
class Forwarding:
    """Passes the first ``most`` numbers that fit on, and the same ones in each later step (``Watcher``).

    A row of each series counts: micro-steps are combined.
    """

    def __init__(self, wanted: Forward, series: SeriesTable, target: ForwardTarget, failures: Failures) -> None:
        self._wanted, self._series, self._target, self._failures = wanted, series, target, failures
        self._fits = [pattern(name).fullmatch for name in wanted.names]
        self._ops = [op for op in wanted.ops if op in NUMERIC_OPS]
        unknown = {
            "ops": [op for op in wanted.ops if op not in NUMERIC_OPS],
            "kinds": [kind for kind in wanted.kinds if kind not in KINDS],
        }
        for field, given in unknown.items():
            if given:
                failures.warn(f"forward.{field}", f"forward.{field}: there is no {', '.join(given)} to pass on.")
        self._chosen: dict[tuple[int, str], Number | None] = {}
        self._left = self._passed = 0
        self._looked = False

    def look(self, rows: StepRows) -> None:
        """Pass the numbers of a step on."""
        before = self._left
        numbers = {number: value for kind in self._in_order(rows.kinds) for number, value in self._of(kind, rows.kinds[kind])}
        if not self._chosen and not self._looked:
            found = ", ".join(rows.kinds)
            said = f"forward: step {rows.step} has no number of the kinds and names to pass on. Its kinds are {found}."
            self._failures.warn("nothing to pass on", said)
        self._looked = True
        if self._left > before:
            said = LEFT_OUT.format(left=self._left, step=rows.step, most=self._wanted.most)
            self._failures.warn("numbers that are not passed on", said)
        self._target.put(rows.step, numbers)

    def dropped(self, step: int, reason: str) -> None:
        """The step is lost: nothing is passed on."""

    def save(self) -> None:
        """Nothing to save."""

    def close(self) -> None:
        """The run has ended."""
        self._target.close()

    def _in_order(self, kinds: Iterable[str]) -> list[str]:
        wanted = self._wanted.kinds
        found = [kind for kind in kinds if kind in wanted or not wanted]
        return sorted(found, key=wanted.index if wanted else lambda kind: kind != RUN_KIND)

    def _of(self, kind: str, rows: KindRows) -> Iterator[tuple[Number, float]]:
        if kind in MICRO_STEP_KINDS:
            rows = combined_micro_steps(rows)
        every = rows.series.tolist()
        for op, (values, there) in derive_all(COLUMNS_OF.get(kind, self._ops), rows.partials).items():
            for series, value, has in zip(every, values.tolist(), there.tolist(), strict=True):
                number = self._number(series, kind, op) if has else None
                if number is not None:
                    yield number, value

    def _number(self, series: int, kind: str, op: str) -> Number | None:
        if (series, op) in self._chosen:
            return self._chosen[series, op]
        number, name = None, self._series[series].name
        if not self._fits or kind == RUN_KIND or any(fits(name) for fits in self._fits):
            if self._passed < self._wanted.most:
                self._passed += 1
                number = Number(kind, name, op)
            else:
                self._left += 1
        self._chosen[series, op] = number
        return number


def forwarding_of(wanted: Forward, failures: Failures) -> dict[str, Callable[[SeriesTable], Forwarding]]:
    """Creates the watcher of a recording, from its series, by its name for failure messages; empty if nothing is passed on.

    Raises:
        ConfigError: The library is not installed, or the port cannot be used.
    """
    if wanted.to is None:
        return {}
    try:
        target = target_of(wanted, failures.rank)
    except (ImportError, OSError) as error:
        raise ConfigError(f"forward: {wanted.to} cannot be used: {error}") from error
    return {"forwarding": lambda series: Forwarding(wanted, series, target, failures)}


def forwarding_to(
    call: Callable[[dict[str, float], int], object], chosen: Mapping[str, Any], failures: Failures
) -> Callable[[SeriesTable], Forwarding]:
    """Likewise, to a function.

    Raises:
        ConfigError: ``chosen``, fields of ``forward``, cannot be used.
    """
    wanted = config_of({"forward": dict(chosen)}).forward
    return lambda series: Forwarding(wanted, series, Function(call), failures)
