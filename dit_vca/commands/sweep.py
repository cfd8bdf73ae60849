"""dit-vca sweep: a grid of sampling settings -> a score for each point, a table and plots."""

from collections.abc import Sequence
from pathlib import Path

from .cli import make_parser, parse
from .score import add_weight_files, weight_files


def build_parser():
    """The command's options; a list is written with commas."""
    parser = make_parser(
        "sweep", "Sample and score a model at every combination of settings; a killed sweep is continued by the same command."
    )
    parser.add_argument("--ckpt", type=str, required=True, help="a run folder, a checkpoint folder, or a .safetensors file")
    parser.add_argument("--out", type=str, required=True, help="folder of the points, the table and the plots")
    parser.add_argument("--ref", type=str | None, default=None, help="the reference, as for score")
    parser.add_argument("--metrics", type=str, default="fid,is", help="as for score")
    parser.add_argument("--num", type=int, default=10_000, help="images at each point")
    parser.add_argument("--guidance", type=str, default="", help="scales, as 1,1.5,2; default: the model's own")
    parser.add_argument("--sampler", type=str, default="", help="samplers, as euler,heun")
    parser.add_argument("--num_steps", type=str, default="", help="numbers of steps, as 10,25,50")
    parser.add_argument("--weights", type=str, default="", help="kinds of weights: ema,model,ema-0.999,ema-power-0.1 or so")
    parser.add_argument("--labels", type=str, default="balanced", help="as for sample")
    parser.add_argument("--seed", type=int, default=0, help="the same for all points")
    parser.add_argument("--tile", type=int, default=64, help="as for sample")
    parser.add_argument("--batch", type=int, default=64, help="as for sample")
    parser.add_argument("--vae", type=str | None, default=None, help="the VAE, if it has moved since training")
    parser.add_argument("--keep-images", type=bool, default=False, help="keep every point's images.npz")
    add_weight_files(parser)
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, mps")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Sweep a grid and print its table."""
    arguments = parse(build_parser(), argv)
    from accelerate import PartialState

    from ..sweeps import sweep, table_markdown

    kinds = {"guidance": float, "sampler": str, "num_steps": int, "weights": str}
    grid = {name: _values(name, arguments[name], kind) for name, kind in kinds.items() if arguments[name]}
    points = sweep(
        arguments.ckpt, Path(arguments.out), grid=grid, num=arguments.num, ref=arguments.ref,
        metrics=arguments.metrics.split(","), labels=arguments.labels, seed=arguments.seed, tile=arguments.tile,
        batch=arguments.batch, vae=arguments.vae, device=arguments.device, keep_images=arguments.keep_images,
        extractor_weights=weight_files(arguments),
    )  # fmt: skip
    if PartialState().is_main_process:
        print(table_markdown(points) + str(Path(arguments.out) / "table.md"))


def _values(name: str, text: str, kind: type) -> list:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} must be a list like 1,2,3 of {kind.__name__} values, got {text!r}") from None
