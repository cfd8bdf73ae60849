"""The simplest generator there is, to compare with: a Gaussian of pixels for each class."""

import numpy as np

from samplers.noise import keyed_generator


def sample_class_gaussians(images: np.ndarray, labels: np.ndarray, wanted: np.ndarray, *, seed: int) -> np.ndarray:
    """uint8 (len(wanted), S, S, 3): image i is drawn from N(mean, covariance) of the pixels of class wanted[i].

    Fitted to `images` (N, S, S, 3) with `labels` (N,); rounded and clipped to 0..255. Draw i is a function of (seed, i).
    """
    out = np.empty((len(wanted), *images.shape[1:]), dtype=np.uint8)
    for label in np.unique(wanted):
        pixels = images[labels == label].reshape(int((labels == label).sum()), -1).astype(np.float64)
        mean = pixels.mean(0)
        centred = (pixels - mean) / np.sqrt(len(pixels) - 1)  # (n, D): covariance = centred' centred
        for i in np.flatnonzero(wanted == label):
            z = keyed_generator(seed, "reference", int(i)).standard_normal(len(pixels))
            out[i] = np.clip(np.rint(mean + z @ centred), 0, 255).reshape(images.shape[1:])
    return out
