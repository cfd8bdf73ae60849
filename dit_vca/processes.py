"""How many processes there are, and whether all see the same number."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
from accelerate import PartialState
from torch import Tensor

from .files import available_cores


def without_accelerator() -> bool:
    """Whether this machine has a CPU only; accelerate must then be told so, or each of several processes believes to be alone."""
    return not (torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available())


def check_process_count(seen: int) -> None:
    """ValueError if accelerate sees another number of processes than the launcher started."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if seen != started:
        raise ValueError(f"the launcher started {started} processes, but accelerate sees {seen}: check its configuration")


def start_processes(device: str = "auto") -> PartialState:
    """The state of this process among those started, without an Accelerator; `device` cpu keeps it on the CPU.

    A process that is alone on a CPU uses all its cores.
    """
    state = PartialState(cpu=without_accelerator() or device == "cpu")
    check_process_count(state.num_processes)
    if device not in ("auto", state.device.type):
        raise ValueError(f"device {device!r} cannot be used here; use auto or {state.device.type}")
    if state.device.type == "cpu" and state.num_processes == 1:
        torch.set_num_threads(available_cores())
    return state


def shares(num: int, batch: int, state: PartialState) -> Iterator[tuple[int, int]]:
    """(start, stop) of this process's batches of 0..num: every index belongs to one process, none is repeated or padded."""
    for start in range(state.process_index * batch, num, state.num_processes * batch):
        yield start, min(start + batch, num)


def add_up(tensors: Sequence[Tensor], state: PartialState) -> None:
    """Replace each tensor, in place, by its sum over all processes."""
    if state.num_processes == 1:
        return
    for tensor in tensors:
        there = tensor.to(state.device)
        torch.distributed.all_reduce(there)
        tensor.copy_(there)


@contextlib.contextmanager
def together(state: PartialState) -> Iterator[None]:
    """What any process raises inside, every process raises at the end of the block, none waits for it in vain."""
    error = None
    try:
        yield
    except (ValueError, OSError, FloatingPointError) as raised:
        error = raised
    failed = torch.tensor(int(error is not None))
    add_up((failed,), state)
    if error is not None:
        raise error
    if int(failed):
        raise ValueError("another process failed, and has said why")
