"""The command ``monitor-precision``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from monitor.bars import bars
from monitor.cli import Command, Job, Version
from monitor.precision import advice
from monitor.precision.judging import CASTINGS, CURRENT, DELAYED, LIMITS, Casting, Scaling
from monitor.precision.operands import OPERANDS
from monitor.query.opened import missing_in, open_source, steps_of
from monitor.terminal import CLEAN, FLAWED, NOTHING, counted, in_json, plain, say

MOST_LAYERS: Final = 400
"""Lines of the table in a terminal."""
MOST_SAID: Final = 20

_SHOWN: Final = {advice.SAFE: "FP8", advice.KEEP: "keep in bf16", advice.NOT_LOOKED_AT: "not looked at"}
_HEADER: Final = ("layer", "verdict", *OPERANDS, "worst operand", "to zero", "error", "step", "loss", "why")

app: Final = Command()


@app.command()
def monitor_precision(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The directory that contains the ranks' directories, or a merged set.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything for programs instead of the table.")] = False,
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only the steps from A to B, inclusive. A or B may be left out.")
    ] = None,
    scaling: Annotated[
        str, typer.Option(metavar="WAY", help="The scaling that the verdicts assume: current or delayed.")
    ] = CURRENT,
    history: Annotated[
        int, typer.Option(min=1, help="The number of earlier rows from which delayed scaling takes its scale.")
    ] = 16,
    margin: Annotated[float, typer.Option(min=0, help="Delayed scaling divides its scale by 2 to this power.")] = 0.0,
    power_of_two: Annotated[bool, typer.Option("--power-of-two", help="Round scales down to powers of two.")] = False,
    loss_scale: Annotated[float, typer.Option(min=0, help="The loss scale, which multiplies gradients in fp16.")] = 1.0,
    job: Job = None,
    _version: Version = False,
) -> None:
    """Say which layers are safe in FP8, and in which format.

    It needs histograms of magnitudes of inputs, weights and gradients: configs/low_precision.json records them.

    \b
      trainermon precision monitor_output
      trainermon precision monitor_output --scaling delayed --history 1024
      trainermon precision monitor_output --json > advice.json

    Exit status: 0 every layer is safe, 1 a layer should stay in bf16, or something was not looked at, 2 nothing was read.
    """
    errors = Console(stderr=True)
    try:
        if scaling not in (CURRENT, DELAYED):
            raise ValueError(f"--scaling is {scaling!r}. Write {CURRENT} or {DELAYED}.")
        how = Scaling(scaling, history, margin, power_of_two, loss_scale)
        source = open_source(run, job)
        with bars(quiet=as_json) as progress:
            found = advice.advise(source, _steps(steps), how, progress)
        missing = missing_in(source.told())
    except (ValueError, OSError) as error:
        say(errors, f"Nothing was read: {error}", style="red")
        raise typer.Exit(NOTHING) from error
    if as_json:
        typer.echo(json.dumps(for_programs(found, missing), indent=1))
    else:
        _print(found, Console())
    for one in missing[:MOST_SAID]:
        say(errors, one, style="yellow")
    if len(missing) > MOST_SAID:
        say(errors, f"and {len(missing) - MOST_SAID} more", style="yellow")
    raise typer.Exit(CLEAN if found.is_clean and not missing else FLAWED)


def _steps(written: str | None) -> range:
    if written is None:
        return steps_of(None)
    match = re.fullmatch(r"(\d*):(\d*)", written)
    if match is None:
        raise ValueError(f"--steps is {written!r}. Write the first and the last step, as in 100:200.")
    first, last = int(match[1] or 0), int(match[2]) if match[2] else None
    if last is not None and first > last:
        raise ValueError(f"--steps {written} ends before it begins.")
    return steps_of(slice(first, None if last is None else last + 1))


def for_programs(found: advice.Advice, missing: Sequence[str]) -> dict[str, Any]:
    """Everything as JSON takes it. Numbers that are not finite are texts."""
    layers = [
        {
            "name": one.name,
            "verdict": one.verdict,
            "loss": asdict(one.loss),
            "operands": {what: _operand_for_programs(of) for what, of in one.operands.items()},
        }
        for one in found.gemms
    ]
    counted = {verdict: len(found.having(verdict)) for verdict in _SHOWN}
    said: dict[str, Any] = in_json(
        {
            "scaling": asdict(found.scaling),
            "limits": LIMITS,
            "steps": found.steps,
            "verdicts": counted,
            "loss": asdict(found.loss),
            "lacking": found.lacking,
            "without_layer": found.without_layer,
            "missing": list(missing),
            "layers": layers,
        }
    )
    return said


def _operand_for_programs(one: advice.OperandVerdict) -> dict[str, Any]:
    casts = {
        f"{cast.format} {cast.way}": {"badness": of.badness, "step": of.step, "rank": of.rank, **of.numbers}
        for cast, of in one.casts.items()
    }
    return {"format": one.format or None, "why": one.why, "rows": one.rows, "casts": casts}


# --- The table.


def _print(found: advice.Advice, console: Console) -> None:
    if found.gemms:
        _print_columns([_HEADER, *map(_line, found.gemms[:MOST_LAYERS])], console)
    if len(found.gemms) > MOST_LAYERS:
        say(console, f"and {counted(len(found.gemms) - MOST_LAYERS, 'more layer')}: --json prints all")
    for one in [*found.lacking, *_without_layer(found.without_layer)]:
        say(console, one, style="yellow")
    if not found.gemms:
        return
    if casts := [*_casts(found)]:
        say(console, "\nThe rows that lose most, by format and scaling:")
        heads = ("format", "scaling", "layer", "operand", "step", "to zero", "saturates", "error")
        _print_columns([heads, *casts], console)
    shown = ", ".join(f"{len(found.having(verdict))} {said}" for verdict, said in _SHOWN.items())
    say(console, f"\n{counted(len(found.gemms), 'layer')} in {counted(found.steps, 'step')}: {shown}")
    say(console, _of_loss(found))


def _of_none(layers: int, not_judged: int) -> str:
    """What is known if no layer is safe."""
    if not_judged == layers:
        return "No layer was judged."
    return f"No layer {'that was judged ' if not_judged else ''}is safe in FP8."


def _of_loss(found: advice.Advice) -> str:
    if not found.having(advice.SAFE):
        return _of_none(len(found.gemms), len(found.having(advice.NOT_LOOKED_AT)))
    if found.loss.most is None or found.loss.expected is None:
        return "How much the loss would change is not known: norms of weights, inputs, outputs or gradients are missing."
    most, expected = found.loss.most, found.loss.expected
    said = f"With the safe layers in FP8, the loss of a step is expected to change by {expected:.2g}, rarely by more than "
    said += f"{advice.RARELY * expected:.2g}"
    if expected > most:
        return f"{said}. The second order dominates, so the bound of the first order ({most:.2g}) does not hold."
    return f"{said}, and at most by {most:.2g} to first order."


def _without_layer(names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - MOST_SAID} more" if len(names) > MOST_SAID else ""
        count, were = (f"{len(names)} matrices belong", "were") if len(names) > 1 else ("1 matrix belongs", "was")
        yield f"{count} to no layer, and {were} not looked at: {', '.join(names[:MOST_SAID])}{more}"


def _line(one: advice.GemmVerdict) -> tuple[str, ...]:
    worst = one.worst
    cast = worst.casts.get(Casting(worst.shown, worst.way))
    numbers = ("", "", "") if cast is None else (_percent(cast.numbers["underflow"]), _percent(cast.error), str(cast.step))
    loss = "" if one.loss.expected is None else f"{one.loss.expected:.1g}"
    formats = (of.format or "-" for of in one.operands.values())
    return (one.name, _SHOWN[one.verdict], *formats, worst.what, *numbers, loss, worst.why)


def _casts(found: advice.Advice) -> Iterator[tuple[str, ...]]:
    """For each format and scaling, the operand of all layers that loses most."""
    for cast in CASTINGS:
        every = [
            (of, one.name, what)
            for one in found.gemms
            for what, all_of in one.operands.items()
            if (of := all_of.casts.get(cast))
        ]
        if every:
            of, name, what = max(every, key=lambda each: each[0].badness)
            numbers = (_percent(of.numbers["underflow"]), _percent(of.numbers["saturated"]), _percent(of.error))
            yield (cast.format, cast.way, name, what, str(of.step), *numbers)


def _percent(share: float) -> str:
    return f"{share:.2%}" if math.isfinite(share) else str(share)


def _print_columns(lines: Sequence[Sequence[str]], console: Console) -> None:
    """Columns of equal width. Names come from the recorded program, so control characters are escaped."""
    escaped = [[plain(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*escaped, strict=True)]
    for line in escaped:
        say(console, "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
