"""Speed and memory of scoring: features against torch-fidelity, the Fréchet distance of 2048 features, memory by images.

    python -m benchmarks.evaluation --images 1000 --rounds 3

In a round both extract the features of the same images with the same extractor (Lite0, same batch, same threads) and
compute the distance of two sets; the order alternates. Figures are medians over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch_fidelity

from benchmarks.machine import OneLineParser, machine, own_peak_memory
from dit_vca.data.images import open_images
from dit_vca.evaluation import DEFAULT_BATCH
from dit_vca.evaluation.score import score
from dit_vca.evaluation.statistics import FeatureStatistics, StreamingStatistics, frechet_distance
from dit_vca.files import available_cores, write_text


class Images(torch.utils.data.Dataset):
    """Images as torch-fidelity takes them."""

    def __init__(self, images: np.ndarray):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.images[index]).permute(2, 0, 1)


def compare_with_torch_fidelity(num: int, rounds: int) -> dict:
    """Images per second of a whole scoring, ours and torch-fidelity's, of two sets of `num` images."""
    real = open_images("fashion-mnist", None).arrays
    one, other = real[:num], real[num : 2 * num]

    def ours() -> float:
        with tempfile.TemporaryDirectory() as cache:  # nothing is found in a cache
            os.environ["XDG_CACHE_HOME"] = cache
            return score(one, other, metrics=["fd-lite0"], device="cpu")["metrics"][f"fd-lite0@{num}"]

    def theirs() -> float:
        return torch_fidelity.calculate_metrics(
            input1=Images(one), input2=Images(other), fid=True, feature_extractor="fd-lite0", feature_layer_fid="1280",
            batch_size=DEFAULT_BATCH, cuda=False, cache=False, verbose=False,
        )["frechet_inception_distance"]  # fmt: skip

    seconds: dict[str, list[float]] = {"dit-vca": [], "torch-fidelity": []}
    values: dict[str, float] = {}
    both: list[tuple[str, Callable[[], float]]] = [("dit-vca", ours), ("torch-fidelity", theirs)]
    for i in range(rounds):
        for name, run in both[:: 1 if i % 2 == 0 else -1]:
            started = time.perf_counter()
            values[name] = run()
            seconds[name].append(time.perf_counter() - started)
    speed = {name: 2 * num / statistics.median(s) for name, s in seconds.items()}
    return {
        "images": 2 * num, "seconds": seconds, "images_per_s": speed, "values": values,
        "ratio": speed["dit-vca"] / speed["torch-fidelity"],
    }  # fmt: skip


def distance_of_inception_features(num: int) -> dict:
    """Seconds of the sums of `num` feature vectors of 2048, and of one Fréchet distance."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(64, 2048, generator=generator)
    stream = StreamingStatistics(2048)
    started = time.perf_counter()
    for start in range(0, num, 64):
        stream.add(batch[: num - start] + start / num)  # new numbers for every batch, at the price of an addition
    found = stream.result()
    sums = time.perf_counter() - started
    started = time.perf_counter()
    other = FeatureStatistics(torch.zeros(2048).double(), torch.diag(torch.rand(2048, generator=generator).double()), None)
    frechet_distance(found, other)
    return {"images": num, "seconds_of_sums": sums, "seconds_of_distance": time.perf_counter() - started}


def peak_of_scoring(num: int) -> int:
    """Bytes at the peak of a fresh process that scores an npz of `num` images of 32 x 32 pixels."""
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        np.savez(Path(folder) / "images.npz", arr_0=rng.integers(0, 256, (num, 32, 32, 3), dtype=np.uint8))
        np.savez(Path(folder) / "ref.npz", fd_lite0_mu=np.zeros(1280), fd_lite0_sigma=np.eye(1280))
        command = [sys.executable, "-m", "benchmarks.evaluation", "--peak-of", folder]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": folder}
        return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout.split()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m benchmarks.evaluation", description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1000, help="images of each of the two sets")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vectors", type=int, default=50_000, help="feature vectors that are summed")
    parser.add_argument("--memory", type=int, nargs="*", default=[2000, 20_000], help="numbers of images whose peak is measured")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/evaluation.json"))
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    if given.peak_of:
        score(f"{given.peak_of}/images.npz", f"{given.peak_of}/ref.npz", metrics=["fd-lite0"], device="cpu")
        print(own_peak_memory("cpu"))
        return
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine("cpu"),
        "versions": {name: version(name) for name in ("torch", "torch-fidelity", "timm", "numpy")},
        "threads": given.threads,
        "torch-fidelity": compare_with_torch_fidelity(given.images, given.rounds),
        "distance": distance_of_inception_features(given.vectors),
        "peak_bytes": {str(num): peak_of_scoring(num) for num in given.memory},
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(given.out, json.dumps(record, indent=1) + "\n")
    speed, distance = record["torch-fidelity"], record["distance"]
    for name, value in speed["images_per_s"].items():
        print(f"{name:15}{value:8.1f} images/s")
    print(f"dit-vca / torch-fidelity: {speed['ratio']:.3f}")
    print(
        f"sums of {distance['images']} x 2048: {distance['seconds_of_sums']:.1f} s; distance: {distance['seconds_of_distance']:.1f} s"
    )
    for num, peak in record["peak_bytes"].items():
        print(f"peak at {num} images: {peak / 2**20:.0f} MiB")
    print(given.out)


if __name__ == "__main__":
    main()
