"""The optimizer and its schedule."""

import math

import torch
from torch import nn

from ..config import TrainConfig


def build_optimizer(network: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters: it takes a non-finite flag from the device without a sync.

    Weight decay acts on the matrices of linear layers and convolutions alone; biases, gains, embeddings, and what an
    attention learns besides (lambda, alpha) are left.
    """
    matrices = {m.weight for m in network.modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in network.parameters():
        if parameter.requires_grad:
            groups[parameter in matrices].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": config.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=config.lr, betas=config.betas, fused=True,
    )  # fmt: skip


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of 0-based optimizer step `step`: linear warm-up, then constant or a cosine to zero."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return config.lr * warmup
    return config.lr * warmup * 0.5 * (1 + math.cos(math.pi * step / config.steps))
