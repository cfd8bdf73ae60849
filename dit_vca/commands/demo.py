"""dit-vca demo: the whole way on real images, by the commands a user would type, each as a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..evaluation.gaussian import sample_class_gaussians
from ..files import write_text
from ..presets import preset
from ..runs import RunFolder, new_run_folder
from .cli import make_parser, parse

DATA = "fashion-mnist"
REFERENCE_IMAGES = 5000
HELD_OUT_IMAGES = 2000
ALLOWED_SHARE = 0.60  # of the distance between the Gaussian and the floor; docs/demo.md says why not less
ALLOWED_AGREEMENT = 0.80


def main(argv: Sequence[str] | None = None) -> None:
    """Encode, train, sample and score the embedded images, and report the scores beside simple ones."""
    parser = make_parser("demo", "Encode, train, sample and score the embedded Fashion-MNIST images on this machine.")
    parser.add_argument("--preset", type=str, default="demo", help="demo, demo-softmax, demo-ddpm, ...")
    parser.add_argument("--run", type=str | None, default=None, help="the run's folder; default: a new numbered one under runs/")
    parser.add_argument("--num", type=int, default=1000, help="images to sample")
    parser.add_argument("--train.steps", type=int | None, default=None, help="fewer optimizer steps, for a quick look")
    arguments = parse(parser, argv)
    preset(arguments.preset)  # a wrong name is told at once
    if not 2 <= arguments.num <= HELD_OUT_IMAGES:
        raise ValueError(f"--num must be from 2 to {HELD_OUT_IMAGES}, the number of held-out images, got {arguments.num}")
    run = RunFolder(Path(arguments.run)) if arguments.run else new_run_folder(Path("runs"), arguments.preset)
    if run.exists() and run.read_config().preset != arguments.preset:
        raise ValueError(
            f"{run.path} holds a run of preset {run.read_config().preset!r}: give it with --preset, or another --run"
        )
    run.path.mkdir(parents=True, exist_ok=True)
    Demo(run, arguments.preset, arguments.num, arguments.train.steps).go()


class Demo:
    """The steps of the demo and their results."""

    def __init__(self, run: RunFolder, preset_name: str, num: int, steps: int | None):
        self.run, self.preset, self.num, self.steps = run, preset_name, num, steps
        self.work = run.path.with_name(run.path.name + "-data")  # shards, references, and the images compared with
        self.work.mkdir(exist_ok=True)
        self.seconds: dict[str, float] = {}

    def go(self) -> None:
        shards, reference = self.work / "shards", self.work / "reference.npz"
        if not shards.exists():
            self._command("encode", "encode", DATA, shards)
        self._train(shards)
        samples = self._sample("sample", self.run.path, "samples")
        untrained = self._untrained(shards)
        gaussian = self._gaussian()
        if not reference.exists():
            self._command("score", "score", "ref", DATA, reference, "--num", REFERENCE_IMAGES, "--metrics", "fd-lite0")
        scored = {
            "floor": self._score(f"{DATA}:test", reference, "floor"),
            "samples": self._score(samples, reference, "samples"),
            "untrained": self._score(untrained, reference, "untrained"),
            "gaussian": self._score(gaussian, reference, "gaussian"),
        }
        self._report(samples, gaussian, scored)

    def _train(self, shards: Path) -> None:
        steps = [] if self.steps is None else ["--train.steps", self.steps]
        launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--quiet"]
        if _on_cpu():
            launch += [
                "--cpu",
                "--num_processes",
                "1",
                "--num_machines",
                "1",
                "--mixed_precision",
                "no",
                "--dynamo_backend",
                "no",
            ]
        options = ["--run", self.run.path, *steps]
        if not self.run.exists():
            options += ["--preset", self.preset, "--data.name", shards]
        self._run("train", [*launch, "-m", "dit_vca", "train", *options])

    def _untrained(self, shards: Path) -> Path:
        """A network of the same recipe at its initial weights."""
        folder = self.work / "untrained"
        if not RunFolder(folder).exists():
            self._command(
                "untrained", "train", "--preset", self.preset, "--run", folder, "--data.name", shards,
                "--train.steps", 0, "--train.tracker", "none",
            )  # fmt: skip
        return self._sample("untrained", folder, "untrained-images", "--guidance", 1)

    def _gaussian(self) -> Path:
        from ..data.images import open_images

        path = self.work / "gaussian.npz"
        source = open_images(DATA, None)
        wanted = np.arange(self.num) % len(source.class_names)
        np.savez(path, arr_0=sample_class_gaussians(source.arrays, source.labels, wanted, seed=0), arr_1=wanted)
        return path

    def _sample(self, step: str, ckpt: Path, name: str, *options) -> Path:
        out = self.work / name if name != "samples" else self.run.samples / f"demo-{self.num}"
        self._command(step, "sample", "--ckpt", ckpt, "--num", self.num, "--out", out, *options)
        return out / "images.npz"

    def _score(self, images, reference: Path, name: str) -> float:
        out = self.work / f"{name}.json"
        self._command("score", "score", images, "--ref", reference, "--metrics", "fd-lite0", "--num", self.num, "--out", out)
        return json.loads(out.read_text())["metrics"][f"fd-lite0@{self.num}"]

    def _report(self, samples: Path, gaussian: Path, scored: dict[str, float]) -> None:
        agreement = self._agreement(samples, gaussian)
        share = (scored["samples"] - scored["floor"]) / (scored["gaussian"] - scored["floor"])
        report = {
            "preset": self.preset, "num": self.num, "fd-lite0": scored, "share_of_gaussian": share,
            "class_agreement": agreement, "seconds": {k: round(v, 1) for k, v in self.seconds.items()},
        }  # fmt: skip
        write_text(self.run.path / "report.json", json.dumps(report, indent=1))
        text = _report_text(report)
        write_text(self.run.path / "report.md", text)
        print(text)
        print(f"images: {samples.parent / 'grid.png'}\nreport: {self.run.path / 'report.md'}")

    def _agreement(self, samples: Path, gaussian: Path) -> dict[str, float]:
        from ..evaluation.class_agreement import ClassAgreement
        from ..evaluation.features import open_extractor
        from ..evaluation.images import open_image_set
        from ..evaluation.score import features_of
        from ..processes import start_processes

        started = time.perf_counter()
        extractor = open_extractor("fd-lite0", start_processes().device)

        def features_and_labels(ref, num):
            images = open_image_set(ref, num=num)
            return features_of(images, extractor).numpy(), images.labels

        classifier = ClassAgreement(*features_and_labels(DATA, REFERENCE_IMAGES))
        result = {
            "held_out": classifier(*features_and_labels(f"{DATA}:test", None)),
            "samples": classifier(*features_and_labels(samples, None)),
            "gaussian": classifier(*features_and_labels(gaussian, None)),
        }
        self.seconds["class agreement"] = time.perf_counter() - started
        return result

    def _command(self, step: str, *arguments) -> None:
        self._run(step, [sys.executable, "-m", "dit_vca", *arguments])

    def _run(self, step: str, command: list) -> None:
        command = [str(part) for part in command]
        print("$ " + " ".join(["dit-vca", *command[3:]] if command[2] == "dit_vca" else ["accelerate", *command[3:]]), flush=True)
        started = time.perf_counter()
        code = _wait_for(subprocess.Popen(command, env=_environment(), start_new_session=True))
        if code:
            raise SystemExit(code if code > 0 else 128 - code)  # the command has said why
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - started


def _wait_for(child: subprocess.Popen) -> int:
    """Its exit code. A signal that ends this process is passed on to all of the child's, which save what they have."""
    try:
        return child.wait()
    except (KeyboardInterrupt, SystemExit) as stop:
        number = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number) if os.name == "posix" else child.send_signal(number)
        child.wait()
        raise


def _on_cpu() -> bool:
    from ..processes import without_accelerator

    return without_accelerator()


def _environment() -> dict[str, str]:
    """The children find this package where this process found it, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": root + (os.pathsep + path if path else "")}


def _report_text(report: dict) -> str:
    scored, agreement, num = report["fd-lite0"], report["class_agreement"], report["num"]
    within = "within" if report["share_of_gaussian"] <= ALLOWED_SHARE else "not within"
    reached = "reached" if agreement["samples"] >= ALLOWED_AGREEMENT else "not reached"
    rows = [
        (f"{num} held-out images (the floor)", scored["floor"], agreement["held_out"]),
        ("samples", scored["samples"], agreement["samples"]),
        ("a Gaussian of pixels per class", scored["gaussian"], agreement["gaussian"]),
        ("the untrained model", scored["untrained"], None),
    ]
    table = "\n".join(f"| {name:36} | {fd:9.1f} | {'' if a is None else format(a, '.3f'):>15} |" for name, fd, a in rows)
    seconds = ", ".join(f"{step} {s:.0f} s" for step, s in report["seconds"].items())
    return f"""
# {report["preset"]}: {num} images against the first {REFERENCE_IMAGES} training images

| images                               |  fd-lite0 | class agreement |
|--------------------------------------|-----------|-----------------|
{table}

The samples are at {report["share_of_gaussian"]:.2f} of the way from the floor to the Gaussian ({within} {ALLOWED_SHARE}).
The class asked for is found in {agreement["samples"]:.3f} of them ({reached}: {ALLOWED_AGREEMENT:.2f}); the classifier is right
on {agreement["held_out"]:.3f} of 2,000 held-out images. Time: {seconds}.
"""
