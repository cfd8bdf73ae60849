"""dit-vca export: a model of this project -> DiT's state dict, or a folder in diffusers' format."""

from collections.abc import Sequence
from typing import Literal

from .cli import make_parser, parse


def build_parser():
    """The command's options."""
    parser = make_parser("export", "Write a softmax model in the form of DiT or of diffusers; docs/weights.md has the forms.")
    parser.add_argument("ref", type=str, help="a run folder, a checkpoint folder, or a .safetensors weight file")
    parser.add_argument("out", type=str, help="the file (dit) or folder (diffusers) to write; it must not exist")
    parser.add_argument("--to", type=Literal["dit", "diffusers"], required=True, help="dit, or diffusers")
    parser.add_argument("--weights", type=str, default="ema", help="ema, model, or another average of the run (ema-0.999)")
    parser.add_argument(
        "--allow-time-mismatch",
        type=bool,
        default=False,
        help="write a model whose time embedding the target's code computes otherwise; the difference is measured",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Export a model and say what its readers should know."""
    arguments = parse(build_parser(), argv)
    from ..pretrained import export_weights

    lines = export_weights(
        arguments.ref, arguments.out, to=arguments.to, weights=arguments.weights,
        allow_time_mismatch=arguments.allow_time_mismatch,
    )  # fmt: skip
    print("\n".join(lines))
