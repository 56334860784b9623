"""A process that trains as it is asked to, and says what it took, in a line of JSON.

The request is its argument (``training.py`` makes it). The reply has ``steps`` (seconds each), ``peak`` (bytes of device
memory), ``waits`` (the first wait for the device in a step, or nothing; null where that is not to be found out), and of one
traced step the ``launches`` and the seconds in which the device was ``busy`` (null where there is no trace). Unmonitored eager
training also says the ``least`` seconds that reading its activations takes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from devices import Clock
from reading import least_seconds
from torch import Tensor, nn

WARM_UP = 5
QUICK = 2
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the profiler's events."""


def main() -> None:
    request = json.loads(sys.argv[1])
    device = torch.device(request["device"])
    torch.manual_seed(0)
    model, tokens = workload(request["model"], device, request["quick"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    close = attach(request, model, optimizer)
    called = torch.compile(model) if request["mode"] == "compiled" else model

    def step() -> Tensor:
        loss: Tensor = called(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(QUICK if request["quick"] else WARM_UP):
        step()
    clock = Clock(device)
    reset_peak(device)
    steps = clock.laps(step, request["steps"])
    reply = {"steps": steps, "peak": peak(device), "waits": waits_of(step, device), **traced(step, device)}
    if request["by"] == "unmonitored" and request["mode"] == "eager":
        reply["least"] = least_seconds(model, step, device)
    close()
    print(json.dumps(reply))


def workload(name: str, device: torch.device, quick: bool) -> tuple[nn.Module, Tensor]:
    """A model with random weights and a batch for it.

    Two of them fill a device of 80 GB well, beside what else is in it. "launches" has the layers of the larger one and next to
    no work in them: the device waits for the host.
    """
    import transformers

    if name == "gpt2":
        small = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
        config: Any = transformers.GPT2Config(**(small if quick else {}))
        made: Callable[[Any], nn.Module] = transformers.GPT2LMHeadModel
        shape = (2, 16) if quick else (32, 1024)
    else:
        large = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        large |= {"num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True}
        if name == "launches":
            large |= {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
        config = transformers.LlamaConfig(**(small if quick else large))
        made = transformers.LlamaForCausalLM
        shape = (2, 16) if quick else (2, 64) if name == "launches" else (8, 2048)
    with device:  # where random numbers for a billion weights take no time
        model = made(config).to(torch.bfloat16)
    return model, torch.randint(config.vocab_size, shape, device=device)


def attach(request: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Let a monitor watch the training. Returns what ends that."""
    by = request["by"]
    if by == "wandb.watch":
        import wandb

        wandb.init(mode="offline")
        wandb.watch(model, log="all", log_freq=1)
        return wandb.finish
    if by == "unmonitored":
        return lambda: None
    if by == "monitor":
        from monitor.pytorch import TrainerMon
    else:
        from msprobe.pytorch import TrainerMon
    watching = TrainerMon(request["config"], params_have_main_grad=False)
    watching.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
    return getattr(watching, "close", lambda: None)


def reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def waits_of(step: Callable[[], Tensor], device: torch.device) -> str | None:
    """The first wait of a step for the device, as torch tells it; empty if there was none, None where it does not tell."""
    module = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        return None
    module.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error)
    finally:
        module.set_sync_debug_mode("default")
    return ""


def traced(step: Callable[[], Tensor], device: torch.device) -> dict[str, Any]:
    """How often a step has the device do something, and for how many seconds in all, as the profiler of torch sees it."""
    if device.type == "cpu":
        return {"launches": None, "busy": None}
    step()  # whatever the look for waits has interrupted
    torch.accelerator.synchronize(device)
    with torch.profiler.profile() as profile:
        step()
        torch.accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    done = [event["dur"] for event in events if event.get("cat") in ON_DEVICE]
    return {"launches": len(done), "busy": sum(done) / 1e6}


if __name__ == "__main__":
    main()
