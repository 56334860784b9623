"""``Debugger``, the part of ``PrecisionDebugger`` that no framework affects.

It decides which steps and ranks are dumped, at which level, and where to.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar, Final

from monitor.dump import levels
from monitor.dump.backend import ApiInterception, DumpBackend, DumpFailures
from monitor.dump.config import load
from monitor.dump.files import DumpWriter
from monitor.dump.levels import (
    SOURCES,
    ApiDump,
    CallRecorder,
    ClassOrInstanceMethod,
    EntrySource,
    ModuleDump,
    ParameterGradients,
    Tokens,
)
from monitor.dump.session import EXCLUSIVE_INTERCEPTION, Session
from monitor.pipeline.process import PROCESS

_NO_PLACE: Final = "This step is not dumped: name a dump_path that can be written to."

WHOLE, DYNAMIC, COMPILED = "", "pynative", "graph"
"""The parts of a dump, by their directories: everything, or what Python calls and the modules that are compiled."""


class Debugger:
    """Dumps the inputs and outputs of modules and APIs, in the chosen steps.

    >>> debugger = PrecisionDebugger("config.json")     # doctest: +SKIP
    >>> for batch in data:                              # doctest: +SKIP
    ...     debugger.start(model)
    ...     loss = train(batch)
    ...     debugger.stop()
    ...     debugger.step()

    Every method may also be called on the class. It then applies to the debugger that was made last:
    ``PrecisionDebugger.start(model)``.

    Args:
        config_path: A JSON file, which may have comments. Without it the defaults apply.
        task: ``statistics`` or ``tensor``. This argument and the following override the file.
        dump_path: The directory to write to.
        level: ``L0``, ``L1``, ``mix`` or ``debug``. ``L2`` is accepted, and refused by ``start``.
        step: The steps to record; all if empty.

    Raises:
        ConfigError: The configuration cannot be used. The message names the field, the value and what is allowed.
    """

    _backend: ClassVar[DumpBackend]
    _latest: ClassVar[Debugger | None] = None

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        step: int | Sequence[int | str] | None = None,
    ) -> None:
        arguments = {"task": task, "dump_path": dump_path, "level": level, "step": step}
        self.config = load(config_path, arguments)
        self._directory = Path(self.config.dump_path).expanduser().absolute()
        self._failures = DumpFailures()
        self._writer = DumpWriter(self._failures)
        self._reader = self._backend.new_reader(checksums=self.config.checksums)
        self._custom: dict[tuple[int, str], tuple[Any, str, str]] = {}
        self._step = 0
        self._step_came: bool | None = None  # None until something could be dumped
        self._sessions: dict[str, Session] = {}
        self._gradients: dict[str, ParameterGradients] = {}
        self._compiled_gradients: dict[str, ParameterGradients] = {}
        self._tokens = Tokens(None)
        self._token_range: tuple[int, int] | None = None
        self._sources: list[EntrySource] = []
        self._apis: ApiInterception | None = None
        self._roots: list[Any] = []
        self._rank_id: int | None = None
        self._passed: Callable[[], Any] = _no_model
        self._at_exit()
        for kind in type(self).__mro__:
            if issubclass(kind, Debugger) and kind is not Debugger:  # which has no framework
                kind._latest = self

    @classmethod
    def made_last(cls) -> Debugger | None:
        """The debugger of this class that was made last."""
        return cls._latest

    @classmethod
    def latest(cls, asked_for: str) -> Debugger:
        """``made_last``, for a method that was called on the class.

        Raises:
            RuntimeError: No debugger was made.
        """
        if cls._latest is None:
            said = f"PrecisionDebugger.{asked_for}() needs a debugger"
            raise RuntimeError(f"{said}: make one first, PrecisionDebugger(config_path).")
        return cls._latest

    # the public methods

    @ClassOrInstanceMethod
    def start(self, model: Any = None, token_range: Sequence[int] | None = None, rank_id: int | None = None) -> None:
        """Record from now on, if this step and this rank are chosen.

        Args:
            model: A module, or a list or tuple of them. The modules below it are recorded, the model itself is not. L0 and mix
                need it.
            token_range: The first and the last forward of the model to record, counted from 1, in a loop that generates tokens.
            rank_id: Names the directory of this process if its rank is unknown.

        Raises:
            TypeError: ``model`` is no module.
            ValueError: An argument is missing or out of range, or the level cannot be recorded: L2, or the mode that is set.
            ConfigError: The list of APIs cannot be used.
            RuntimeError: At L1 and mix, another debugger has started and not stopped yet.
        """
        models = self._checked(model, token_range, rank_id)
        self._drop_inherited_session()
        if self._sources or self._apis is not None:
            self._warn_of_another(models)
            return
        self._passed = _weak_reference(model)
        level = self.config.records
        if not (level.apis or level.sources) or not self._is_chosen():
            return
        if level.apis:
            EXCLUSIVE_INTERCEPTION.refuse_another(self)
        compiled = self._backend.compiled_of(models) if level.sources else frozenset()
        session = self._opened(DYNAMIC if compiled else WHOLE)
        if session is None:
            return
        recorder = CallRecorder(session, self._backend, self._failures)
        if self._tokens.wanted != self._token_range:
            self._tokens = Tokens(self._token_range)
        apis = self._interception(recorder, models) if level.apis else None
        self._count_tokens(models)
        for name in level.sources:
            source = SOURCES[name](recorder, self._tokens, self._backend.module_prefix, self._gradients)
            self._sources.append(source)
            source.watch(models, numbered=isinstance(model, (list, tuple)))
        self._watch_compiled(models, compiled, numbered=isinstance(model, (list, tuple)))
        if apis is not None:
            EXCLUSIVE_INTERCEPTION.take(self)
            self._apis = apis
            apis.install()

    @ClassOrInstanceMethod
    def stop(self) -> None:
        """Stop recording calls, remove hooks and patches, and write the files of everything recorded so far.

        Gradients of recorded calls are still taken until ``step``.
        """
        self._drop_inherited_session()
        self._detach()
        for session in self._sessions.values():
            self._failures.guarded("making the files of a dump", session.assemble, _recovery(session.directory))()

    @ClassOrInstanceMethod
    def step(self) -> None:
        """End the step and complete its files."""
        self._drop_inherited_session()
        self._detach()
        self._warn_of_no_calls()
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            self._failures.guarded("completing a dump", session.close, _recovery(session.directory))()
        self._gradients.clear()
        self._compiled_gradients.clear()
        self._tokens, self._token_range = Tokens(None), None
        self._step += 1

    @ClassOrInstanceMethod
    def save(self, variable: Any, name: str, save_backward: bool = True) -> None:
        """Save a value of the program, and its gradient, at level ``debug``.

        Args:
            variable: A tensor, a number, a text, or lists, tuples and dicts of them.
            name: The name of the value in ``debug.json``.
            save_backward: Whether to save its gradient too.

        Raises:
            TypeError: ``name`` is no text, or empty.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"name is {name!r}: expected a text that names the value.")
        if not self.config.records.values:
            self._failures.warn(
                "save", f"save() works only at level debug, and level is {self.config.level}: nothing was saved."
            )
            return
        self._drop_inherited_session()
        if self._is_chosen() and (session := self._opened()) is not None:
            recorder = CallRecorder(session, self._backend, self._failures)
            self._failures.guarded("saving a value", levels.save, of=name)(recorder, variable, name, backward=save_backward)

    @ClassOrInstanceMethod
    def set_init_step(self, step: int) -> None:
        """Set the number of the first step to ``step``.

        Raises:
            ValueError: ``step`` is no whole number from 0 on.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step is {step!r}: expected a whole number from 0 on.")
        self._step = step

    @ClassOrInstanceMethod
    def register_custom_api(self, module: Any, api: str, api_prefix: str | None = None) -> None:
        """Record calls of ``module.api`` too, at L1 and mix, under ``{api_prefix}.{api}``.

        Raises:
            ValueError: The module has no such function.
        """
        if not callable(getattr(module, api, None)):
            raise ValueError(f"{getattr(module, '__name__', module)!r} has no function {api!r} that could be recorded.")
        prefix = api_prefix or str(getattr(module, "__name__", module)).rpartition(".")[2].capitalize()
        self._custom[id(module), api] = module, api, prefix
        if self._apis is not None:
            self._apis.register(module, api, prefix)

    @ClassOrInstanceMethod
    def restore_custom_api(self, module: Any, api: str) -> None:
        """Stop recording an API, and restore it."""
        self._custom.pop((id(module), api), None)
        if self._apis is not None:
            self._apis.restore(module, api)

    @property
    def model(self) -> Any:
        """The model last passed to ``start``, as long as something else keeps it alive."""
        return self._passed()

    # the implementation

    def _warn_of_another(self, models: Sequence[Any]) -> None:
        """Warn if ``start`` is called with another model while a model is recorded."""
        passed = self._passed()
        known = [] if passed is None else self._backend.models_of(passed)
        if any(all(model is not one for one in known) for model in models):
            said = "start() was called again before stop(), with another model, which is not dumped"
            self._failures.warn("another model", f"{said}: call stop() first, or pass both as a list.")

    def _warn_of_no_calls(self) -> None:
        """Warn if no module of the model was called in the step: compiled code calls no hooks."""
        calls = [f"{base}.forward" for base in self._gradients]
        if calls and self._token_range is None and not any(map(self._has_call, calls)):
            said = f"no module of the model was called in step {self._step}, so none is dumped. Compiled code calls no hooks"
            self._failures.warn("no calls", f"{said}: do not compile what calls the model, and call it after start().")

    def _has_call(self, base: str) -> bool:
        return any(session.has_numbered(base) for session in self._sessions.values())

    def _drop_inherited_session(self) -> None:
        """In a forked process: drop the session that the parent opened. A session of this process itself is kept."""
        if any(session.pid != os.getpid() for session in self._sessions.values()):
            self._detach()
            for session in self._sessions.values():
                session.leave()
            self._sessions.clear()
            self._gradients.clear()
            self._compiled_gradients.clear()

    def _interception(self, recorder: CallRecorder, models: Sequence[Any]) -> ApiInterception:
        listener = ApiDump(recorder, self._tokens)
        apis = self._backend.new_interception(listener, self.config.api_list, primitives_of=models)
        for module, api, prefix in self._custom.values():
            apis.register(module, api, prefix)
        return apis

    def _checked(self, model: Any, token_range: Sequence[int] | None, rank_id: int | None) -> Sequence[Any]:
        level = self.config.level
        if reason := self.config.records.refused:
            raise ValueError(f"level {level} is not recorded: {reason}. Set level to L0, L1, mix or debug.")
        if model is None and (self.config.records.sources or token_range is not None):
            what = "token_range" if token_range is not None else f"level {level}"
            raise ValueError(f"{what} needs the model: call start(model).")
        if rank_id is not None and (isinstance(rank_id, bool) or not isinstance(rank_id, int) or rank_id < 0):
            raise ValueError(f"rank_id is {rank_id!r}: expected a whole number from 0 on.")
        if token_range is not None and not _is_range(token_range):
            raise ValueError(f"token_range is {token_range!r}: expected two whole numbers, the first and the last token.")
        self._backend.refuse(level)
        if rank_id is not None:
            self._rank_id = rank_id
        if token_range is not None:
            self._token_range = token_range[0], token_range[1]
        return [] if model is None else self._backend.models_of(model)

    def _rank(self) -> int | None:
        return self._backend.rank() if self._rank_id is None else self._rank_id

    def _is_chosen(self) -> bool:
        if self.config.step and self._step not in self.config.step:
            self._step_came = bool(self._step_came)
            return False
        self._step_came = True
        rank = self._rank()
        if not self.config.rank or (rank or 0) in self.config.rank:
            return True
        if rank is None:
            said = f"the configuration chooses rank {_some(self.config.rank)}. This process has no rank, so it counts as rank 0"
            self._failures.advise("no rank", f"{said}: nothing is dumped. Correct `rank`, or pass rank_id to start().")
        return False

    def _watch_compiled(self, models: Sequence[Any], compiled: Set[int], *, numbered: bool) -> None:
        """Record compiled modules once more, in a part of their own."""
        session = self._opened(COMPILED) if compiled else None
        if session is None:
            return
        recorder = CallRecorder(session, self._backend, self._failures)
        source = ModuleDump(recorder, self._tokens, self._backend.module_prefix, self._compiled_gradients)
        self._sources.append(source)
        source.watch(models, numbered=numbered, only=compiled)

    def _opened(self, part: str = WHOLE) -> Session | None:
        """The session of a part of this step. None, with one warning, if its directory cannot be written."""
        if part not in self._sessions:
            rank = self._rank()
            place = f"proc{os.getpid()}" if rank is None else f"rank{rank}"
            directory = self._directory / part / f"step{self._step}" / place
            self._failures.directory = directory
            session = self._failures.guarded("opening a dump", Session, _NO_PLACE)(
                directory, self.config, self._backend.framework, self._reader, self._writer, self._failures
            )
            if session is None:
                return None
            self._sessions[part] = session
        return self._sessions[part]

    def _count_tokens(self, models: Sequence[Any]) -> None:
        if self._token_range is None:
            return
        # These hooks precede those of the modules, so they are called first.
        self._roots = [
            self._backend.before_forward(models[0], self._tokens.begins),
            self._backend.after_forward(models[0], self._tokens.ended, always=True),
        ]

    def _detach(self) -> None:
        for attached in (self._apis, *self._sources, *self._roots):
            if attached is not None:
                self._failures.guarded("removing hooks and patches", attached.remove)()
        self._apis = None
        self._sources.clear()
        EXCLUSIVE_INTERCEPTION.give_back(self)
        self._roots.clear()
        for session in self._sessions.values():
            settle = CallRecorder(session, self._backend, self._failures).settle
            self._failures.guarded("closing calls that have raised", settle)()
            session.forget_open_modules()

    def _at_exit(self) -> None:
        known = weakref.ref(self)

        def end() -> None:
            if (living := known()) is not None and threading.current_thread() is threading.main_thread():
                living.close()

        PROCESS.at_end(end)

    def close(self) -> None:
        """Complete the step in progress, and end the writer thread. At exit this happens automatically."""
        self._drop_inherited_session()
        if self._sessions:
            self.step()
        if self._step_came is False:
            chosen, self._step_came = _some(self.config.step), None
            said = f"the configuration chooses step {chosen}, which did not come, so nothing was dumped"
            advice = f"Steps count from 0 or set_init_step(), step() ends each, and the next would be {self._step}."
            self._failures.advise("no step", f"{said}. {advice}")
        self._writer.close()


def _recovery(directory: Path) -> str:
    return f"The records are kept in {directory}: free disk space there, and run trainermon dump-recover {directory}."


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def _no_model() -> None:
    """The reference if no model was passed."""


def _weak_reference(model: Any) -> Callable[[], Any]:
    """Weak references to the model, or to the models of a list or tuple."""
    if model is None:
        return _no_model
    if not isinstance(model, (list, tuple)):
        return weakref.ref(model)
    known = [weakref.ref(one) for one in model]

    def models() -> list[Any] | None:
        living = [one for reference in known if (one := reference()) is not None]
        return living if len(living) == len(known) else None

    return models


def _is_range(token_range: Sequence[int]) -> bool:
    if not isinstance(token_range, (list, tuple)) or len(token_range) != 2:
        return False
    whole = all(isinstance(one, int) and not isinstance(one, bool) for one in token_range)
    return whole and 0 <= token_range[0] <= token_range[1]
