"""A loop as a program to read, for the person who has to find out what a monitor does wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loops import Call, Loop, Module, Part, Step


def told(loop: Loop) -> str:
    """The loop, a line each module, call and step."""
    return "\n".join(["", *_network(loop), "", *_training(loop)])


def _network(loop: Loop) -> Iterator[str]:
    yield "the network, its modules called by their path:"
    yield from _block(loop.network, "network")


def _block(block: Module, path: str) -> Iterator[str]:
    values = [f"x{place}" for place in range(block.inputs)] + (["self.own"] if block.own else [])
    yield f"  {path}({', '.join(values[: block.inputs])}):"
    yield from (f"    again{place} is m{place}" for place in block.again)
    for call in block.calls:
        yield from _call(call, block.children[call.child], values)
    yield f"    return {_part(block.gives, values)}"
    for place, child in enumerate(block.children):
        yield from _child(child, f"{path}.m{place}")


def _child(child: Module, path: str) -> Iterator[str]:
    if child.kind == "block":
        yield from _block(child, path)
        return
    inputs = [f"x{place}" for place in range(child.inputs)]
    flags = [name for name in ("frozen", "tied", "asleep") if getattr(child, name)]
    does = f"return {_part(child.gives, [*inputs, 'made'])}" if child.kind == "mix" else ""
    yield f"  {path} is a {child.kind}{' that is ' + ' and '.join(flags) if flags else ''}{': ' + does if does else ''}"


def _call(call: Call, child: Module, values: list[str]) -> Iterator[str]:
    args = [_part(one, values) for one in call.args] + [f"k{i}={_part(one, values)}" for i, one in enumerate(call.keywords)]
    made = [f"v{len(values) + place}" for place in range(child.results)]
    values += made
    notes = [f"{call.checkpoint} checkpoint"] if call.checkpoint else []
    notes += [f"in the {call.only} micro-batches of a step; in others its first argument"] if call.only else []
    yield f"    {', '.join(made)} = m{call.child}({', '.join(args)})" + (f"  # {'; '.join(notes)}" if notes else "")


def _part(part: Part, values: Sequence[str]) -> str:
    if isinstance(part, int):
        return values[part]
    parts = [_part(one, values) for one in part.parts]
    if part.form == "dict":
        return "{" + ", ".join(f"d{place}: {one}" for place, one in enumerate(parts)) + "}"
    inside = ", ".join(parts)
    return f"[{inside}]" if part.form == "list" else f"({inside}{',' if len(parts) == 1 else ''})"


def _training(loop: Loop) -> Iterator[str]:
    yield f"its inputs: {'float32' if loop.single else 'float64'}{' with a gradient' if loop.input_grad else ''}"
    yield f"  {'and a mask of integers, ' if loop.mask else ''}packed as: {loop.packed or 'nothing'}"
    for index, optimizer in enumerate(loop.optimizers):
        mine = [str(place) for place, owner in enumerate(loop.owners) if owner == index]
        frozen = ", frozen ones too" if optimizer.holds_frozen else ""
        has = f"of every {len(loop.owners)} parameters in turn it has {', '.join(mine)}" if mine else "it has none"
        yield f"optimizer {index}: {optimizer.kind}, {has}{frozen}"
    yield f"  passed to set_monitor: {loop.handed}"
    yield f"a step: {loop.micro_batches} micro-batches, backward: {loop.order}"
    names = ("scaler", "unscales", "closure", "zeros", "each_micro_batch")
    yield f"  with: {', '.join(name for name in names if getattr(loop, name)) or 'nothing else'}"
    if loop.thaws is not None:
        yield f"  frozen parameters have gradients from step {loop.thaws} on"
    for number, step in enumerate(loop.steps):
        yield f"  step {number}: {_step(step)}"


def _step(step: Step) -> str:
    said = [f"leaves out optimizer {index}" for index in step.left_out]
    said += ["overflows"] if step.overflows else []
    said += [f"clips by {step.clip}"] if step.clip else []
    said += [f"{step.evaluation} forward {step.evaluated}"] if step.evaluation else []
    return ", ".join(said) or "plain"
