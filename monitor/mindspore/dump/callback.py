"""The precision dump where ``mindspore.train.Model`` trains."""

from __future__ import annotations

from mindspore.train import Callback, RunContext

from monitor.mindspore.dump.debugger import PrecisionDebugger


class MsprobeStep(Callback):  # type: ignore[misc]
    """Dumps each step of a training, from its beginning to its end.

    >>> model.train(epochs, dataset, callbacks=[MsprobeStep(debugger)])  # doctest: +SKIP

    Args:
        debugger: Its ``start`` may have been called with a model before; then that model is dumped. Otherwise it is the
            network that ``Model`` was given.
    """

    def __init__(self, debugger: PrecisionDebugger) -> None:
        super().__init__()
        self._debugger = debugger

    def on_train_step_begin(self, run_context: RunContext) -> None:
        passed = self._debugger.model
        self._debugger.start(run_context.original_args().network if passed is None else passed)

    def on_train_step_end(self, run_context: RunContext) -> None:
        del run_context
        self._debugger.stop()
        self._debugger.step()


class MsprobeInitStep(Callback):  # type: ignore[misc]
    """Has steps counted from where a training goes on.

    Args:
        debugger: Whose steps; None: those of the debugger that was made last.
    """

    def __init__(self, debugger: PrecisionDebugger | None = None) -> None:
        super().__init__()
        self._debugger = debugger

    def on_train_begin(self, run_context: RunContext) -> None:
        done = getattr(run_context.original_args(), "cur_step_num", 0) or 0
        debugger = PrecisionDebugger.made_last() if self._debugger is None else self._debugger
        if debugger is not None:
            debugger.set_init_step(int(done))
