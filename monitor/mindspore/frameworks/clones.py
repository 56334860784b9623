"""State of optimizers whose class is not known here: parameters that were cloned from those of the model.

``parameters.clone(prefix="moment1")`` makes of ``a.weight`` a parameter ``moment1.a.weight``, and people keep the tuple under
any name. So state is found by the names of its members, and which moment it is by the prefix and the name of the attribute.
Where these do not make it certain it is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mindspore import Parameter, nn

from monitor.mindspore.features.reading import is_floating_point

ROLES: Final[Mapping[str, frozenset[str]]] = {
    "exp_avg": frozenset(
        {
            "adam_m", "exp_avg", "exp_avgs", "first_moment", "first_moments", "lamb_m", "moment1", "moments1", "momentum",
            "momentum_buffer", "momentum_buffers", "momentums", "velocity",
        }
    ),
    "exp_avg_sq": frozenset(
        {
            "adam_v", "exp_avg_sq", "exp_avg_sqs", "lamb_v", "moment2", "moments2", "second_moment", "second_moments",
        }
    ),
    "max_exp_avg_sq": frozenset({"max_exp_avg_sq", "max_exp_avg_sqs", "v_hat", "vhat"}),
}  # fmt: skip
"""Names and prefixes that are certain, by kind."""

PAIR: Final = ("m", "v")
"""Names that are certain beside each other: of the first moment and of the second."""

OF_MOMENTUM: Final = frozenset({"accum", "moment", "moments"})
"""Names that mean the momentum where the optimizer has one, and squares elsewhere."""

MOST_NAMES: Final = 3
"""That a sentence lists."""


@dataclass(frozen=True, eq=False)
class Clones:
    """One tuple, or list, of parameters that were cloned.

    Attributes:
        attribute: Where the optimizer keeps it.
        prefix: Of the names of its members.
        members: By the name of the parameter that each was cloned from.
    """

    attribute: str
    prefix: str
    members: Mapping[str, Parameter]

    def of(self, parameter: Parameter) -> Parameter | None:
        """What was cloned from a parameter, if it can be a moment of it."""
        found = self.members.get(parameter.name)
        return found if found is not None and fits(found, parameter) else None


def fits(state: Parameter, parameter: Parameter) -> bool:
    """Whether state of a parameter has an element for each of its elements, and numbers in them."""
    return bool(state.shape == parameter.shape) and is_floating_point(state) == is_floating_point(parameter)


def clones_in(optimizer: nn.Cell) -> list[Clones]:
    """All that an optimizer keeps, in the order in which it was made."""
    names = {one.name for one in optimizer.parameters}
    found = (_clones(attribute, kept, names) for attribute, kept in vars(optimizer).items() if _are_parameters(kept))
    return [one for one in found if one is not None]


def roles_of(clones: Sequence[Clones], *, has_momentum: bool) -> dict[str, Clones]:
    """Which of them is which moment. What could be two of them, or of which there are two, is none."""
    names = {name for one in clones for name in _names(one)}
    found: dict[str, list[Clones]] = {}
    for one in clones:
        roles = {role for name in _names(one) for role in _roles(name, names, has_momentum=has_momentum)}
        if len(roles) == 1:
            found.setdefault(roles.pop(), []).append(one)
    return {role: some[0] for role, some in found.items() if len(some) == 1}


def told(clones: Sequence[Clones]) -> str:
    """A list of them for people; empty if there is none."""
    listed = [f"{one.attribute!r} (prefix {one.prefix!r})" for one in clones]
    return ", ".join(listed[:MOST_NAMES]) + (", …" if len(listed) > MOST_NAMES else "")


def _are_parameters(kept: Any) -> bool:
    return isinstance(kept, (tuple, list)) and bool(kept) and all(isinstance(one, Parameter) for one in kept)


def _clones(attribute: str, kept: Sequence[Parameter], names: set[str]) -> Clones | None:
    """None for what was not cloned from parameters of these names, each with the same prefix."""
    split = [_split(one.name, names) for one in kept]
    prefixes = {prefix for prefix, _ in split}
    if len(prefixes) != 1 or "" in prefixes:
        return None
    return Clones(attribute, prefixes.pop(), {name: one for (_, name), one in zip(split, kept, strict=True)})


def _split(name: str, names: set[str]) -> tuple[str, str]:
    """The prefix of a clone, and the name of what it was cloned from; an empty prefix where it was not."""
    for place in (at for at, character in enumerate(name) if character == "."):
        if name[place + 1 :] in names:
            return name[:place], name[place + 1 :]
    return "", name


def _names(clones: Clones) -> Iterator[str]:
    yield from (name.strip("_").lower() for name in (clones.attribute, clones.prefix))


def _roles(name: str, names: set[str], *, has_momentum: bool) -> Iterator[str]:
    yield from (role for role, known in ROLES.items() if name in known)
    if name in PAIR and names.issuperset(PAIR):
        yield ("exp_avg", "exp_avg_sq")[PAIR.index(name)]
    if name in OF_MOMENTUM and has_momentum:
        yield "exp_avg"
