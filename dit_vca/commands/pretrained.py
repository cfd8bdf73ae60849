"""dit-vca pretrained: another project's weights -> a weight file of this project."""

from collections.abc import Sequence
from typing import Literal

from .cli import make_parser, parse


def build_parser():
    """The command's options."""
    parser = make_parser("pretrained", "Read weights of DiT, SiT, fast-DiT, REPA or diffusers; docs/weights.md has the forms.")
    parser.add_argument(
        "ref",
        type=str,
        help="a .pt or .safetensors file, a folder in diffusers' format, or DiT-XL/2-256, DiT-XL/2-512 (downloaded)",
    )
    parser.add_argument("out", type=str, help="the .safetensors file to write; it must not exist")
    parser.add_argument(
        "--objective",
        type=Literal["ddpm", "flow"] | None,
        default=None,
        help="ddpm (DiT) or flow (SiT), where the file does not tell: their tensors are the same",
    )
    parser.add_argument(
        "--num_heads", type=int | None, default=None, help="where neither the file nor the table of known widths tells"
    )
    parser.add_argument("--weights", type=Literal["ema", "model"], default="ema", help="which weights of a training checkpoint")
    parser.add_argument(
        "--vae",
        type=str | None,
        default=None,
        help="a hub name, a folder in diffusers' format, embedded, or none (pixels); default: stabilityai/sd-vae-ft-ema",
    )
    parser.add_argument(
        "--time_freqs",
        type=Literal["dit", "diffusers"] | None,
        default=None,
        help="frequencies of the time embedding; default: diffusers for its folders but facebook/DiT's, dit for all else",
    )
    parser.add_argument("--source", type=str | None, default=None, help="recorded in the file; default: where it was read from")
    parser.add_argument("--license", type=str | None, default=None, help="recorded in the file, and in what is made with it")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Read another project's weights and say what they are."""
    arguments = parse(build_parser(), argv)
    from ..pretrained import import_weights

    lines = import_weights(
        arguments.ref, arguments.out, objective=arguments.objective, num_heads=arguments.num_heads, weights=arguments.weights,
        vae=arguments.vae, time_freqs=arguments.time_freqs, source=arguments.source, license=arguments.license,
    )  # fmt: skip
    print("\n".join(lines))
