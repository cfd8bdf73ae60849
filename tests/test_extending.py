"""A new attention is one file and one line, in a temporary copy of the product."""

import shutil

from made import ROOT, dit_vca

SOURCE = '''"""Attention that looks at nothing: the mean of all values."""

from .base import QKVAttention


class MeanAttention(QKVAttention):
    def __init__(self, dim, num_heads, *, layer=0, qkv_bias=True, depthwise=0, gain: float = 1.0):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        self.gain = gain

    def mix(self, q, k, v, grid, *, bias=None):
        return self.gain * v.mean(2, keepdim=True).expand_as(v)
'''


def test_an_attention_added_by_one_file_and_one_line_trains_and_samples(tmp_path, shards):
    for package in ("dit_vca", "samplers"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    attention = tmp_path / "dit_vca" / "attention"
    (attention / "mean.py").write_text(SOURCE)
    table = (attention / "__init__.py").read_text()
    line = '    "mean": __import__("dit_vca.attention.mean", fromlist=["MeanAttention"]).MeanAttention,\n'
    (attention / "__init__.py").write_text(table.replace("QKVAttention]] = {\n", "QKVAttention]] = {\n" + line))
    options = "--preset demo-mean --model.patch_size 2 --model.dim 16 --model.depth 2 --model.num_heads 2".split() + [
        "--model.attention.options.gain", "2", "--train.steps", "5", "--train.batch_size", "8", "--train.log_every", "1",
        "--train.tracker", "none", "--sample.num_steps", "2",
    ]  # fmt: skip
    trained = dit_vca("train", "--run", "run", "--data.name", shards, *options, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert trained.returncode == 0, trained.stderr
    assert '"gain": 2.0' in (tmp_path / "run" / "config.json").read_text()
    sampled = dit_vca("sample", "--ckpt", "run", "--num", "2", "--out", "out", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert sampled.returncode == 0, sampled.stderr
    assert (tmp_path / "out" / "images.npz").is_file()
