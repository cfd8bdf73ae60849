"""dit-vca sample: a run or a weight file -> images.npz, images.json, grid.png."""

from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import fields

from ..config import SampleConfig
from .cli import make_parser, parse


def build_parser():
    """The command's options; the sampling settings have the model's own values as defaults."""
    parser = make_parser("sample", "Sample images from a trained model; a killed run is continued by the same command.")
    parser.add_argument(
        "--ckpt", type=str, required=True, help="a run folder, a checkpoint folder, or a .safetensors weight file"
    )
    parser.add_argument("--num", type=int, default=1000, help="number of images")
    parser.add_argument(
        "--labels",
        type=str,
        default="balanced",
        help="balanced, random, or class names or numbers separated by commas, which are taken in turn",
    )
    parser.add_argument("--seed", type=int, default=0, help="image i is a function of (seed, i, label, sampler)")
    parser.add_argument("--weights", type=str, default="ema", help="ema, model, or another average of the run (ema-0.999)")
    parser.add_argument(
        "--tile", type=int, default=64, help="images computed together; recorded, because the last bits depend on it"
    )
    parser.add_argument(
        "--batch", type=int, default=64, help="images between two progress updates, rounded up to tiles; changes no byte"
    )
    parser.add_argument("--out", type=str | None, default=None, help="folder to write; default: in the run's samples/")
    parser.add_argument("--vae", type=str | None, default=None, help="the VAE, if it has moved since training")
    parser.add_argument(
        "--guide",
        type=str | None,
        default=None,
        help="a worse model to guide away from (autoguidance), instead of the null class",
    )
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, mps")
    for field in fields(SampleConfig):
        parser.add_argument(
            f"--{field.name}", type=field.type, default=SUPPRESS, help="as in training's --sample; default: the model's own"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Sample images; a killed run is continued by the same command. Any number of processes gives the same bytes."""
    arguments = parse(build_parser(), argv)
    from ..sampling import sample_to_folder

    given = {f.name: arguments[f.name] for f in fields(SampleConfig) if f.name in arguments}
    folder = sample_to_folder(
        arguments.ckpt, num=arguments.num, labels=arguments.labels, seed=arguments.seed, weights=arguments.weights,
        tile=arguments.tile, batch=arguments.batch, out=arguments.out, vae=arguments.vae, device=arguments.device,
        settings=given, guide=arguments.guide,
    )  # fmt: skip
    print(folder / "images.npz")
