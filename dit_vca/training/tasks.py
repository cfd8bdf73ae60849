"""A task is a module that turns a batch into named losses; the loop knows nothing else of what is trained."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samplers.noise import normal, uniform

from ..config import LatentConfig
from ..objectives import Objective
from ..vae import latent_from_stored


class GenerationTask(nn.Module):
    """What DDP wraps: drops labels, samples the latent from its moments, and calls the objective's loss."""

    def __init__(self, network: nn.Module, objective: Objective, latent: LatentConfig, *, label_dropout: float, seed: int):
        super().__init__()
        self.network = network
        self.objective = objective
        self.latent = latent
        self.label_dropout = label_dropout if network.null_class is not None else 0.0
        self.seed = seed

    def draw(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """All randomness of a batch, on the host: each row a function of (seed, purpose, position)."""
        shape = (self.latent.channels, self.latent.size, self.latent.size)
        return {
            "t": self.objective.sample_t(uniform(self.seed, "t", positions)),
            "eps": normal(self.seed, "eps", positions, shape),
            "latent_noise": normal(self.seed, "latent", positions, shape),
            "drop": uniform(self.seed, "label_drop", positions) < self.label_dropout,
        }

    def forward(self, stored: Tensor, y: Tensor, draws: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stored rows and labels (B,) -> loss terms, each (B,) float32."""
        if self.label_dropout:
            y = torch.where(draws["drop"], self.network.null_class, y)
        x_0 = latent_from_stored(stored, draws["latent_noise"], self.latent)
        return self.objective.loss(self.network, x_0, y, t=draws["t"], eps=draws["eps"])
