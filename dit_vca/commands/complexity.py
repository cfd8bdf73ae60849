"""dit-vca complexity: parameters and multiply-accumulates beside the VCA paper's; --scale: cost against the number of tokens."""

import json
from collections.abc import Sequence

from .cli import make_parser, parse


def build_parser():
    """The command's options."""
    parser = make_parser(
        "complexity",
        "Parameters and multiply-accumulates of every generation row of the VCA paper's Tables 2, 3 and 4, or of presets; "
        "products of matrices and convolutions count, of one image.",
    )
    parser.add_argument("presets", type=str, nargs="*", default=[], help="presets such as dit-xl2-vca; default: the paper's rows")
    parser.add_argument("--json", type=bool, default=False, help="print a list of objects instead of a table")
    parser.add_argument(
        "--scale", type=bool, default=False, help="instead: operations, activation memory and time of one module against tokens"
    )
    parser.add_argument("--attention", type=str | None, default=None, help="with --scale: kinds, as softmax,vca; default: all")
    parser.add_argument("--tokens", type=str | None, default=None, help="with --scale: squares; default: 256,1024,4096")
    parser.add_argument(
        "--rounds", type=int | None, default=None, help="with --scale: timed rounds (5), of which the median counts"
    )
    parser.add_argument("--device", type=str, default="auto", help="with --scale: auto, cpu, cuda, mps")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table."""
    arguments = parse(build_parser(), argv)
    from ..attention import ATTENTION
    from ..complexity import as_json, check_scale, complexity_of, paper_rows, scale, scale_table, table
    from ..presets import preset
    from ..processes import start_processes

    of_scale = [name for name in ("attention", "tokens", "rounds") if arguments[name] is not None]
    if of_scale and not arguments.scale:
        raise ValueError(f"--{of_scale[0]} is of --scale true: give that too, or leave it out")
    if arguments.scale and arguments.presets:
        raise ValueError(f"--scale is of single modules and takes no preset, got {arguments.presets[0]}")
    if arguments.scale:
        names = arguments.attention.split(",") if arguments.attention else list(ATTENTION)
        tokens = _numbers(arguments.tokens or "256,1024,4096")
        rounds = 5 if arguments.rounds is None else arguments.rounds
        check_scale(names, tokens)
        if rounds < 1:
            raise ValueError(f"--rounds must be at least 1, got {rounds}")
        found = scale(names, tokens, rounds=rounds, device=start_processes(arguments.device).device.type)
        print(json.dumps(as_json(found), indent=1) if arguments.json else scale_table(found))
        return
    rows = [complexity_of(preset(name), name) for name in arguments.presets] or paper_rows()
    print(json.dumps(as_json(rows), indent=1) if arguments.json else table(rows))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--tokens must be a list like 256,1024, got {text!r}") from None
