"""The Python API: what the commands themselves call, under three names. Heavy modules are imported when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import Config

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .objectives import Objective
    from .runs import RunFolder
    from .vae import Codec


@dataclass(frozen=True)
class Model:
    """A trained model: network, objective, the codec that makes images of its latents, and the config it was trained with."""

    network: torch.nn.Module
    objective: Objective
    codec: Codec
    config: Config

    @property
    def class_names(self) -> list[str]:
        """The classes in the order of their labels; empty for an unconditional model."""
        return list(self.config.data.class_names or [])

    def sample(self, labels: Sequence[int | str], *, seed: int = 0, tile: int = 64, **settings: Any) -> torch.Tensor:
        """Images uint8 (len(labels), S, S, 3), on the host; image i is a function of (seed, i, labels[i], settings).

        labels: numbers or names of classes; for an unconditional model only their count matters. settings: fields of
        SampleConfig (sampler, num_steps, guidance, interval, ...), by default the model's own. ValueError for settings
        or labels this model does not have.
        """
        import torch

        from .sampling import check_sampling, generate, label_number, with_settings

        try:
            config = with_settings(self.config.sample, settings)
        except TypeError as error:
            raise ValueError(f"unknown sampling setting ({error}); there is {', '.join(vars(self.config.sample))}") from None
        check_sampling(config, self.objective, self.config.model)
        names = self.class_names
        y = torch.tensor([label_number(label, names) if names else 0 for label in labels])
        return torch.cat(list(generate(self.network, self.objective, self.codec, config, labels=y, seed=seed, tile=tile)))


def load(ref: str | Path, *, weights: str = "ema", vae: str | None = None, device: str = "cpu") -> Model:
    """A model from a run folder, a checkpoint folder, or a .safetensors weight file.

    weights: "ema" or "model". vae: where the VAE is now, if it has moved. ValueError says what is missing or damaged.
    """
    from .runs import open_model
    from .vae import codec_of

    network, objective, found = open_model(ref, weights)
    codec = codec_of(found.config.data.latent, device, vae=vae)
    return Model(network.to(device), objective, codec, found.config)


def train(config: Config | str, run: str | Path | None = None, *, allow_change: bool = False) -> RunFolder:
    """Train a config, or a preset by name, in the folder `run` (default: a new numbered one under runs/), and return it.

    In a folder that holds a run, go on with it; `allow_change` permits another learning rate, batch size and the like.
    """
    from .presets import preset
    from .training import train as run_training

    return run_training(preset(config) if isinstance(config, str) else config, run, allow_change=allow_change)


def score(
    images: str | Path | np.ndarray,
    ref: str | Path | np.ndarray | None,
    *,
    metrics: Sequence[str] = ("fid", "is"),
    **options: Any,
) -> dict[str, Any]:
    """The report of `eval_fid.py`; report["metrics"] maps "fid@N", "is@N", "fd-lite0@N" to numbers.

    images, ref: an npz, a folder, a data set (fashion-mnist:test), or uint8 (N, S, S, 3); ref may hold statistics.
    options: num, image_size, weights ({protocol: weight file}), batch, device, allow_lossy, allow_duplicates.
    """
    from .evaluation.score import score as run_scoring

    return run_scoring(images, ref, metrics=metrics, **options)
