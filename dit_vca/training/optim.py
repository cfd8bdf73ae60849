"""The optimizer and its schedule."""

import math

import torch
from torch import nn

from ..config import TrainConfig


def build_optimizer(network: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters: it takes a non-finite flag from the device without a sync."""
    trainable = [p for p in network.parameters() if p.requires_grad]
    return torch.optim.AdamW(trainable, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of 0-based optimizer step `step`: linear warm-up, then constant or a cosine to zero."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return config.lr * warmup
    return config.lr * warmup * 0.5 * (1 + math.cos(math.pi * step / config.steps))
