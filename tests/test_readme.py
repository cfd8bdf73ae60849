"""The README's commands, run as they are written but small; and what the documents refer to exists."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from made import ROOT, environment, make_images

TEXT = (ROOT / "README.md").read_text()
SMALL = {
    "train_gen.py": "--model.dim 16 --model.depth 1 --model.num_heads 2 --train.steps 2 --train.batch_size 4 --train.tracker none "
    "--sample.num_steps 2",
    "sample.py": "--tile 6 --num_steps 2",
}


def blocks(mark):
    return re.findall(rf"<!-- test: {mark} -->\n```(\w+)\n(.*?)```", TEXT, re.DOTALL)


def small(line):
    """The command in argv form: this interpreter, few images, a tiny network."""
    words = shlex.split(re.sub(r"--num \d+", "--num 6", line), comments=True)
    script = next((word for word in words if word in SMALL), None)
    words = [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", "dit_vca", *words[1:]]
    return words + (SMALL[script].split() if script else [])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("newcomer")
    for script in ("train_gen.py", "sample.py", "eval_fid.py"):
        shutil.copy(ROOT / script, folder)
    make_images(folder / "photos", per_class=10, size=40)
    make_images(folder / "textures", classes=(), per_class=10, size=40)
    return folder


def test_every_recipe_runs_as_it_is_written(home):
    """In order: the Python example uses what the first recipe made."""
    for language, text in blocks("run"):
        commands = (
            [small(line) for line in text.splitlines() if line.strip()] if language == "sh" else [[sys.executable, "-c", text]]
        )
        for command in commands:
            done = subprocess.run(command, cwd=home, env=environment(), capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, (command, done.stderr[-2000:])
    assert "torch.Size([3, 32, 32, 3])" in done.stdout
    assert (home / "runs" / "textures" / "images" / "grid.png").is_file()


def test_the_commands_that_need_more_than_this_machine_are_parsed():
    from dit_vca.commands import encode, pretrained, sample, score, sweep, train
    from dit_vca.commands.cli import parse

    checks = {
        "train_gen.py": train.read_arguments,
        "sample.py": lambda argv: parse(sample.build_parser(), argv),
        "eval_fid.py": lambda argv: parse(score.build_parser(), argv),
        "encode": lambda argv: parse(encode.build_parser(), argv),
        "sweep": lambda argv: parse(sweep.build_parser(), argv),
        "pretrained": lambda argv: parse(pretrained.build_parser(), argv),
    }
    parsed = []
    for _, text in blocks("parse"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            at = next(i for i, word in enumerate(words) if word in checks)
            checks[words[at]](words[at + 1 :])
            parsed.append(words[at])
    assert parsed == ["encode", "train_gen.py", "sample.py", "eval_fid.py", "sweep", "pretrained", "encode", "train_gen.py"]


def test_every_block_of_commands_is_marked_or_one_of_the_two():
    marked = len(blocks("run")) + len(blocks("parse"))
    assert len(re.findall(r"^```\w+\n", TEXT, re.MULTILINE)) == marked + 1  # the block of make demo and make test


def test_links_lead_to_files():
    for target in re.findall(r"\]\((docs/[^)]+)\)", TEXT):
        assert (ROOT / target).is_file(), target


def test_every_test_that_the_known_faults_name_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "known-faults.md").read_text())
    assert len(named) > 50
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
