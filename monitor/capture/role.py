"""What is the same on every rank that trains a model, and tells it from other models of the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from monitor.capture.backend import Backend, Framework
from monitor.names import clean_name

INNER: Final = ("_orig_mod", "module")
"""Where wrappers keep what they wrap."""

MOST_WRAPPERS: Final = 8


def role_of(framework: Framework, backend: Backend, dp: Any, tp: Any, pp: Any) -> str:
    """The role of the model that ``framework`` was found for.

    Stages of a pipeline may be modules of several classes, and one of them may have no parameter that is trained.

    Args:
        dp: The data-parallel group that was passed, or None. A rank that is in no such group has it passed, too.
        tp: The tensor-parallel group.
        pp: The pipeline-parallel group.
    """
    groups = [name for name, group in (("dp", dp), ("tp", tp), ("pp", pp)) if group is not None]
    *wrappers, model = _classes(framework.chunks[0]) if framework.chunks else [""]
    own = [] if is_staged(framework, backend, pp) else [model, *_training(framework, backend)]
    return " ".join([framework.name, *wrappers, *own, *(f"{name}_group" for name in groups)])


def names_of(framework: Framework, backend: Backend) -> Iterator[str]:
    """The names of all parameters, chunk by chunk."""
    for chunk, root in enumerate(framework.chunks):
        for name, _ in backend.parts(root).parameters:
            yield f"{chunk}:{clean_name(name)}"


def _training(framework: Framework, backend: Backend) -> tuple[str, str]:
    """What steps the model, and whether it is trained at all: an average of the weights is not."""
    parameters = (parameter for root in framework.chunks for _, parameter in backend.parts(root).parameters)
    trained = any(getattr(parameter, "requires_grad", False) for parameter in parameters)
    classes = dict.fromkeys(type(one).__name__ for one in framework.optimizers)  # of one a parameter, one name
    return "+".join(classes), "trained" if trained else "frozen"


def is_staged(framework: Framework, backend: Backend, pp: Any) -> bool:
    """Whether the ranks may have other parts of one model."""
    known = [_ranks_of(pp, backend), framework.groups().get("pp")]
    return any(ranks is not None and len(ranks) > 1 for ranks in known) or "torch.distributed.pipelining" in sys.modules


def _ranks_of(pp: Any, backend: Backend) -> Any:
    """None of what is no group: ``set_monitor`` says so where it needs the group."""
    try:
        return backend.group_ranks("process_group", pp)
    except (TypeError, ValueError):
        return None


def _classes(root: Any) -> list[str]:
    """Of the wrappers around a model, from outside in, and of the model."""
    found = [type(root).__name__]
    while len(found) < MOST_WRAPPERS and (root := _wrapped(root)) is not None:
        found.append(type(root).__name__)
    return found


def _wrapped(root: Any) -> Any:
    inner = (getattr(root, name, None) for name in INNER)
    return next((one for one in inner if hasattr(one, "named_parameters") or hasattr(one, "parameters_and_names")), None)
