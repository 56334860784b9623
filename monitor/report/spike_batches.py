"""Which batch makes a loss jump: the losses, local gradients and activations of each rank and micro-step, beside the others.

All ranks and micro-steps of a step use the same weights. So if one of them stands out alone, weights, moments and learning
rates are not the cause: its data is, or its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.coordinator.batches import read_batches
from monitor.coordinator.output import RankDirectory
from monitor.report import bands
from monitor.report.bands import Bands, Limit, Numbers, Window
from monitor.report.findings import Place
from monitor.report.spike_links import BATCH, DEVICE, FORWARD, RANK_DATA, Around, Evidence, Link, sized
from monitor.series import RUN_KIND

LOCAL: Final = "grad_unreduced"
_LOSS: Final = Limit(5, 1.1)
_GRADIENT: Final = Limit(5, 1.5)
_INPUT: Final = Limit(6, 1.1)
_INPUTS: Final = (".input", "module.input")
"""What the input of a whole model is called."""
_WRONG: Final = Limit(12, 30)
"""The limit of an activation that its module's inputs do not explain."""
_CLEARLY: Final = 0.35
"""The others of a step are calm if the logarithms of their factors are at most this share of the largest."""
_STAYS: Final = 0.5
"""Share of an activation's factor, in logarithms, that is left in the next steps if its cause lasts."""
_ROUNDS: Final = 0.01
_NOTHING: Final = 1e-30
"""A factor of a number that became zero: ``bands.SMALLEST`` in place of it, over any usual number."""
_FEW: Final = 4
"""Batches of a quarter of the samples stay in the band. Our measurement, in 12 trainings of a classifier with noisy labels."""
_MOST_NAMED: Final = 4
_ACTIVATIONS: Final = '"xy_distribution": true and "all_xy": true'
LOOK: Final = '"wg_distribution": true, "wg_reduced_only": false and "monitor_mbs_grad": true'


class Outstanding(NamedTuple):
    """The ranks and micro-steps that stand out in a step.

    Attributes:
        ranks: Indices of ranks.
        micro_step: The first of the first rank; -1 if it is not known.
        of_ranks, of_micro_steps: How many were compared.
        is_alone: Whether another rank or micro-step, of which the usual size is known, did not stand out.
        factor, others: By how much these are larger than usual, and the others at most.
    """

    what: str
    ranks: tuple[int, ...]
    micro_step: int
    of_ranks: int
    of_micro_steps: int
    is_alone: bool
    factor: float
    others: float


def batches(around: Around) -> Link:
    """Whether the batches of some or all ranks stand out in the step of the jump."""
    found = [one for one in (_gradients(around), _inputs(around), _losses(around)) if one is not None]
    standing = max(found, key=lambda one: one.is_alone, default=None)
    look = "" if around.has(LOCAL) else LOOK
    if standing is None:
        return Link("batches" if look else "local gradients and inputs", look=look)  # labels may be wrong all the same
    return Link("batches", wrong_activation(around, standing) or _batch_evidence(around, standing), look)


def smaller(around: Around) -> float:
    """By how much the model's input had fewer elements than usual in the step of the jump; 1 if it had not fewer than a
    quarter, or if that is not known. The standard deviation of a mean over fewer samples grows with the root of it.
    """
    kind = around.facts.kinds.get("actv")
    sizes = around.sizes("actv", 0) if kind is not None and kind.names and kind.names[0].startswith(_INPUTS) else None
    if sizes is None:
        return 1.0
    totals = np.nansum(sizes.values, axis=1)
    before = totals[: around.at][totals[: around.at] > 0]
    by = float(np.median(before) / totals[around.at]) if len(before) and totals[around.at] > 0 else 1.0
    return by if by > _FEW else 1.0


def lone_rank(around: Around) -> int | None:
    """The only rank that stands out in the step of the jump."""
    found = [one for one in (_gradients(around), _inputs(around), _losses(around)) if one is not None]
    ranks = {one.ranks for one in found if one.is_alone and len(one.ranks) == 1}
    return around.rank(next(iter(ranks))[0]) if len(ranks) == 1 else None


def activations(around: Around) -> Link:
    """Whether they are known. What is wrong with them is said of the batches."""
    return Link("") if around.has("actv") else Link("activations", look=_ACTIVATIONS)


Rows = Sequence[int] | None
"""Indices of the steps before, and of the step that is judged; None: up to the step of the jump."""


def _gradients(around: Around, rows: Rows = None) -> Outstanding | None:
    window = around.window(LOCAL)
    return (
        None if window is None else _outstanding("its local gradients", _of(around, window.together(), rows), _GRADIENT, 0.05)
    )


def _inputs(around: Around, rows: Rows = None) -> Outstanding | None:
    """The model's input, which no weight has changed. It may also be smaller than usual."""
    window = _first_activation(around)
    if window is None:
        return None
    if (sizes := _sizes(around, window)) is not None:
        window.values = window.values / np.sqrt(sizes)  # a batch of more samples, or of longer ones, is no other data
    return _outstanding("its input", _of(around, window, rows), _INPUT, _ROUNDS, both_ways=True)


def _first_activation(around: Around) -> Window | None:
    """The window of the model's input; None if there is none."""
    window = around.window("actv")
    if window is None or not around.facts.kinds["actv"].names[int(window.series.min())].startswith(_INPUTS):
        return None
    return window.of(np.flatnonzero(window.series == window.series.min()).tolist())


def _sizes(around: Around, window: Window) -> Numbers | None:
    """The numbers of elements of the model's input, with which a norm grows; None if they are not known or do not matter."""
    sizes = around.sizes("actv", int(window.series[0]))
    if sizes is None or around.facts.kinds["actv"].op != "norm":
        return None
    wanted, there = (list(zip(one.rank.tolist(), one.micro_step.tolist(), strict=True)) for one in (window, sizes))
    place = {key: at for at, key in enumerate(there)}
    return sizes.values[:, [place[key] for key in wanted]]


def _is_of_any_size(around: Around) -> bool:
    """Whether the numbers of the model's input do not depend on how many elements it has."""
    window = _first_activation(around)
    return window is not None and (around.facts.kinds["actv"].op != "norm" or _sizes(around, window) is not None)


def _losses(around: Around, rows: Rows = None) -> Outstanding | None:
    """By rank, beside other rows of ranks. Alone they say no more than that there is a jump."""
    window = around.window(RUN_KIND)
    nothing_else = around.window(LOCAL) is None and around.window("actv") is None
    if window is None or nothing_else or len(around.facts.ranks) == 1:
        return None
    losses = window.of([number for number, name in enumerate(around.names(RUN_KIND, window)) if name == around.loss])
    if bool((losses.values == losses.values[:, :1])[around.at].all()):
        return None  # ranks that all have the same loss have logged their mean
    return _outstanding("its loss", _of(around, losses, rows), _LOSS, _ROUNDS)


def _of(around: Around, window: Window, rows: Rows) -> Window:
    """The steps of a window before the judged step, and that step as the last one."""
    chosen = list(range(around.at + 1) if rows is None else rows)
    found = window.of(range(len(window.rank)))
    found.steps, found.values = window.steps[chosen], window.values[chosen]
    return found


def _outstanding(what: str, window: Window, limit: Limit, narrowest: float, both_ways: bool = False) -> Outstanding | None:
    plain = bands.bands_of(window.values, narrowest)
    found = plain.both_ways() if both_ways else plain
    out, factors = found.out(limit)[-1], found.factor[-1]
    if not out.any():
        return None
    largest = int(np.argmax(np.where(out, factors, -np.inf)))
    usual = ~found.both_ways().out(limit)[-1]
    calm = usual & (np.log(np.maximum(np.nan_to_num(factors, nan=1.0), 1)) <= _CLEARLY * np.log(factors[largest]))
    first = _first_micro_steps(window, out)
    others = np.where(out, np.nan, factors)
    return Outstanding(
        what,
        ranks=tuple(sorted(first)),
        micro_step=first[min(first)],
        of_ranks=len(set(window.rank.tolist())),
        of_micro_steps=len(set(window.micro_step.tolist())),
        is_alone=bool((calm & np.isfinite(factors)).any() and (out | calm).all()),
        factor=float(plain.factor[-1, largest]),
        others=float(np.nanmax(others)) if np.isfinite(others).any() else np.nan,
    )


def _first_micro_steps(window: Window, out: NDArray[np.bool_]) -> dict[int, int]:
    """For each rank that stands out, the first micro-step. Local gradients accumulate, so later ones stand out, too."""
    found: dict[int, int] = {}
    for column in np.flatnonzero(out).tolist():
        rank, micro_step = int(window.rank[column]), int(window.micro_step[column])
        found[rank] = min(found.get(rank, micro_step), micro_step)
    return found


# --- What stands out is a batch, all data of a rank, or what a device computed.


def _batch_evidence(around: Around, standing: Outstanding) -> Evidence:
    step = around.spike.step
    rank = around.rank(standing.ranks[0])
    lasting = len(standing.ranks) < standing.of_ranks and _lasts(around, standing)
    inputs = unusual_inputs(around, standing)
    place = Place(step, rank, LOCAL if standing.what == "its local gradients" else RUN_KIND)
    named = _named(around, standing, rank)
    if lasting:
        says = f"the data of rank {rank} stands out from step {step} on{named}: {_compared(standing)}"
    else:
        says = f"{_which(standing, around)} stands out in step {step}{named}: {_compared(standing)}"
    says += f", and {inputs}" if inputs and standing.what != "its input" else ""
    cause = RANK_DATA if lasting else BATCH
    is_exclusive = bool(inputs) and _is_of_any_size(around) and (standing.is_alone or not _inputs_stay(around))
    return Evidence(cause, step, FORWARD, says, place, is_exclusive, is_local=standing.is_alone)


def _which(standing: Outstanding, around: Around) -> str:
    ranks = [str(around.rank(one)) for one in standing.ranks]
    micro = f"micro-step {standing.micro_step}" if standing.micro_step >= 0 and standing.of_micro_steps > 1 else ""
    if len(ranks) == standing.of_ranks:
        where = f" of all {len(ranks)} ranks" if len(ranks) > 1 else ""
    else:
        where = f" of rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:_MOST_NAMED])}"
    return f"the batch{where}{', ' if where and micro else ' of ' if micro else ''}{micro}"


def _compared(standing: Outstanding) -> str:
    others = f", those of the others at most {standing.others:.3g} times" if standing.is_alone else ""
    verb = "are" if standing.what == "its local gradients" else "is"
    return f"{standing.what} {verb} {_factor(standing.factor, ' times the usual size')}{others}"


def _factor(factor: float, unit: str) -> str:
    return "zero" if factor < _NOTHING else sized(factor, unit)


def _lasts(around: Around, standing: Outstanding) -> bool:
    """Whether the same ranks alone stand out in two of the next steps, too, by any of their numbers."""
    later = range(around.at + 1, len(around.steps))
    return sum(any(set(one.ranks) == set(standing.ranks) for one in _each(around, at)) for at in later) >= 2


def _inputs_stay(around: Around) -> bool:
    """Whether the input of the model is unusual in two of the next steps, too. Then it is that of all batches from then on."""
    later = range(around.at + 1, len(around.steps))
    return sum(_inputs(around, [*range(around.at), at]) is not None for at in later) >= 2


def _each(around: Around, at: int) -> list[Outstanding]:
    """What stands out in a later step, judged by the steps before the jump alone."""
    found = []
    for judge in (_gradients, _inputs, _losses):
        found.append(judge(around, [*range(around.at), at]))
    return [one for one in found if one is not None]


def unusual_inputs(around: Around, standing: Outstanding) -> str:
    """What of the model's input is unusual on the ranks that stand out, or nothing."""
    found, window = _inputs(around), around.window("actv")
    if found is None or window is None or set(found.ranks) != set(standing.ranks):
        return ""
    kind, first = around.facts.kinds["actv"], int(window.series.min())
    op = "rms" if kind.op == "norm" and _is_of_any_size(around) else kind.op
    return f"the {op} of {kind.names[first]} is {_factor(found.factor, ' times the usual')}"


def wrong_activation(around: Around, standing: Outstanding) -> Evidence | None:
    """An activation on a rank that is far from its band, while all before it on this rank are in theirs."""
    window = around.window("actv")
    if window is None or len(standing.ranks) != 1:
        return None
    own = np.flatnonzero(window.rank == standing.ranks[0])
    found = bands.bands_of(window.values[:, own], 0.05)
    wrong = np.flatnonzero(found.out(_WRONG)[around.at])
    if not len(wrong):
        return None
    first = int(wrong[np.argmin(window.series[own][wrong])])
    before = (window.series[own] < window.series[own][first]) & (window.micro_step[own] <= window.micro_step[own][first])
    if not before.any() or _any_out(found, around.at, before):
        return None
    factors = found.factor[around.at :, first]
    if _a_weight_grew(around, factors[0]) or (not standing.is_alone and _stays(factors)):
        return None
    names, rank = around.facts.kinds["actv"].names, around.rank(standing.ranks[0])
    name, step = names[int(window.series[own][first])], around.spike.step
    says = (
        f"{name} on rank {rank} is {sized(found.factor[around.at, first], ' times its usual size')} in step {step}, "
        "and all that it is computed from is as usual"
    )
    return Evidence(
        DEVICE, step, FORWARD, says, Place(step, rank, "actv", name), is_exclusive=False, is_local=standing.is_alone
    )


def _a_weight_grew(around: Around, factor: float) -> bool:
    """Whether a weight has grown so much that an activation that is ``factor`` times its usual size may follow from it."""
    window = around.window("param_origin")
    if window is None:
        return False
    grown = bands.bands_of(window.values, 0.05).factor[around.at]
    return bool((grown >= np.exp(_CLEARLY * np.log(factor))).any())


def _stays(factors: Numbers) -> bool:
    """Whether an activation is about as large in two of the next steps. Then a buffer or the code has changed, or a device."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return bool((np.log(factors[1:]) >= _STAYS * np.log(factors[0])).sum() >= 2)


def _any_out(found: Bands, at: int, columns: NDArray[np.bool_]) -> bool:
    return bool(found.out(Limit(6, 1.5))[at][columns].any())


# --- Identifiers of batches, which the loop may have logged.


def _named(around: Around, standing: Outstanding, rank: int) -> str:
    """The identifiers of the batch, in brackets, or nothing."""
    if len(standing.ranks) == standing.of_ranks > 1:
        return ""
    calls = identifiers(around.facts.base, around.facts.told.get("directories", ()), rank, around.spike.step)
    several = len(calls) == standing.of_micro_steps > 1 and standing.micro_step >= 0
    chosen = calls[standing.micro_step : standing.micro_step + 1] if several else calls
    every = [one for call in chosen for one in call]
    more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return f" (batch {', '.join(map(repr, every[:_MOST_NAMED]))}{more} on rank {rank})" if every else ""


def identifiers(base: Path, directories: Sequence[str], rank: int, step: int) -> list[list[str | int]]:
    """What each call of ``log(batch=...)`` said in a step on a rank."""
    found: list[list[str | int]] = []
    for name in directories:
        parsed = RankDirectory.parse(str(name))
        if parsed is not None and parsed.rank == rank:
            found = read_batches(base / str(name), {step}).get(step, found)
    return found
