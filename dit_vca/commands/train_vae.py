"""dit-vca train-vae: a small autoencoder for small images, in diffusers' folder format."""

from collections.abc import Sequence
from pathlib import Path

from ..data.images import NAMED, open_images
from .cli import make_parser, parse


def main(argv: Sequence[str] | None = None) -> None:
    """Train a small AutoencoderKL; the embedded one is `dit-vca train-vae fashion-mnist FOLDER` with the defaults."""
    parser = make_parser("train-vae", "Train a small AutoencoderKL (latents of half the side, 4 channels) on the CPU.")
    parser.add_argument("images", type=str, help="fashion-mnist, fashion-mnist-full, or a folder of images")
    parser.add_argument("folder", type=str, help="the folder to make, in diffusers' format")
    parser.add_argument(
        "--image-size", type=int | None, default=None, help="side of the square crop in pixels; needed for a folder"
    )
    parser.add_argument("--steps", type=int, default=900, help="optimizer steps of 64 images")
    parser.add_argument("--kl-weight", type=float, default=5e-3, help="weight of the KL term, per latent element")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parse(parser, argv)
    folder = Path(arguments.folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already: choose another folder, or remove it")
    if arguments.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {arguments.steps}")
    from ..processes import start_processes
    from ..training.autoencoder import reconstruction_psnr, save_autoencoder, train_autoencoder

    start_processes("cpu")
    source = open_images(arguments.images, arguments.image_size)
    if source.image_size % 2:
        raise ValueError(f"--image-size must be even, for latents of half the side, got {source.image_size}")
    if arguments.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {arguments.seed}")
    vae = train_autoencoder(source, steps=arguments.steps, kl_weight=arguments.kl_weight, seed=arguments.seed)
    held_out = open_images(arguments.images, None, split="test") if arguments.images in NAMED else source
    psnr = reconstruction_psnr(vae, held_out)
    save_autoencoder(vae, folder)
    print(
        f"{folder}: PSNR {psnr:.2f} dB on {len(held_out)} images of {held_out.name}, scaling_factor {vae.config.scaling_factor}"
    )
