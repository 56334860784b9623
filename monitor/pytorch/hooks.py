"""Hooks of modules and parameters, patches of torch functions, callbacks at the end of backward, and changes after it.

A copied or saved model holds a no-op of the standard library in place of a hook, so a checkpoint loads without the monitor
installed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import FrameType, FunctionType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from monitor.failures import Failures
from monitor.recording import patches
from monitor.recording.attached_model import NamedParameter, ParameterSubset
from monitor.recording.backend import Removable

# --- Functions that replace torch's own must be opaque to a compiler, as the originals are.

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Mark ``function`` so that a compiler neither traces nor compiles it, nor anything that it calls.

    ``torch.compiler.disable`` does the same with a wrapper that costs every call a microsecond, and imports the compiler.
    """
    strategy = _skip_strategy()
    if strategy is None:
        disabled: F = torch.compiler.disable(function)
        return disabled
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def not_compiled_alone(function: F) -> F:
    """Mark ``function`` so that a compiler does not compile it alone between two graphs: there it runs eagerly. Inside a graph
    it is traced.
    """
    strategy = _skip_strategy()
    if strategy is not None:
        torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def _skip_strategy() -> Any:
    """Torch's strategy that skips code; None if this version of torch lacks it."""
    frames: Any = torch._C._dynamo.eval_frame
    try:
        return frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    except AttributeError:
        return None


def between_graphs() -> bool:
    """Whether a compiler runs the caller between two graphs, and compiles what is called next. Under a function mode it would
    compile that once more, and break graphs.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or getattr(getattr(dynamo, "_stance", None), "stance", "") == "force_eager":
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == dynamo.__file__ and code.co_name in ("compile_wrapper", "_fn"):
            return code.co_name == "compile_wrapper"  # the other one is that of `torch.compiler.disable`
        frame = frame.f_back
    return False


TRACEABLE: Final = hasattr(torch.library, "_register_effectful_op")
"""Whether this version of torch keeps operators with side effects in order. Otherwise compiled code is not observed."""


def _exporting_now() -> bool:
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


_is_exporting: Final[Callable[[], bool]] = torch.compiler.assume_constant_result(_exporting_now)
"""Whether a compiler traces for an export. ``torch.compiler.is_exporting`` says so of every trace in torch 2.11."""


def _is_of_the_monitor(hook: object) -> bool:
    """Also in a copied or loaded model, where it does nothing."""
    return isinstance(hook, ModuleHook) or isinstance(getattr(hook, "__self__", None), contextlib.nullcontext)


class ModuleHook:
    """A hook in a module's dictionaries, which ``copy.deepcopy`` and ``torch.save`` visit.

    It does nothing where fusing for quantization has moved it to another module, which passes no keyword arguments.

    Args:
        arguments: How many arguments it takes, with the keyword arguments.
        call: Called in eager code, not under ``torch.jit.trace``, which would record its operations as the model's.
        traced: Called in its place by a compiler that traces the module's call, but not in an export. Without it, compiled code
            omits the hook, and no graph break occurs.
    """

    def __init__(self, arguments: int, call: Callable[..., Any], traced: Callable[..., Any] | None = None) -> None:
        self._arguments = arguments
        self._call = call
        self._traced = traced
        self._hidden = _hidden_hooks()

    @not_compiled_alone
    def __call__(self, *args: Any) -> Any:
        # As `torch.compiler.is_compiling`, in one call of Python rather than two.
        if torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
            return None if self._traced is None or _is_exporting() else self._traced(*args)
        if torch._C._get_tracing_state() is None and len(args) == self._arguments:
            self._call(*args)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _HiddenHooks(patches.CallListener):
    """Hides the monitor's hooks from torch where they would change what it compiles. Every hook keeps this object alive.

    - ``torch.jit.script`` compiles the hooks of every module, and keeps them for ever.
    - After a graph break, dynamo compiles the forward of a module of torch's own only if the module has hooks. A model that is
      compiled in other parts has other bits.
    """

    def __init__(self) -> None:
        self._scripting = threading.RLock()  # one thread at a time hides hooks from scripting, and shows them again
        self._calls = threading.local()
        for patch in (_SCRIPTING, _frame_check()):
            if patch is not None and patch.fits:
                patch.add(self)

    def call_begins(self, patch: patches.CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if patch is _SCRIPTING:
            self._scripting.acquire()
            modules = (args[0] if args else kwargs["nn_module"]).modules()
        else:
            modules = _module_of(args[2] if len(args) > 2 else kwargs.get("frame"))
        shown: list[tuple[dict[str, Any], str, Any]] = []
        for fields in (module.__dict__ for module in modules):
            for hooks, *flags in _HOOKS_OF_MODULES:
                ours = {key for key, hook in fields.get(hooks, {}).items() if _is_of_the_monitor(hook)}
                for name in (hooks, *flags) if ours else ():
                    shown.append((fields, name, fields[name]))
                    fields[name] = OrderedDict(one for one in fields[name].items() if one[0] not in ours)
        self._stack.append(shown)

    def call_ended(self, patch: patches.CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any = None) -> None:
        del args, kwargs, result
        for fields, name, hooks in self._stack.pop():
            fields[name] = hooks
        if patch is _SCRIPTING:
            self._scripting.release()

    call_raised = call_ended

    @property
    def _stack(self) -> list[list[tuple[dict[str, Any], str, Any]]]:
        """The calls of this thread, one within another."""
        stack: list[list[tuple[dict[str, Any], str, Any]]] = vars(self._calls).setdefault("stack", [])
        return stack


_HOOKS_OF_MODULES: Final = (
    ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
"""Fields of modules: hooks by number, and flags by the same numbers."""

_SCRIPTING: Final = patches.CallPatch(torch.jit._recursive, "create_script_module", ("nn_module",))


@cache
def _frame_check() -> patches.CallPatch | None:
    """The patch of the function that says whether dynamo skips a frame. Making an optimizer imports dynamo anyway."""
    try:
        from torch._dynamo import trace_rules
    except Exception:  # then nothing is compiled here
        return None
    return patches.CallPatch(trace_rules, "check_verbose", ("obj", "is_inlined_call", "frame"))


def _module_of(frame: Any) -> list[nn.Module]:
    """The module whose forward begins in this frame; none if another function does."""
    module = frame.f_locals.get("self") if frame is not None and frame.f_code.co_name == "forward" else None
    return [module] if isinstance(module, nn.Module) else []


_HIDING: Final = weakref.WeakValueDictionary[object, _HiddenHooks]()
"""All hooks share one object. It is gone with the last hook, and torch then has its own functions again."""


def _hidden_hooks() -> _HiddenHooks:
    return _HIDING.get(None) or _HIDING.setdefault(None, _HiddenHooks())


def takes_hooks(module: nn.Module) -> bool:
    """Whether ``module`` accepts hooks: scripted modules refuse them."""
    return not isinstance(module, torch.jit.ScriptModule)


def before_forward(module: nn.Module, call: Callable[..., None], traced: Callable[..., Any] | None = None) -> Removable:
    """Call ``call(module, args, kwargs)`` before each forward.

    Args:
        traced: Called likewise by a compiler: may return other arguments.
    """
    return module.register_forward_pre_hook(ModuleHook(3, call, traced), with_kwargs=True)


def after_forward(
    module: nn.Module, call: Callable[..., None], traced: Callable[..., None] | None = None, *, always: bool = False
) -> Removable:
    """Call ``call(module, args, kwargs, result)`` after each forward.

    Args:
        traced: Called likewise by a compiler.
        always: Also after a forward that raised, with None as result, while the exception is being handled.
    """
    handle = module.register_forward_hook(ModuleHook(4, call, traced), with_kwargs=True, always_call=always)
    if always:
        _share_number(handle, module)
    return handle


def first_after_accumulation(parameter: Any, call: Callable[[Any], None]) -> Removable:
    """Call ``call(parameter)`` when a backward has added to its gradient, before all existing hooks of this kind. Hooks of
    frameworks and training loops may reduce the gradient or remove it.
    """
    handle: Any = parameter.register_post_accumulate_grad_hook(call)
    hooks = parameter._post_accumulate_grad_hooks
    for earlier in [key for key in hooks if key != handle.id]:
        hooks[earlier] = hooks.pop(earlier)  # torch calls them in the order of the dictionary underneath
    removable: Removable = handle
    return removable


class LoopHooks(NamedTuple):
    """Whether hooks of the training loop on a parameter see its gradient before and after it is accumulated.

    Hooks on the autograd node are not visible.
    """

    before: bool
    after: bool


NO_HOOKS: Final = LoopHooks(before=False, after=False)


def loop_hooks(parameter: Any) -> LoopHooks:
    """The training loop's hooks on a parameter that has one hook of the monitor, after accumulation."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return LoopHooks(bool(getattr(parameter, "_backward_hooks", None)), after is not None and len(after) > 1)


def _share_number(handle: RemovableHandle, module: nn.Module) -> None:
    """Give a hook the same number in every module. torch numbers hooks consecutively, and a compiler specialises on the number
    of an always-called hook, so layers could not share compiled code.
    """
    number = min(0, *module._forward_hooks) - 1
    for hooks in (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called):
        hooks[number] = hooks.pop(handle.id)  # type: ignore[assignment]
    handle.id = number


# --- Patches of torch's own functions.


class TorchCallPatch(patches.CallPatch):
    """A patch that stays opaque to a compiler if the original function was opaque."""

    def _opaque(self, patched: Any, original: Any) -> Any:
        return patched if isinstance(original, FunctionType) else untraced(patched)


# --- The backward in progress, and a callback at its end, before its caller continues.

NO_BACKWARD: Final = -1
"""The number of the backward that this thread is running, if it runs none."""


def runs_backward() -> bool:
    """Whether this thread is running a backward. A forward inside one repeats an earlier forward."""
    return torch._C._current_graph_task_id() != NO_BACKWARD


def when_backward_ends(then: Callable[[], None]) -> None:
    """Call ``then`` at the end of the backward in progress, after the callback of a reducer.

    The engine runs final callbacks in the order of their registration. A reducer registers its callback when its last gradient
    arrives, so this callback registers ``then`` only when it runs itself.
    """
    _queue(lambda: _queue(then))


def _queue(call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # in compiled code no engine runs the backward
        Variable._execution_engine.queue_callback(call)


# --- Changes of gradients. Gradients are read at the step, so a loop that clips has done it by then. Most reducers write to
# gradients inside backward, which is no such change. So a gradient's version is taken when backward, including its reducer, has
# ended.

MAX_SENTINELS: Final = 4
"""Gradients that are checked. A few suffice: clipping changes all of them."""


class GradientVersion:
    """The version of a gradient, to detect later whether it was replaced or changed.

    A gradient is known by its storage: FSDP makes new views of one gradient after every micro-batch. The storage is referenced
    weakly. A weak reference to the tensor would make ``module.to`` fail where torch swaps tensors. Changes that bypass the
    version (``p.grad.data``) are not detected.
    """

    __slots__ = ("_storage", "_version")

    def __init__(self, gradient: Tensor) -> None:
        self._storage: weakref.ref[Any] = weakref.ref(_storage_of(gradient))
        self._version = gradient._version

    def refers_to(self, gradient: Tensor | None) -> bool:
        return gradient is not None and self._storage() is _storage_of(gradient)

    def is_intact(self, gradient: Tensor | None) -> bool:
        return gradient is not None and self.refers_to(gradient) and gradient._version == self._version

    def is_next(self, gradient: Tensor) -> bool:
        """Whether the gradient was written to once since."""
        return self.refers_to(gradient) and gradient._version == self._version + 1


class ChangeDetector:
    """Follows the first and the last gradients of each backward of a step.

    Attributes:
        task: The backward that is followed, as autograd numbers it.
        latest: The parameter that it has reached last.
    """

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self.task = -1
        self.latest: NamedParameter | None = None
        self._sentinels: dict[NamedParameter, GradientVersion | None] = {}
        self._left: Mapping[NamedParameter, GradientVersion | None] = {}

    def begin_step(self) -> None:
        self.latest = None
        self._sentinels.clear()
        self._left = {}

    def backward_begins(self, parameter: NamedParameter) -> None:
        """Another backward than ``task`` has reached its first parameter."""
        self.task = torch._C._current_graph_task_id()
        self._left, self._sentinels = self._sentinels, dict.fromkeys(self._sentinels)  # in case this backward does not end
        self._add(parameter)
        when_backward_ends(self._failures.guarded("following the gradients", self._ended, "Clipping may go unnoticed."))

    def taken_away(self, may_be: Callable[[NamedParameter], bool]) -> bool:
        """Whether the loop has cleared or replaced a gradient since an earlier backward of the step left it.

        With ``create_graph`` the sum is a new tensor, of which nothing is known.

        Args:
            may_be: Whether something else may have replaced the gradient of a parameter.
        """
        left = [(one, one.tensor.grad, version) for one, version in self._sentinels.items() if version is not None]
        return any(
            (now is None or not (now.requires_grad or version.refers_to(now))) and not may_be(one) for one, now, version in left
        )

    def adds(self, parameter: NamedParameter, gradient: Tensor) -> bool:
        """Whether the backward in progress has just added to what an earlier one of the step left. False for parameters that
        are not followed.
        """
        left = self._left.get(parameter)
        return left is not None and left.is_next(gradient)

    def changed(self, reduced: Callable[[NamedParameter], Tensor | None], held: ParameterSubset = None) -> bool:
        """Whether a gradient that is about to be read was written to since backward ended.

        Args:
            reduced: Finds the tensor that is about to be read. If backward left another tensor, nothing is known.
            held: The parameters that are about to be read.
        """
        for parameter, left in self._sentinels.items():
            gradient = None if left is None or (held is not None and parameter not in held) else reduced(parameter)
            if left is not None and left.refers_to(gradient) and not left.is_intact(gradient):
                return True
        return False

    def intact(self, reduced: Callable[[NamedParameter], Tensor | None], held: ParameterSubset = None) -> bool:
        """Whether all gradients that are checked, at least one, are as backward left them. Arguments as for ``changed``."""
        left = [(one, version) for one, version in self._sentinels.items() if held is None or one in held]
        return bool(left) and all(version is not None and version.is_intact(reduced(one)) for one, version in left)

    def _add(self, parameter: NamedParameter) -> None:
        if len(self._sentinels) < MAX_SENTINELS:
            self._sentinels.setdefault(parameter)

    def _ended(self) -> None:
        """Take all versions again: later backwards of a step add to the gradients of earlier ones."""
        self.task = -1
        if self.latest is not None:
            self._add(self.latest)
        for parameter in self._sentinels:
            gradient = parameter.tensor.grad
            self._sentinels[parameter] = None if gradient is None else GradientVersion(gradient)


def _storage_of(gradient: Tensor) -> Any:
    """The storage, an object that lives as long as its memory; of a sparse tensor the tensor itself."""
    return gradient.untyped_storage() if gradient.layout is torch.strided else gradient
