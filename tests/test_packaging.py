"""The wheel holds what it must, and works where nothing else of this tree is."""

import os
import subprocess
import sys
import venv
import zipfile

import pytest
from made import ROOT


@pytest.mark.slow
def test_the_wheel_installed_elsewhere_runs_the_demo_from_an_empty_folder(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)], check=True)
    wheel = next(tmp_path.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "dit_vca/py.typed", "dit_vca/assets/vae/config.json", "dit_vca/assets/vae/diffusion_pytorch_model.safetensors",
        "dit_vca/assets/fashion_mnist/train-images-idx3-ubyte.gz", "dit_vca/assets/fashion_mnist/LICENSE", "samplers/ode.py",
        "dit_vca/assets/golden/fd-lite0.safetensors",
    ):  # fmt: skip
        assert needed in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"dit_vca", "samplers", next(t for t in tops if t.endswith(".dist-info"))}
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    home = tmp_path / "empty folder"
    home.mkdir()
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # nor this checkout's metadata in cwd
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True, cwd=home, env=alone)
    command = [str(python.parent / "dit-vca"), "demo", "--train.steps", "2", "--num", "100"]
    done = subprocess.run(command, cwd=home, env=alone, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fd-lite0" in done.stdout and (home / "runs" / "0001-demo" / "report.json").is_file()
