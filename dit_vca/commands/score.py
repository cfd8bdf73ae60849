"""dit-vca score: images + reference -> metrics.json; `score ref` writes a reference."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..evaluation import DEFAULT_BATCH
from .cli import make_parser, parse
from .encode import pick_device


def main(argv: Sequence[str] | None = None) -> None:
    """Score images against a reference, or write one."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["ref"]:
        write_ref(argv[1:])
    else:
        score_images(argv)


def build_parser():
    """The options of scoring."""
    parser = _parser("score", "Score images against a reference; `score ref` writes a reference.")
    parser.add_argument("images", type=str, help="an npz (arr_0, uint8, NHWC), a folder, or a data set (fashion-mnist:test)")
    parser.add_argument(
        "--ref", type=str | None, default=None, help="an npz with statistics (ADM's, or one made by ref), or images as above"
    )
    parser.add_argument("--out", type=str | None, default=None, help="the report; default: metrics.json beside the npz")
    return parser


def score_images(argv: Sequence[str]) -> None:
    arguments = parse(build_parser(), argv)
    from ..evaluation.score import score
    from ..files import write_text

    out = Path(arguments.out) if arguments.out else _beside(arguments.images)
    if out.parent != Path() and not out.parent.is_dir():
        raise ValueError(f"the folder of --out {out} does not exist")
    report = score(
        arguments.images, arguments.ref, metrics=arguments.metrics.split(","), num=arguments.num,
        image_size=arguments.image_size, inception_weights=arguments.inception_weights, batch=arguments.batch,
        device=pick_device(arguments.device),
    )  # fmt: skip
    write_text(out, json.dumps(report, indent=1))
    reference = report["reference"]["name"] if report["reference"] else "no reference"
    for key, value in report["metrics"].items():
        print(f"{key} {value:.4f} ({reference})")
    for warning in report["warnings"]:
        print(f"warning: {warning}")
    print(out)


def write_ref(argv: Sequence[str]) -> None:
    parser = _parser("score ref", "Write the statistics of a reference set to an npz.")
    parser.add_argument("data", type=str, help="an npz (arr_0, uint8, NHWC), a folder, or a data set (fashion-mnist)")
    parser.add_argument("out", type=str, help="the npz to write")
    arguments = parse(parser, argv)
    from ..evaluation.score import write_reference

    write_reference(
        arguments.data, Path(arguments.out), metrics=arguments.metrics.split(","), num=arguments.num,
        image_size=arguments.image_size, inception_weights=arguments.inception_weights, batch=arguments.batch,
        device=pick_device(arguments.device),
    )  # fmt: skip
    print(arguments.out)


def _parser(verb: str, description: str):
    parser = make_parser(verb, description)
    parser.add_argument(
        "--metrics",
        type=str,
        default="fid,is",
        help="of fid, is (both need torch-fidelity's weight file) and fd-lite0 (needs none)",
    )
    parser.add_argument("--num", type=int | None, default=None, help="score the first so many images; default all")
    parser.add_argument(
        "--image-size", type=int | None, default=None, help="crop of a folder's images; default: the samples' size"
    )
    parser.add_argument(
        "--inception-weights",
        type=str | None,
        default=None,
        help="torch-fidelity's weight file, if it is not in torch's hub cache",
    )
    parser.add_argument("--batch", type=int, default=DEFAULT_BATCH, help="images in one forward pass")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, mps")
    return parser


def _beside(images: str) -> Path:
    path = Path(images)
    return path.with_name("metrics.json") if path.is_file() else Path("metrics.json")
