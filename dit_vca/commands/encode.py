"""dit-vca encode: images -> latent shards."""

from collections.abc import Sequence
from pathlib import Path

from ..data.encode import encode
from ..data.prepare import open_source
from ..processes import start_processes
from .cli import make_parser, parse


def build_parser():
    """The command's options."""
    parser = make_parser("encode", "Encode images to latent shards; a killed run is continued by the same command.")
    parser.add_argument(
        "images", type=str, help="a folder (its sub-folders are the classes), fashion-mnist, or fashion-mnist-full"
    )
    parser.add_argument("shards", type=str, help="the folder to make")
    parser.add_argument(
        "--vae",
        type=str | None,
        default=None,
        help="none (pixels), embedded, a folder in diffusers' format, or a hub name; may be left out for the embedded data alone",
    )
    parser.add_argument(
        "--image-size", type=int | None, default=None, help="side of the square crop in pixels; needed for a folder"
    )
    parser.add_argument("--flip", type=bool, default=False, help="store the moments of mirrored images too")
    parser.add_argument(
        "--skip-bad", type=bool, default=False, help="leave out images that cannot be read, and list them in the manifest"
    )
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, mps")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Encode a folder of images, or a named data set, to a folder of shards; a killed run is continued."""
    arguments = parse(build_parser(), argv)
    device = start_processes(arguments.device).device
    source, codec = open_source(arguments.images, arguments.image_size, arguments.vae, device)
    manifest = encode(source, codec, Path(arguments.shards), flip=arguments.flip, skip_bad=arguments.skip_bad)
    classes = f"{len(manifest.class_names)} classes" if manifest.class_names else "no classes"
    left_out = f", {len(manifest.bad)} bad images left out" if manifest.bad else ""
    latent = manifest.latent
    print(
        f"{arguments.shards}: {manifest.num_images} images, {classes}, {latent.channels}x{latent.size}x{latent.size} latents{left_out}"
    )
