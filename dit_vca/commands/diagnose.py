"""dit-vca diagnose: a model's attentions on noised images -> figures of every layer in diagnose.json, plots, pictures of maps."""

from collections.abc import Sequence

from .cli import make_parser, parse


def build_parser():
    """The command's options."""
    parser = make_parser("diagnose", "Measure what the streams of a model's attentions are to each other, beside null values.")
    parser.add_argument("--ckpt", type=str, required=True, help="a run folder, a checkpoint folder, or a .safetensors file")
    parser.add_argument("--out", type=str, required=True, help="the folder to write; it must not exist")
    parser.add_argument("--num", type=int, default=32, help="images of the data, chosen by the seed")
    parser.add_argument(
        "--times", type=list[float], default=[0.1, 0.3, 0.5, 0.7, 0.9], help="from 0 (data) to 1 (noise), as [0.1,0.9]"
    )
    parser.add_argument(
        "--data", type=str | None, default=None, help="other data than the run's: shards, or images as for training"
    )
    parser.add_argument("--labels", type=str, default="own", help="own, or null: without a class")
    parser.add_argument("--weights", type=str, default="ema", help="ema, model, or another average of the run (ema-0.999)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of images and of their noise")
    parser.add_argument("--k", type=int, default=10, help="singular vectors looked at for intruder dimensions")
    parser.add_argument("--eps", type=float, default=0.5, help="an intruder's largest cosine")
    parser.add_argument("--against", type=str, default="top", help="the other branch's singular vectors: top (k), or all")
    parser.add_argument("--pictures", type=int, default=2, help="images whose maps are drawn")
    parser.add_argument("--batch", type=int, default=4, help="images in one forward pass")
    parser.add_argument("--vae", type=str | None, default=None, help="the VAE, if it has moved since training; for the pictures")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, mps")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Diagnose a model and say where the figures are."""
    arguments = parse(build_parser(), argv)
    from pathlib import Path

    from ..diagnostics import diagnose

    out = Path(arguments.out)
    diagnose(
        arguments.ckpt, out, num=arguments.num, times=arguments.times, data=arguments.data, labels=arguments.labels,
        weights=arguments.weights, seed=arguments.seed, k=arguments.k, eps=arguments.eps, against=arguments.against,
        pictures=arguments.pictures, batch=arguments.batch, vae=arguments.vae, device=arguments.device,
    )  # fmt: skip
    print(out / "diagnose.json")
