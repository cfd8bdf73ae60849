"""How many processes there are, and whether all see the same number."""

import os

import torch
from accelerate import PartialState


def without_accelerator() -> bool:
    """Whether this machine has a CPU only; accelerate must then be told so, or each of several processes believes to be alone."""
    return not (torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available())


def check_process_count(seen: int) -> None:
    """ValueError if accelerate sees another number of processes than the launcher started."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if seen != started:
        raise ValueError(f"the launcher started {started} processes, but accelerate sees {seen}: check its configuration")


def start_processes(device: str = "auto") -> PartialState:
    """The state of this process among those started, without an Accelerator; `device` cpu keeps it on the CPU."""
    state = PartialState(cpu=without_accelerator() or device == "cpu")
    check_process_count(state.num_processes)
    if device not in ("auto", state.device.type):
        raise ValueError(f"device {device!r} cannot be used here; use auto or {state.device.type}")
    return state
