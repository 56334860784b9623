"""Two ranks communicate in every way that CPUs can, unmonitored and monitored, and tell of what came of it.

``communicating.py DIRECTORY``: the logs of communication go there.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.communication as communication
import mindspore.mint.distributed as dist
import numpy as np
from host_rows import HostRows
from mindspore import Tensor, mint, nn, ops
from mindspore.communication import comm_func
from mindspore.mint.distributed import all_reduce as imported_before
from mindspore.ops import communication as functions, primitive
from mindspore.ops.auto_generate import gen_ops_prim
from ranks import tell

from monitor.config.model import CcDistribution
from monitor.failures import Failures
from monitor.mindspore.collectives import MindSporeCollectives, communication as installed, kernels
from monitor.recording.collectives import Communication

ms.set_device("CPU")
communication.init("mccl")
RANK = communication.get_rank()
WORLD = communication.GlobalComm.WORLD_COMM_GROUP
ALONE = dist.new_group([RANK])
DIRECTORY = Path(sys.argv[1])

Case = Callable[[], list[Tensor]]


def mine(*shape: int) -> Tensor:
    """1, 2, 3, ... and with a hundred more on the second rank."""
    return Tensor(np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape) + 100 * RANK)


def empty(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape, np.float32))


def all_reduce() -> list[Tensor]:
    x = mine(4)
    assert dist.all_reduce(x) is None
    return [x]


def all_reduce_imported_before() -> list[Tensor]:
    x = mine(4)
    imported_before(x)
    return [x]


def all_reduce_of_ops() -> list[Tensor]:
    x = mine(4)
    functions.all_reduce(x)
    return [x]


def all_reduce_async() -> list[Tensor]:
    x = mine(4)
    handle = dist.all_reduce(x, async_op=True)
    handle.wait()
    handle.wait()
    result = x.copy()
    x.copy_(empty(4))  # what is read later than in ``wait`` would be this
    return [result]


def all_reduce_of_a_group() -> list[Tensor]:
    x = mine(4)
    dist.all_reduce(x, group=ALONE)
    return [x]


def all_reduce_three_times() -> list[Tensor]:
    tensors = [mine(2), mine(3), mine(5)]
    for x in tensors:
        dist.all_reduce(x)
    return tensors


def broadcast() -> list[Tensor]:
    x = mine(4)
    dist.broadcast(x, 1)
    return [x]


def all_gather() -> list[Tensor]:
    given = [empty(3), empty(3)]
    dist.all_gather(given, mine(3))
    return given


def gather() -> list[Tensor]:
    given = [empty(3), empty(3)]
    dist.gather(mine(3), given, 1)
    return given if RANK == 1 else []


def scatter() -> list[Tensor]:
    given = empty(2)
    dist.scatter(given, [mine(2), mine(2)], 0)
    return [given]


def barrier() -> list[Tensor]:
    dist.barrier()
    return []


def primitives() -> list[Tensor]:
    (sent,) = ops.Broadcast(0)((mine(3),))
    return [ops.AllReduce()(mine(4)), ops.AllGather()(mine(2)), sent]


def function_over_primitive() -> list[Tensor]:
    return [comm_func.broadcast(mine(3), 1, WORLD)]


def of_objects() -> list[Tensor]:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": RANK})
    return [Tensor(one["rank"]) for one in gathered]


def compiled_with_a_primitive() -> list[Tensor]:
    reduce = ops.AllReduce()

    @ms.jit
    def function(x: Tensor) -> Tensor:
        return reduce(x * 2) + 1

    return [function(mine(4))]


def compiled_with_a_function() -> list[Tensor]:
    @ms.jit
    def function(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    return [function(mine(4))]


def captured_from_bytecode() -> list[Tensor]:
    reduce = ops.AllReduce()

    @ms.jit(capture_mode="bytecode")
    def function(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return reduce(y) + 1

    return [function(mine(4)), function(mine(4))]


def derivative_of_a_primitive() -> list[Tensor]:
    reduce = ops.AllReduce()
    value, gradient = ms.value_and_grad(lambda x: (reduce(x) * x).sum())(mine(4))
    return [value, gradient]


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        weight = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4) / 10)
        self.dense = nn.Dense(4, 3, weight_init=weight, bias_init="zeros")

    def construct(self, x: Tensor) -> Tensor:
        return self.dense(x).square().mean()


def reducer_of_gradients() -> list[Tensor]:
    net = Net()
    net.set_train()
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    reducer = nn.DistributedGradReducer(optimizer.parameters, mean=True, degree=2)
    step = ms.value_and_grad(net, None, optimizer.parameters)
    for _ in range(2):
        _, gradients = step(mine(2, 4))
        optimizer(reducer(gradients))
    return list(net.trainable_params())


def one_step_cell() -> list[Tensor]:
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    net = Net()
    training = nn.TrainOneStepCell(net, nn.Momentum(net.trainable_params(), 0.01, 0.9)).set_train()
    losses = [training(mine(2, 4)) for _ in range(2)]
    ms.reset_auto_parallel_context()
    return [*losses, *net.trainable_params()]


CASES: tuple[Case, ...] = (
    all_reduce,
    all_reduce_imported_before,
    all_reduce_of_ops,
    all_reduce_async,
    all_reduce_of_a_group,
    all_reduce_three_times,
    broadcast,
    all_gather,
    gather,
    scatter,
    barrier,
    primitives,
    function_over_primitive,
    of_objects,
    compiled_with_a_primitive,
    compiled_with_a_function,
    captured_from_bytecode,
    derivative_of_a_primitive,
    reducer_of_gradients,
    one_step_cell,
)


def outcome(case: Case) -> dict[str, Any]:
    """What a case came to, in every bit; or how it failed."""
    try:
        results = [one.asnumpy() for one in case()]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    return {"values": [one.tolist() for one in results], "bits": [one.tobytes().hex() for one in results]}


@contextmanager
def listening(rows: HostRows, notes: dict[str, str] | None = None, **wanted: Any) -> Iterator[Communication]:
    failures = Failures(RANK)
    listener = installed(CcDistribution(enable=True, **wanted), failures)
    assert listener is not None
    listener.record_into(rows.recorder, {"tp": (RANK,)}, (notes if notes is not None else {}).__setitem__)
    try:
        yield listener
    finally:
        listener.close()
    assert not failures.counts, failures.counts


def snapshot() -> dict[tuple[str, str], int]:
    modules = gen_ops_prim, primitive, dist.distributed, comm_func, functions
    found = {(module.__name__, name): id(value) for module in modules for name, value in vars(module).items()}
    return {key: value for key, value in found.items() if key[1] != "__ms_tensor_func__"}  # which compilers leave behind


def cases() -> dict[str, Any]:
    told: dict[str, Any] = {}
    for case in CASES:
        rows = HostRows()
        plain = outcome(case)
        with listening(rows, cc_pre_hook=True) as listener:
            told[case.__name__] = {
                "plain": plain,
                "monitored": outcome(case),
                "unread": listener.unread,
                "rows": rows.end(),
            }
    return told


def handles() -> dict[str, Any]:
    """A handle that is waited for in a later step, one that never is, and one that is after everything was closed."""
    rows, notes = HostRows(), {}  # type: HostRows, dict[str, str]
    plain = dist.all_reduce(mine(2), async_op=True)
    plain.wait()
    with listening(rows, notes):
        first = dist.all_reduce(mine(2), async_op=True)
        second = dist.all_reduce(mine(2), async_op=True)
        early = rows.end()
        first.wait()
        late = rows.end()
    second.wait()
    return {
        "early": sorted(early),
        "late": {name: row["calls"] for name, row in late.items()},
        "same_type": type(first) is type(plain),
        "spelled_alike": repr(first).partition("object at")[0] == repr(plain).partition("object at")[0],
        "note": notes.get("communication", "")[:40],
    }


def errors() -> dict[str, Any]:
    """An operation of training's has failed before; and then a fault of the monitor's own."""
    told: dict[str, Any] = {}
    for place, wanted in (("before", {"cc_pre_hook": True}), ("after", {})):
        with listening(HostRows(), **wanted):
            mint.zeros_like(mine(2))  # has no kernel on CPUs, which is said later
            try:
                dist.all_reduce(mine(2), group=ALONE)  # of one rank: others would wait for what was not issued
                told[place] = "nothing"
            except RuntimeError as error:
                told[place] = "ZerosLikeExt" if "ZerosLike" in str(error) else str(error)
    rows, failures = HostRows(), Failures(RANK)
    rows.reader._layout = lambda _x: 1 // 0  # type: ignore[method-assign]
    listener = Communication(CcDistribution(enable=True), failures, MindSporeCollectives(failures))
    listener.record_into(rows.recorder, {}, {}.__setitem__)
    told["own"] = {"result": all_reduce()[0].asnumpy().tolist(), "counts": list(failures.counts.values())}
    told["own"]["rows"] = list(rows.end())
    listener.close()
    return told


def one_line() -> dict[str, Any]:
    rows = HostRows()
    x = mine(2)
    line = sys._getframe().f_lineno + 2
    with listening(rows, cc_codeline=(rf"communicating\.py\[{line}\]",)) as listener:
        dist.all_reduce(x)
        dist.all_reduce(x)
        listener.end_log(DIRECTORY)
        return {name: row["calls"] for name, row in rows.end().items()}


def log() -> dict[str, Any]:
    rows = HostRows()
    directory = DIRECTORY / f"log_{RANK}"
    directory.mkdir()
    with listening(rows, cc_log_only=True) as listener:
        for _ in range(2):
            dist.all_reduce(mine(2))
        dist.all_gather([empty(3)], mine(3), ALONE)
        listener.end_log(directory)
        again = listener.end_log(directory)
    lines = (directory / "communication_log.csv").read_text()
    return {"log": lines, "rows": list(rows.end()), "again": again, "log_only": listener.wanted.cc_log_only}


def several() -> dict[str, Any]:
    """Two listeners, of which one is dropped without being closed."""
    before = snapshot()
    first, second = HostRows(), HostRows()
    with listening(first):
        dropped = Communication(CcDistribution(enable=True), Failures(RANK), MindSporeCollectives(Failures(RANK)))
        dropped.record_into(second.recorder, {}, {}.__setitem__)
        all_reduce()
        del dropped
        gc.collect()
        all_reduce()
    found = [{name: row["calls"] for name, row in rows.end().items()} for rows in (first, second)]
    return {"calls": found, "unchanged": snapshot() == before}


def root() -> int:
    """Of a reduction to this rank, in a group of it alone."""
    (reduce,) = (kernel for kernel in kernels() if kernel.name == "reduce")
    return reduce.root([mine(2), "sum", RANK, ALONE, False])


told: dict[str, Any] = {}
before = snapshot()
told |= {part.__name__: part() for part in (cases, handles, one_line, log, several, errors, root)}
after = snapshot()
told["changed"] = sorted(str(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name))
tell(told)
