"""What every benchmark records of the machine it ran on, and how it is asked."""

import argparse
import platform
import resource
import sys
from pathlib import Path

import torch

from dit_vca.files import available_cores


def own_peak_memory(device: str) -> int:
    """Bytes at this process's peak: allocated tensors on CUDA, else the resident set."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # on Linux ru_maxrss starts at the peak of the process that started this one
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine(device: str) -> dict[str, str | int]:
    """The processor, the cores this process may use and, on CUDA, the GPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    found = {"cpu": models[0] if models else platform.processor() or platform.machine(), "cores": available_cores()}
    return found | ({"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {})


class OneLineParser(argparse.ArgumentParser):
    """Says a mistake in one line, without the usage."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message}\n")
