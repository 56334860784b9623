"""Waits until a program imports a framework, and then has its optimizers tell of their steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib import abc, machinery, util
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from monitor.launching.attaching import SelfAttaching

CONFIG_VARIABLE: Final = "MONITOR_RUN_CONFIG"
"""The preset, or the path of a configuration."""


def begin() -> None:
    """Wait for the imports of frameworks, if the process was started by ``trainermon run``."""
    if os.environ.get(CONFIG_VARIABLE):
        imported = {
            "torch.autograd": lambda module: _count_calls(module, "backward", _torch_attaching()),
            "megatron.core.pipeline_parallel.schedules": lambda module: _count_calls(
                module, "custom_backward", _torch_attaching()
            ),
            "torch.amp.grad_scaler": _with_scaler,
            "torch.optim.optimizer": _with_torch,
            "torch._dynamo.config": _with_compiler,
            "deepspeed.runtime.engine": _with_deepspeed,
            "mindspore.nn.optim.optimizer": _with_mindspore,
        }
        sys.meta_path.insert(0, _After(imported))


def _with_torch(module: Any) -> None:
    attaching = _torch_attaching()
    attaching.stop = module.register_optimizer_step_post_hook(lambda optimizer, *_: attaching.stepped(optimizer)).remove


@cache
def _torch_attaching() -> SelfAttaching:
    from monitor.launching.attaching import SelfAttaching, training_of

    return SelfAttaching(_config(), "monitor.pytorch", lambda: _class_of("torch.nn", "Module"), training_of)


def _count_calls(owner: Any, name: str, attaching: SelfAttaching) -> None:
    """Count backwards until the process ends: an optimizer may step for the first time at any time.

    A call within another one does not count: modes of torch call the function again, and so does reentrant checkpointing.
    """
    backward = getattr(owner, name)

    @wraps(backward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        outermost, attaching.in_backward = not attaching.in_backward, True
        attaching.backwards += outermost
        try:
            return backward(*args, **kwargs)
        finally:
            if outermost:
                attaching.in_backward = False

    setattr(owner, name, counted)


def _with_scaler(module: Any) -> None:
    """A scaler may have skipped the step: its backwards are none of the next one."""
    _tell_after(module.GradScaler, "update", _torch_attaching().scaled)


def _with_compiler(config: Any) -> None:
    """Make torch check for hooks: code of the first step is then compiled again for hooks that come after it."""
    config.skip_nnmodule_hook_guards = False


def _with_deepspeed(module: Any) -> None:
    """An engine may step its optimizer several times in a step, with other groups of parameters each time."""
    _tell_after(module.DeepSpeedEngine, "_take_model_step", _torch_attaching().stepped)


def _with_mindspore(module: Any) -> None:
    from monitor.launching.attaching import SelfAttaching, trained_by

    attaching = SelfAttaching(_config(), "monitor.mindspore", lambda: _class_of("mindspore.nn", "Cell"), trained_by)
    attaching.stop = _tell_after(module.Optimizer, "__call__", attaching.stepped)
    for name in ("mindspore.graph.api", "mindspore.common.api"):  # the second one before 2.9
        executor = type(getattr(sys.modules.get(name), "_pynative_executor", None))
        if hasattr(executor, "grad"):
            _count_calls(executor, "grad", attaching)
            break


def _tell_after(owner: Any, name: str, tell: Callable[[Any], None]) -> Callable[[], None]:
    """Tell on what object a method was called, after each call. Returns what ends it."""
    call, own = getattr(owner, name), name in vars(owner)

    @wraps(call)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(self, *args, **kwargs)
        tell(self)
        return result

    def stop() -> None:
        if vars(owner).get(name) is called:
            setattr(owner, name, call) if own else delattr(owner, name)

    setattr(owner, name, called)
    return stop


def _config() -> str:
    return os.environ[CONFIG_VARIABLE]


def _class_of(package: str, name: str) -> type:
    found: type = getattr(sys.modules[package], name)
    return found


class _After(abc.MetaPathFinder):
    """Calls a function after the first import of a module."""

    def __init__(self, then: Mapping[str, Callable[[Any], None]]) -> None:
        self._then = dict(then)

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> machinery.ModuleSpec | None:
        """The module as others find it, with a loader that calls the function."""
        del path, target
        then = self._then.pop(name, None)
        spec = None if then is None else util.find_spec(name)
        if then is not None and spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, then)
        return spec


class _Calling(abc.Loader):
    """Loads as another loader does, and calls a function afterwards."""

    def __init__(self, loader: Any, then: Callable[[Any], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: machinery.ModuleSpec) -> Any:
        created: Any = self._loader.create_module(spec)
        return created

    def exec_module(self, module: Any) -> None:
        """Execute the module; a failure of the function does not reach the program."""
        self._loader.exec_module(module)
        try:
            self._then(module)
        except Exception as error:
            print(f"[monitor] WARNING trainermon run: nothing is monitored in this process: {error!r}", file=sys.stderr)
