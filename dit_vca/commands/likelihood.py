"""dit-vca likelihood: bits per dimension of a flow model's data by the probability-flow ODE."""

import json
from collections.abc import Sequence
from pathlib import Path

from .cli import make_parser, parse


def build_parser():
    """The command's options."""
    parser = make_parser("likelihood", "Bits per dimension of a flow model's data, by its ODE and Hutchinson's estimate.")
    parser.add_argument("--ckpt", type=str, required=True, help="a run folder, a checkpoint folder, or a .safetensors file")
    parser.add_argument("--num", type=int, default=64, help="images of the data, chosen by the seed")
    parser.add_argument(
        "--data", type=str | None, default=None, help="other data than the run's: shards, or images as for training"
    )
    parser.add_argument("--probes", type=int, default=1, help="estimates of the divergence for each image")
    parser.add_argument("--num_steps", type=int, default=50, help="steps of Heun's method")
    parser.add_argument("--weights", type=str, default="ema", help="ema, model, or another average of the run (ema-0.999)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of images, of their noise and of the probes")
    parser.add_argument("--batch", type=int, default=16, help="images computed together")
    parser.add_argument("--out", type=str, default="likelihood.json", help="the report to write; it must not exist")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, mps")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write the report, and print its mean."""
    arguments = parse(build_parser(), argv)
    from ..files import check_new, write_text
    from ..likelihood import likelihood

    out = Path(arguments.out)
    check_new(out)
    report = likelihood(
        arguments.ckpt, num=arguments.num, data=arguments.data, probes=arguments.probes, num_steps=arguments.num_steps,
        weights=arguments.weights, seed=arguments.seed, batch=arguments.batch, device=arguments.device,
    )  # fmt: skip
    write_text(out, json.dumps(report, indent=1))
    error = "" if report["standard_error"] is None else f" +- {report['standard_error']:.4f}"
    print(f"{report['bits_per_dim']:.4f}{error} bits per dimension of {report['num']} images in {report['space']}; {out}")
