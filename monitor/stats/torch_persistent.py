"""Tensors that are kept from call to call, in memory that is nobody's but ours."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from monitor.stats.torch_modes import beneath


def _is_elsewhere(device: torch.device) -> bool:
    return device.type != "cpu"


def persistent(
    device: torch.device, make: Callable[[], Tensor], elsewhere: Callable[[torch.device], bool] = _is_elsewhere
) -> Tensor:
    """What ``make`` makes on ``device``, for longer than the call in progress. Does not wait for the device.

    A caller may be within the warm-up of a graph of the device, whose allocations torch takes from the graph's own memory, by
    thread or by stream, and holds to account: a tensor kept there is an error in training. So a thread of its own makes it, in
    that thread's stream, and the caller's stream comes after.

    Args:
        elsewhere: Whether tensors of a device are made so. On the host nothing is gained by it.
    """
    if not elsewhere(device):
        return _made(make)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainermon-memory") as thread:
        made, done = thread.submit(_made_there, device, make).result()
    if done is not None:
        stream = torch.accelerator.current_stream(device)
        stream.wait_event(done)
        made.record_stream(stream)  # given up one day, it is handed out again only after what this stream does with it
    return made


def made_here(_device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """The same where memory is to come from whatever is in progress: in a capture, from the graph's."""
    return _made(make)


def _made_there(device: torch.device, make: Callable[[], Tensor]) -> tuple[Tensor, torch.Event | None]:
    if device.type == "cpu":
        return _made(make), None
    with torch.accelerator.device_index(device.index):  # a new thread's device is the first
        return _made(make), torch.accelerator.current_stream(device).record_event()


def _made(make: Callable[[], Tensor]) -> Tensor:
    with beneath(), torch.inference_mode(False):  # it outlives the modes that happen to be on
        return make()
