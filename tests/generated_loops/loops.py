"""Training loops as descriptions: what hypothesis draws, shrinks and prints.

A ``Loop`` is a network, optimizers and steps, all plain values. ``loop_training.py`` runs one, ``loop_references.py`` says what
a monitor has to record of it. To have loops do something new, add a field here, draw it in ``loops`` (or ``modules``), do it in
``loop_training.py`` (or ``loop_networks.py``) and tell of it in ``loop_telling.py``. The references follow by themselves. If it
is a reason for missing rows, say so in ``loop_absences.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from hypothesis import strategies as st


class Described:
    """A description whose ``repr`` leaves out what is as usual."""

    def __repr__(self) -> str:
        values = [(one.name, getattr(self, one.name), one.default) for one in fields(self)]  # type: ignore[arg-type]
        shown = ", ".join(f"{name}={value!r}" for name, value, usual in values if value != usual)
        return f"{type(self).__name__}({shown})"


ELEMENTARY = ("linear", "scale", "norm", "tanh", "relu_", "dropout")
"""Kinds of modules that make one tensor of one. ``relu_`` writes into what it is given."""

FORMS = ("tuple", "list", "dict")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "amsgrad", "muon")
ADAMS = ("adam", "adamw", "amsgrad")


@dataclass(frozen=True, repr=False)
class Pack(Described):
    """Several values that are passed or returned as one."""

    form: str
    parts: tuple[Part, ...]


Part = int | Pack
"""A value by its number, or several. A module's inputs have the first numbers, results follow in the order of the calls."""


def numbers(part: Part) -> Iterator[int]:
    """The values in a part, in order."""
    if isinstance(part, int):
        yield part
    else:
        for one in part.parts:
            yield from numbers(one)


@dataclass(frozen=True, repr=False)
class Call(Described):
    """A call of a child in the forward of a block.

    Attributes:
        keywords: Passed as ``k0``, ``k1`` …
        checkpoint: Whether the call is repeated in backward: not at all, ``"reentrant"`` or ``"non-reentrant"``.
        only: In which micro-batches of a step it is made: all, ``"first"``, or ``"later"`` ones. In the others its results
            are its first argument.
    """

    child: int
    args: tuple[Part, ...]
    keywords: tuple[Part, ...] = ()
    checkpoint: str = ""
    only: str = ""


@dataclass(frozen=True, repr=False)
class Module(Described):
    """A module.

    Attributes:
        kind: One of ``ELEMENTARY``; ``mix``, which makes a tensor of any number; or ``block``, which calls its children.
        inputs: How many tensors it takes.
        gives: What a mix or a block returns. The numbers of a mix are those of its inputs, then that of what it has made.
        children: Of a block; ``again`` are the numbers of those that it registers under a second name.
        own: Whether a block has a parameter of its own, whose number follows those of its inputs.
        tied: Whether the weight of a linear layer is that of the network's first one.
        frozen: Whether its own parameters have no gradients.
        asleep: Whether it is in evaluation mode while the others train.
    """

    kind: str
    inputs: int = 1
    gives: Part = 0
    children: tuple[Module, ...] = ()
    again: tuple[int, ...] = ()
    calls: tuple[Call, ...] = ()
    own: bool = False
    tied: bool = False
    frozen: bool = False
    asleep: bool = False

    @property
    def results(self) -> int:
        return len(list(numbers(self.gives)))

    @property
    def makes_one(self) -> bool:
        """Whether it returns one bare tensor, which it has made."""
        if self.kind == "mix":
            return self.gives == self.inputs
        if self.kind != "block":
            return not (self.kind == "dropout" and self.asleep)
        makers = [self.children[call.child] for call in self.calls for _ in range(self.children[call.child].results)]
        place = self.gives - self.inputs - self.own if isinstance(self.gives, int) else -1
        return place >= 0 and makers[place].makes_one


@dataclass(frozen=True, repr=False)
class Optimizer(Described):
    """An optimizer.

    Attributes:
        holds_frozen: Whether it was given frozen parameters as well.
    """

    kind: str
    holds_frozen: bool = False


@dataclass(frozen=True, repr=False)
class Step(Described):
    """A turn of the loop.

    Attributes:
        left_out: Optimizers that an ``if`` leaves out.
        overflows: Whether the loss is infinite in the last micro-batch. Only under a gradient scaler.
        clip: What is done to gradients before the step: nothing, ``"norm"`` or ``"value"``.
        evaluation: A forward that trains nothing: none, ``"eval"`` (mode, without gradients), ``"eval with graph"``,
            or ``"no_grad"`` (in training mode).
        evaluated: Where it is: ``"before"`` the forwards, ``"between"`` the micro-batches, or ``"after"`` the backwards.
    """

    left_out: tuple[int, ...] = ()
    overflows: bool = False
    clip: str = ""
    evaluation: str = ""
    evaluated: str = "before"


@dataclass(frozen=True, repr=False)
class Loop(Described):
    """A training loop.

    Attributes:
        mask: Whether the network is given an integer tensor, too.
        packed: The form in which the network is given its inputs; each alone if empty.
        input_grad: Whether the network's input wants a gradient.
        owners: By parameter, in turn, which optimizer has it; None: none has.
        handed: How the optimizers are passed to ``set_monitor``: ``"alone"``, ``"list"``, ``"tuple"``, ``"dict"``, or
            ``"container"``, an object that has them in ``optimizers``.
        micro_batches: Those of a step.
        order: ``"each"`` micro-batch has its backward after its forward; ``"all"`` backwards follow all forwards, in their
            order or in the ``"reverse"``; or there is one backward of the ``"sum"`` of the losses.
        scaler: Whether a gradient scaler steps the optimizers; ``unscales``: before clipping.
        closure: Whether forward and backward are in a closure that the optimizer calls.
        zeros: Whether gradients are set to zero and not to None.
        thaws: The step from which on frozen parameters have gradients; an optimizer has each of them then.
        each_micro_batch: ``monitor_mbs_grad``.
        single: Whether numbers are float32, not float64.
    """

    network: Module
    mask: bool = False
    packed: str = ""
    input_grad: bool = False
    optimizers: tuple[Optimizer, ...] = (Optimizer("sgd"),)
    owners: tuple[int | None, ...] = (0,)
    handed: str = "alone"
    micro_batches: int = 1
    order: str = "each"
    scaler: bool = False
    unscales: bool = False
    closure: bool = False
    zeros: bool = False
    thaws: int | None = None
    each_micro_batch: bool = False
    single: bool = False
    steps: tuple[Step, ...] = ()

    @property
    def several_micro_steps(self) -> bool:
        """Whether a step may have several forwards."""
        return self.micro_batches > 1 or self.scaler or any(step.left_out for step in self.steps)


# How they are drawn. Simplest first: hypothesis shrinks to what stands first.


@st.composite
def packs(draw: st.DrawFn, values: tuple[int, ...]) -> Part:
    """These values, in this order, as one: bare where there is one, packed, or packed within a pack."""
    if len(values) == 1 and draw(st.booleans()):
        return values[0]
    form = draw(st.sampled_from(FORMS))
    if len(values) > 1 and draw(st.integers(0, 3)) == 3:
        cut = draw(st.integers(0, len(values) - 2))
        return Pack(form, (*values[:cut], Pack(draw(st.sampled_from(FORMS)), values[cut:])))
    return Pack(form, values)


@st.composite
def arguments(draw: st.DrawFn, values: tuple[int, ...]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """These values as positional arguments and keyword arguments."""
    how = draw(st.sampled_from(["each", "each", "packed", "last packed", "keywords", "last keyword"]))
    if how == "packed":
        return (draw(packs(values)),), ()
    if how == "last packed" and len(values) > 1:
        return (values[0], draw(packs(values[1:]))), ()
    if how == "keywords":
        return (), values
    if how == "last keyword" and len(values) > 1:
        return values[:-1], values[-1:]
    return values, ()


@st.composite
def calls(draw: st.DrawFn, child: int, module: Module, known: Sequence[int], masks: Sequence[int], *, may_skip: bool) -> Call:
    """A call with any of the values that are known; of integers only to make a tensor of floats with others."""
    others = [*known, *masks] if module.kind == "mix" and module.results == 1 else known
    values = tuple(draw(st.sampled_from(others if place else known)) for place in range(module.inputs))
    only = draw(st.sampled_from(["", "", "", "first", "later"])) if may_skip else ""
    args, keywords = (values, ()) if module.kind in ELEMENTARY else draw(arguments(values))
    # Reentrant checkpointing detaches bare tensors alone, each argument for itself, and returns others than it was given.
    plain = len(args) == 1 and not keywords and isinstance(args[0], int) and module.makes_one
    checkpoints = ["", "", "", "non-reentrant", *(["reentrant"] if plain else [])]
    return Call(child, args, keywords, draw(st.sampled_from(checkpoints)) if module.kind != "relu_" else "", only)


@st.composite
def modules(draw: st.DrawFn, depth: int) -> Module:
    """A module with at most ``depth`` levels of blocks."""
    kind = draw(st.sampled_from(("linear", *ELEMENTARY, "mix", "mix", *(("block",) * 3 if depth else ()))))
    if kind == "block":
        return draw(blocks(draw(st.integers(1, 2)), depth - 1))
    flags = {name: draw(st.integers(0, 7)) == 7 for name in ("frozen", "asleep")}
    if kind == "mix":
        inputs = draw(st.integers(1, 3))
        given_back = draw(st.lists(st.integers(0, inputs), max_size=2)) if draw(st.booleans()) else []
        gives = draw(packs((inputs, *given_back)))
        return Module(kind, inputs, gives, **flags)
    return Module(kind, tied=kind == "linear" and draw(st.integers(0, 3)) == 3, **flags)


@st.composite
def blocks(draw: st.DrawFn, inputs: int, depth: int, *, is_root: bool = False, mask: bool = False) -> Module:
    """A block; if it is the root, with a ``mask`` as the last of its inputs."""
    children = tuple(draw(st.lists(modules(depth), min_size=1, max_size=3)))
    own = draw(st.integers(0, 5)) == 5
    count = inputs + own
    masks = [inputs - 1] if mask else []
    made: list[Call] = []
    for _ in range(draw(st.integers(1, 4))):
        child = draw(st.integers(0, len(children) - 1))
        known = [value for value in range(count) if value not in masks]
        made.append(draw(calls(child, children[child], known, masks, may_skip=is_root)))
        count += children[child].results
    last = count - 1
    given_back = draw(st.lists(st.integers(0, last), max_size=2)) if draw(st.booleans()) else []
    again = tuple(draw(st.lists(st.integers(0, len(children) - 1), max_size=1)))
    return Module("block", inputs, draw(packs((last, *given_back))), children, again, tuple(made), own)


@st.composite
def steps(draw: st.DrawFn, optimizers: int, *, scaler: bool) -> Step:
    rarely = st.sampled_from([False, False, False, True])
    return Step(
        left_out=tuple(k for k in range(optimizers) if optimizers > 1 and draw(rarely)),
        overflows=scaler and draw(rarely),
        clip=draw(st.sampled_from(["", "", "norm", "value"])),
        evaluation=draw(st.sampled_from(["", "", "", "eval", "eval with graph", "no_grad"])),
        evaluated=draw(st.sampled_from(["before", "between", "after"])),
    )


@st.composite
def loops(draw: st.DrawFn, most_optimizers: int = 3) -> Loop:
    """Any loop."""
    mask = draw(st.integers(0, 3)) == 3
    network = draw(blocks(1 + mask, 1, is_root=True, mask=mask))
    count = draw(st.integers(1, most_optimizers))
    optimizers = tuple(Optimizer(draw(st.sampled_from(OPTIMIZERS)), holds_frozen=draw(st.booleans())) for _ in range(count))
    owner = st.sampled_from([*range(count)] * 3 + [None])
    scaler = draw(st.integers(0, 3)) == 3
    order = draw(st.sampled_from(["each", "each", "all", "reverse", "sum"]))
    closure = not scaler and count == 1 and draw(st.integers(0, 7)) == 7
    return Loop(
        network,
        mask=mask,
        packed=draw(st.sampled_from(["", "", *FORMS])),
        input_grad=draw(st.booleans()),
        optimizers=optimizers,
        owners=tuple(draw(st.lists(owner, min_size=1, max_size=5))),
        handed=draw(st.sampled_from(["list", "tuple", "dict", "container"] if count > 1 else ["alone"])),
        micro_batches=1 if closure else draw(st.integers(1, 3)),
        order=order,
        scaler=scaler,
        unscales=scaler and draw(st.booleans()),
        closure=closure,
        zeros=draw(st.booleans()),
        thaws=draw(st.sampled_from([None, None, 1, 2])),
        each_micro_batch=order != "sum" and draw(st.integers(0, 3)) == 3,  # one backward is of no single micro-batch
        single=draw(st.integers(0, 3)) == 3,
        steps=tuple(draw(steps(count, scaler=scaler)) for _ in range(draw(st.sampled_from([1, 2, 3, 4])))),
    )
