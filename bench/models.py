"""The models that overhead is measured on, as numbers.

Nothing heavy is imported here. The system counts what a parent held when it started a child towards the child's own peak, so
the parent of the measured processes stays small.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """A GPT and how it is trained: AdamW, float32, one batch that never changes.

    Attributes:
        shape: The fields of ``GPTConfig``.
        steps_a_turn: Steps that a process takes when its turn comes. Many for a small model: the processes share caches, and
            a step of a few milliseconds that always begins with cold ones is not what training is like. Nor is one whose writer
            finds a pause before it can take what came together.
        micro_steps: Micro-batches of a step.
        compiled: Whether ``torch.compile`` compiles the model, after the monitor was attached.
    """

    name: str
    shape: dict[str, int]
    batch: int
    steps_a_turn: int
    micro_steps: int = 1
    compiled: bool = False


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("gpt", {"layers": 8, "width": 512, "heads": 8, "vocabulary": 4096, "context": 128}, batch=4, steps_a_turn=1),
        Workload("tiny", {"layers": 2, "width": 64, "heads": 4, "vocabulary": 256, "context": 64}, batch=4, steps_a_turn=40),
        Workload("quick", {"layers": 1, "width": 16, "heads": 2, "vocabulary": 32, "context": 8}, batch=2, steps_a_turn=1),
    )
}


def tiny_tensors(layers: int, micro_steps: int = 1, *, compiled: bool = False) -> Workload:
    """A model whose tensors are so small that reading them costs nothing: what remains is the cost of a row on the host."""
    name = f"host-{layers}-{micro_steps}{'-compiled' * compiled}"
    shape = {"layers": layers, "width": 8, "heads": 2, "vocabulary": 16, "context": 4}
    turn = max(1, STEPS_A_TURN_OF_TINY_TENSORS // (layers * micro_steps))
    return Workload(name, shape, batch=1, steps_a_turn=turn, micro_steps=micro_steps, compiled=compiled)


STEPS_A_TURN_OF_TINY_TENSORS = 240


def workload(name: str) -> Workload:
    """The workload of a name, as the measured processes receive it."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    _, layers, micro_steps, *compiled = name.split("-")
    return tiny_tensors(int(layers), int(micro_steps), compiled=bool(compiled))
