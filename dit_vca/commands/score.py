"""dit-vca score: images + reference -> metrics.json; `score ref` writes a reference, `compare` tabulates reports, `selftest` checks."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..evaluation import DEFAULT_BATCH
from ..evaluation.protocols import LITE0, WEIGHT_FILES
from .cli import make_parser, parse


def main(argv: Sequence[str] | None = None) -> None:
    """Score images against a reference, write one, compare reports, or check this machine."""
    argv = list(sys.argv[1:] if argv is None else argv)
    verbs = {"ref": write_ref, "compare": compare_reports, "selftest": check_machine}
    verb = verbs.get(argv[0]) if argv else None
    if verb is None:
        score_images(argv)
    else:
        verb(argv[1:])


def build_parser():
    """The options of scoring."""
    parser = _parser(
        "score",
        "Score images against a reference. `score ref` writes a reference, `score compare` makes a table of several reports, "
        "`score selftest` checks the extractors on this machine.",
    )
    parser.add_argument("images", type=str, help="an npz (arr_0, uint8, NHWC), a folder, or a data set (fashion-mnist:test)")
    parser.add_argument(
        "--ref", type=str | None, default=None, help="an npz with statistics (ADM's, or one made by ref), or images as above"
    )
    parser.add_argument("--out", type=str | None, default=None, help="the report; default: metrics.json beside the npz")
    parser.add_argument(
        "--allow-duplicates", type=bool, default=False, help="score although over 0.1 %% of the images are copies"
    )
    return parser


def score_images(argv: Sequence[str]) -> None:
    arguments = parse(build_parser(), argv)
    from accelerate import PartialState

    from ..evaluation.score import score
    from ..files import write_text

    out = Path(arguments.out) if arguments.out else _beside(arguments.images)
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out {out} must name a file in a folder that exists")
    report = score(
        arguments.images, arguments.ref, metrics=arguments.metrics.split(","), allow_duplicates=arguments.allow_duplicates,
        **_common(arguments),
    )  # fmt: skip
    if not PartialState().is_main_process:
        return
    write_text(out, json.dumps(report, indent=1))
    reference = report["reference"]["name"] if report["reference"] else "no reference"
    for key, value in report["metrics"].items():
        print(f"{key} {value:.6g} ({reference})")
    for warning in report["warnings"]:
        print(f"warning: {warning}")
    print(out)


def write_ref(argv: Sequence[str]) -> None:
    parser = _parser("score ref", "Write what metrics need of a reference set to an npz.")
    parser.add_argument("data", type=str, help="an npz (arr_0, uint8, NHWC), a folder, or a data set (fashion-mnist)")
    parser.add_argument("out", type=str, help="the npz to write")
    arguments = parse(parser, argv)
    from accelerate import PartialState

    from ..evaluation.score import make_reference

    make_reference(arguments.data, Path(arguments.out), metrics=arguments.metrics.split(","), **_common(arguments))
    if PartialState().is_main_process:
        print(arguments.out)


def compare_reports(argv: Sequence[str]) -> None:
    from ..evaluation.compare import FORMATS, compare

    parser = make_parser("score compare", "Mean, standard deviation, smallest and all values of several reports of one protocol.")
    parser.add_argument("reports", type=str, nargs="+", help="metrics.json files, say of several seeds")
    parser.add_argument("--format", type=str, default="markdown", help=", ".join(FORMATS))
    arguments = parse(parser, argv)
    if arguments.format not in FORMATS:
        raise ValueError(f"--format must be one of {', '.join(FORMATS)}, got {arguments.format!r}")
    print(FORMATS[arguments.format](compare([Path(report) for report in arguments.reports])))


def check_machine(argv: Sequence[str]) -> None:
    parser = make_parser("score selftest", "Compare an extractor's features on this machine with recorded ones.")
    parser.add_argument(
        "--protocol",
        type=str,
        default="fd-lite0",
        help="fd-lite0; inception-v3-compat, dinov2-edm2, clip-cmmd need a weight file",
    )
    _add_machine(parser)
    arguments = parse(parser, argv)
    from ..evaluation.features import open_extractor
    from ..evaluation.selftest import TOLERANCE, selftest
    from ..processes import start_processes

    if arguments.protocol not in (LITE0, *WEIGHT_FILES):
        raise ValueError(f"--protocol must be one of {', '.join((LITE0, *WEIGHT_FILES))}, got {arguments.protocol!r}")
    device = start_processes(arguments.device).device
    extractor = open_extractor(arguments.protocol, device, weights=weight_files(arguments))
    found = selftest(extractor)
    golden = "no values are recorded" if found.golden is None else f"{found.golden:.1e} from the recorded values"
    print(f"{arguments.protocol} on {device}, weights {extractor.weights_sha256[:8]}...: {golden}")
    print(f"one by one and together: {found.batch:.1e} apart; allowed {TOLERANCE:.0e}; {found.images_per_second:.0f} images/s")
    if not found.passed:
        raise ValueError("the features of this machine are not within what is allowed: do not compare its scores with others")


def _common(arguments) -> dict:
    """The options that scoring and the making of a reference share, for the Python functions."""
    names = ("num", "image_size", "batch", "device", "allow_lossy")
    return {name: arguments[name] for name in names} | {"weights": weight_files(arguments)}


def _parser(verb: str, description: str):
    parser = make_parser(verb, description)
    parser.add_argument(
        "--metrics",
        type=str,
        default="fid,is",
        help="of fid, sfid, is, pr (precision and recall), kid, fid-infinity (all need torch-fidelity's weight file), "
        "fd-dinov2, cmmd (a weight file each), fd-lite0, pr-lite0, kid-lite0 and fd-lite0-infinity (need none)",
    )
    parser.add_argument("--num", type=int | None, default=None, help="score the first so many images; default all")
    parser.add_argument("--image-size", type=int | None, default=None, help="crop a folder's images to this size as for training")
    parser.add_argument("--allow-lossy", type=bool, default=False, help="take a folder of JPEG or WebP files as they are")
    parser.add_argument("--batch", type=int, default=DEFAULT_BATCH, help="images in one forward pass")
    _add_machine(parser)
    return parser


def _add_machine(parser) -> None:
    add_weight_files(parser)
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, mps")


def add_weight_files(parser) -> None:
    """One option for each extractor whose weights the user supplies."""
    for protocol, file in WEIGHT_FILES.items():
        parser.add_argument(
            file.option, type=str | None, default=None, help=f"weights of {protocol}, if {file.name} is not in torch's hub cache"
        )


def weight_files(arguments) -> dict[str, str]:
    """The files given, by protocol."""
    given = {p: arguments[file.option.removeprefix("--").replace("-", "_")] for p, file in WEIGHT_FILES.items()}
    return {protocol: path for protocol, path in given.items() if path}


def _beside(images: str) -> Path:
    path = Path(images)
    return path.with_name("metrics.json") if path.is_file() else Path("metrics.json")
