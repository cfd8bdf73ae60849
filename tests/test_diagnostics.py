"""The figures on tensors whose answer is known, and the command from a run to a folder of figures."""

import json
import math

import numpy as np
import pytest
import torch
from made import dit_vca_forked, make_images, tiny_config, tree
from PIL import Image

from dit_vca.attention.streams import Stream, Streams
from dit_vca.data.latents import LatentShards
from dit_vca.diagnostics import diagnose
from dit_vca.diagnostics.figures import (
    Intruders,
    branch_cosine,
    drift,
    head_redundancy,
    highest_mean,
    intruder_dimensions,
    null_of_streams,
    null_of_tokens,
    principal_angles,
    row_entropy,
    stream_figures,
    token_separation,
    value_similarity,
)
from dit_vca.diagnostics.measure import Request, grid_maps, lattice, measure, report_of
from dit_vca.runs import open_model


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


A, B = gaussian(3, 2, 197, 64), gaussian(3, 2, 197, 64, seed=1)


def orthogonal(n, seed=0):
    return torch.linalg.qr(gaussian(n, n, seed=seed)).Q


def test_independent_branches_have_ten_intruders_and_copies_none():
    independent = intruder_dimensions(A, B)
    assert independent.shape == (3, 2) and independent.dtype == torch.int64
    assert float(independent.double().mean()) > 9.9
    for copy in (A, 1e-4 * A, -A):
        assert bool((intruder_dimensions(A, copy) == 0).all())
    noisy = intruder_dimensions(A, A + 0.3 * B).double().mean()
    assert 0.3 < float(noisy) < 4, noisy


def test_intruders_are_the_directions_in_which_the_branches_differ():
    u, sizes = orthogonal(20), torch.arange(12.0, 0, -1).double()
    o_pos = u[:, :12] * sizes
    for replaced in (0, 1, 4, 10):
        columns = u[:, :12].clone()
        columns[:, :replaced] = u[:, 12 : 12 + min(replaced, 8)] if replaced <= 8 else torch.cat([u[:, 12:], u[:, 10:12]], 1)
        expected = replaced  # the last two of twelve are beyond the first branch's top ten
        assert int(intruder_dimensions(o_pos, columns * sizes)) == expected
    turned = u[:, :12] @ torch.block_diag(torch.tensor([[0.6, -0.8], [0.8, 0.6]]).double(), torch.eye(10).double())
    assert int(intruder_dimensions(o_pos, turned * sizes)) == 0  # still within 53 degrees
    assert int(intruder_dimensions(o_pos, turned * sizes, Intruders(eps=0.9))) == 2


def test_a_direction_that_the_other_branch_has_below_its_top_is_an_intruder_of_its_top_alone():
    u = orthogonal(20)
    sizes = torch.arange(12.0, 0, -1).double()
    reversed_ = u[:, :12].flip(1) * sizes
    assert int(intruder_dimensions(u[:, :12] * sizes, reversed_)) == 2
    assert int(intruder_dimensions(u[:, :12] * sizes, reversed_, Intruders(against="all"))) == 0
    assert int(intruder_dimensions(u[:, :12] * sizes, reversed_, Intruders(k=6))) == 6
    swapped = torch.cat([u[:, 10:12], u[:, :10]], dim=1) * sizes  # its two largest are the other's two smallest
    assert int(intruder_dimensions(u[:, :12] * sizes, swapped)) == 2


def test_intruders_do_not_depend_on_the_other_branch_being_counted():
    """The vectors counted are those of O-, each against all of O+'s."""
    u = orthogonal(12)
    both = u[:, :1] + u[:, 1:2]  # lies 45 degrees from two of O+'s vectors
    o_pos, o_neg = u[:, :2] * torch.tensor([2.0, 1.0]).double(), torch.cat([both, u[:, 5:6]], dim=1)
    assert int(intruder_dimensions(o_pos, o_neg, Intruders(k=2))) == 1
    assert int(intruder_dimensions(o_neg, o_pos, Intruders(k=2))) == 0


def test_small_directions_count_as_much_as_large_ones():
    """Two outputs that are equal but for a thousandth have intruders, as docs/diagnose.md warns."""
    common = 100 * gaussian(3, 2, 197, 1, seed=2) @ gaussian(3, 2, 1, 64, seed=3)
    first, second = common + 0.3 * A, common + 0.3 * B
    assert float(branch_cosine(first, second).min()) > 0.9999
    assert bool((intruder_dimensions(first, second) == 9).all())


def test_similarity_and_cosine_are_one_of_equal_and_minus_one_of_negated_tensors():
    for figure in (value_similarity, branch_cosine):
        assert figure(A, A).shape == (3, 2)
        torch.testing.assert_close(figure(A, 3 * A), torch.ones(3, 2).double())
        torch.testing.assert_close(figure(A, -A), -torch.ones(3, 2).double())
        assert float(figure(A, B).abs().max()) < 0.05
    trace = torch.einsum("bhmd,bhmd->bh", A, A + B)  # the paper's other form
    torch.testing.assert_close(value_similarity(A, A + B), trace / (A.flatten(2).norm(dim=2) * (A + B).flatten(2).norm(dim=2)))


def test_principal_angles_are_those_between_the_spaces_whatever_their_bases():
    u = orthogonal(20)
    same = principal_angles(u[:, :3] @ gaussian(3, 3, seed=2), u[:, :3] @ gaussian(3, 3, seed=3))
    torch.testing.assert_close(same, torch.zeros(3).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(principal_angles(u[:, :3], u[:, 3:6]), torch.full((3,), 90.0).double())
    tilted = math.cos(0.5) * u[:, 1:2] + math.sin(0.5) * u[:, 9:10]
    angles = principal_angles(u[:, :3], torch.cat([u[:, :1], tilted, u[:, 12:13]], dim=1))
    torch.testing.assert_close(angles, torch.tensor([0, math.degrees(0.5), 90]).double(), rtol=0, atol=1e-5)
    assert float(principal_angles(A, B).mean()) == pytest.approx(57.9, abs=0.5)  # 64 of 197 dimensions


def test_heads_are_redundant_when_they_draw_one_map():
    one = gaussian(2, 1, 5, 7).softmax(-1)
    torch.testing.assert_close(head_redundancy(one.expand(2, 4, 5, 7)), torch.zeros(2).double())
    apart = torch.eye(4).double().unflatten(0, (4, 1))[None]  # each head looks elsewhere
    torch.testing.assert_close(head_redundancy(apart), torch.ones(1).double())
    maps = gaussian(1, 3, 5, 7).softmax(-1)
    pairs = [1 - torch.cosine_similarity(maps[0, i].flatten(), maps[0, j].flatten(), dim=0) for i, j in ((0, 1), (0, 2), (1, 2))]
    torch.testing.assert_close(head_redundancy(maps)[0], sum(pairs) / 3)


def test_entropy_is_log_n_of_a_uniform_row_and_zero_of_a_certain_one():
    rows = torch.stack([torch.full((197,), 1 / 197), torch.eye(197)[3]]).double()
    assert row_entropy(rows).tolist() == pytest.approx([5.283, 0], abs=1e-3)
    assert float(row_entropy(torch.tensor([0.5, 0.5, -1e-12]))) == pytest.approx(math.log(2))
    assert float(highest_mean(torch.arange(20.0))) == 18.5 and float(highest_mean(torch.arange(3.0))) == 2


def test_separation_and_drift_of_tokens_ignore_their_mean_over_features_and_their_length():
    tokens = gaussian(2, 6, 16)
    moved = 3 * tokens + torch.arange(6.0)[None, :, None]
    torch.testing.assert_close(token_separation(moved), token_separation(tokens))
    torch.testing.assert_close(drift(moved, tokens), torch.zeros(2).double())
    torch.testing.assert_close(drift(-tokens, tokens), torch.full((2,), 2.0).double())
    torch.testing.assert_close(token_separation(tokens[:, :1].expand(2, 6, 16)), torch.zeros(2).double())
    centred = tokens[0] - tokens[0].mean(-1, keepdim=True)
    pairs = [1 - torch.cosine_similarity(centred[i], centred[j], dim=0) for i in range(6) for j in range(6) if i != j]
    torch.testing.assert_close(token_separation(tokens)[0], sum(pairs) / 30)


def test_every_figure_is_of_the_branch_that_it_names():
    uniform, certain = torch.full((3, 2, 197, 4), 0.25), torch.eye(4)[torch.arange(197) % 4].expand(3, 2, 197, 4)
    values = gaussian(3, 2, 4, 64)
    figures = stream_figures(Streams("attention", Stream(A, uniform, values), Stream(-A, certain, B[:, :, :4]), torch.ones(2)))
    for name, expected in {
        "entropy_positive": math.log(4), "entropy_top_positive": math.log(4), "entropy_negative": 0, "entropy_top_negative": 0,
        "branch_cosine": -1, "intruders": 0, "head_redundancy_positive": 0,
    }.items():  # fmt: skip
        torch.testing.assert_close(figures[name], torch.full_like(figures[name], expected))
    angles = principal_angles(values, B[:, :, :4])
    for name, expected in {
        "value_similarity": value_similarity(values, B[:, :, :4]), "principal_angle": angles.mean(-1),
        "smallest_principal_angle": angles[..., 0],
    }.items():  # fmt: skip
        torch.testing.assert_close(figures[name], expected)
    assert figures["intruder_histogram"].tolist() == [[2, *([0] * 10)]] * 3


def test_the_null_is_that_of_independent_gaussians_of_the_shape():
    stream = Stream(A[:1].float(), B[:1].float() @ A[:1].float().mT, A[:1].float())
    null = null_of_streams(Streams("attention", stream, stream))
    assert null["intruders"]["mean"] > 9.9 and null["intruder_histogram"]["shares"][10] > 0.9
    assert abs(null["value_similarity"]["mean"]) < 0.01 and null["value_similarity"]["std"] == pytest.approx(0.009, abs=0.003)
    assert null["principal_angle"]["mean"] == pytest.approx(57.9, abs=0.5)
    assert null["entropy_positive"]["mean"] == pytest.approx(math.log(197) - 0.5, abs=0.03)  # logits of unit variance
    assert null["head_redundancy_negative"]["mean"] == pytest.approx(1 - math.exp(-1), abs=0.03)
    tokens = null_of_tokens(torch.empty(4, 16, 64, device="meta"))
    assert tokens["drift"]["mean"] == pytest.approx(1, abs=0.05) == tokens["token_separation"]["mean"]


def test_maps_over_the_grid_are_rows_of_queries_and_columns_of_contrast_tokens():
    weight = torch.tensor([0.5, 2.0])
    p, m = (gaussian(1, 2, 12, 12, seed=s).float() for s in (0, 1))
    values = torch.zeros(1, 2, 12, 3)

    def mean_map(first, second):
        return (first - weight[:, None, None] * second).mean(1)[0]

    of_patches = Streams("attention", Stream(values, p, values), Stream(values, m, values), weight)
    torch.testing.assert_close(grid_maps(of_patches, (3, 4))[0], mean_map(p, m)[lattice((3, 4))])
    gathered = Streams("stage1", Stream(values, p[:, :, :4], values), Stream(values, m[:, :, :4], values), weight)
    torch.testing.assert_close(grid_maps(gathered, (3, 4))[0], mean_map(p[:, :, :4], m[:, :, :4]))
    scattered = Streams("stage2", Stream(values, p[..., :9], values), Stream(values, m[..., :9], values), weight)
    torch.testing.assert_close(grid_maps(scattered, (3, 4))[0], mean_map(p[..., :9], m[..., :9]).T[lattice((3, 3))])
    with_prefix = Streams("attention", Stream(values, p, values), Stream(values, m, values), weight)
    torch.testing.assert_close(grid_maps(with_prefix, (2, 5))[0], mean_map(p, m)[2:, 2:][lattice((2, 5))])


def test_the_places_of_the_queries_are_spread_over_the_grid():
    assert lattice((8, 6)) == [2 * 6 + 1, 2 * 6 + 3, 2 * 6 + 5, 6 * 6 + 1, 6 * 6 + 3, 6 * 6 + 5]
    assert lattice((2, 2)) == [0, 1, 2, 3] and lattice((1, 1)) == [0]


@pytest.fixture(scope="module")
def dna_run(tmp_path_factory, shards):
    from dit_vca.training import train

    return train(tiny_config(shards, ddpm=True, attention="dna"), tmp_path_factory.mktemp("dna") / "run").path


def finite(value):
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    return all(map(finite, value)) if isinstance(value, list) else not isinstance(value, float) or math.isfinite(value)


def test_a_vca_run_is_measured_stage_by_stage_layer_by_layer_and_time_by_time(tmp_path, run):
    report = diagnose(run, tmp_path / "out", num=3, times=[0.9, 0.2], pictures=1, batch=2, device="cpu")
    assert json.loads((tmp_path / "out" / "diagnose.json").read_text()) == report and finite(report)
    assert {(r["t"], r["layer"], r["stage"]) for r in report["layers"]} == {
        (t, layer, stage) for t in (0.2, 0.9) for layer in (0, 1) for stage in ("block", "stage1", "stage2")
    }
    assert report["limits"]["stage1"] == {
        "heads": 2, "queries": 4, "keys": 16, "largest_entropy": math.log(16), "largest_intruders": 4, "shared_values": True,
    }  # fmt: skip
    assert report["limits"]["stage2"]["queries"] == 16 and report["limits"]["stage2"]["keys"] == 4
    for row in report["layers"]:
        if row["stage"] == "block":
            assert row["drift"]["mean"] == pytest.approx(0, abs=1e-12) if row["t"] == 0.2 else row["drift"]["mean"] > 1e-4
        else:
            assert row["value_similarity"]["mean"] == pytest.approx(1) and len(row["entropy_positive"]["heads"]) == 2
            assert sum(row["intruder_histogram"]) == 3 * 2
            mean = sum(i * n for i, n in enumerate(row["intruder_histogram"])) / 6
            assert row["intruders"]["mean"] == pytest.approx(mean)
            assert set(report["null"][row["stage"]]) == set(row) - {"t", "layer", "stage"}
    assert [(w["layer"], w["stage"]) for w in report["weights"]] == [(0, "stage1"), (0, "stage2"), (1, "stage1"), (1, "stage2")]
    assert all(w["std"] == 0 for w in report["weights"])  # one lambda for all heads
    assert report["made_from"]["model_times"] == [200, 900]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    plots = {f"{name}.png" for name in (
        "intruders", "branch_cosine", "head_redundancy", "entropy", "entropy_top", "token_separation", "drift", "weight",
        "intruder_histogram",
    )}  # fmt: skip
    maps = {f"maps-image0-t{t}-{stage}.png" for t in (0.2, 0.9) for stage in ("stage1", "stage2")}
    assert files == {"diagnose.json", *plots, *maps}  # of shared values there is no plot
    assert all(Image.open(tmp_path / "out" / name).size[0] > 300 for name in files - {"diagnose.json"})


def test_the_figures_are_those_of_the_images_noise_and_seed_and_not_of_the_batch(run, shards):
    network, objective, _ = open_model(run)

    def layers(batch, seed):
        request = Request(3, (0.5,), False, seed, Intruders(), 1, batch)
        return report_of(measure(network, objective, LatentShards(shards), request), request)["layers"]

    for a, b, c in zip(layers(1, 0), layers(3, 0), layers(3, 1), strict=True):
        for name in set(a) - {"t", "layer", "stage", "intruder_histogram"}:
            assert a[name]["heads"] == pytest.approx(b[name]["heads"], rel=1e-3, abs=1e-5)
        assert c["stage"] == "block" or a["entropy_positive"] != c["entropy_positive"]


def test_every_time_has_the_same_images_and_noise(run, shards):
    network, objective, _ = open_model(run)
    seen = {}

    def looking(x, time, y):
        seen[float(time[0])] = x, y
        return type(network).forward(network, x, time, y)

    network.forward = looking
    measure(network, objective, LatentShards(shards), Request(2, (0.0, 0.25, 1.0), False, 0, Intruders(), 0, 2))
    (x_0, y), (x_t, y_t), (eps, _) = (seen[time] for time in (0.0, 250.0, 1000.0))
    torch.testing.assert_close(x_t, 0.75 * x_0 + 0.25 * eps)
    assert torch.equal(y, y_t) and abs(float(eps.std()) - 1) < 0.1
    measure(network, objective, LatentShards(shards), Request(2, (0.0,), True, 0, Intruders(), 0, 2))
    assert torch.equal(seen[0.0][0], x_0) and seen[0.0][1].tolist() == [2, 2]  # the null class


def test_a_dna_run_on_the_discrete_path_has_two_value_spaces_and_an_alpha_a_head(tmp_path, dna_run):
    report = diagnose(dna_run, tmp_path / "out", num=2, times=[0.5], pictures=1, labels="null", device="cpu")
    row = next(r for r in report["layers"] if r["stage"] == "attention")
    assert abs(row["value_similarity"]["mean"]) < 0.9 and row["principal_angle"]["mean"] > 5
    assert report["limits"]["attention"]["shared_values"] is False and report["made_from"]["model_times"] == [499]
    assert len(report["weights"][0]["heads"]) == 2 and report["weights"][0]["mean"] == pytest.approx(0.5, abs=0.05)  # subtracts
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"principal_angle.png", "value_similarity.png", "maps-image0-t0.5-attention.png"} <= names


def test_a_softmax_run_has_the_figures_of_one_map(tmp_path, shards):
    from dit_vca.training import train

    folder = train(tiny_config(shards, attention="softmax", steps=1, save_every=1), tmp_path / "run").path
    report = diagnose(folder, tmp_path / "out", num=2, times=[0.5], pictures=1, device="cpu")
    row = next(r for r in report["layers"] if r["stage"] == "attention")
    assert set(row) == {"t", "layer", "stage", "entropy_positive", "entropy_top_positive", "head_redundancy_positive"}
    assert report["weights"] == [] and not (tmp_path / "out" / "weight.png").exists()
    assert (tmp_path / "out" / "maps-image0-t0.5-attention.png").is_file()


def test_the_command_tells_mistakes_in_one_line_and_writes_the_folder_that_it_names_and_nothing_else(
    tmp_path, run, dna_run, shards
):
    from dit_vca.data.encode import encode
    from dit_vca.data.prepare import open_source
    from dit_vca.training import train

    train(tiny_config(shards, attention="cog", steps=1, save_every=1), tmp_path / "cog")
    others = {"large": (("cat", "dog"), 16), "fish": (("cat", "fish"), 8)}
    for name, (classes, size) in others.items():
        images = make_images(tmp_path / f"{name}-images", classes=classes, per_class=2)
        encode(*open_source(str(images), size, "none", "cpu"), tmp_path / name, flip=False)
    (tmp_path / "taken").mkdir()
    np.save(tmp_path / "taken" / "x.npy", np.zeros(1))
    before = tree(tmp_path)
    start = ["diagnose", "--out", "out", "--ckpt"]
    cases = {
        "no run": ([*start, "nowhere"], "nowhere does not exist"),
        "no weights": ([*start, str(run), "--weights", "ema-0.5"], "has no weights 'ema-0.5'"),
        "taken": (["diagnose", "--ckpt", str(run), "--out", "taken"], "taken exists already: choose another folder"),
        "kind": ([*start, "cog"], "CogAttention has neither two streams nor a map"),
        "too many": ([*start, str(run), "--num", "41"], "num must be at most 40"),
        "none": ([*start, str(run), "--num", "0"], "num must be at least 1"),
        "batch": ([*start, str(run), "--batch", "0"], "batch must be at least 1"),
        "pictures": ([*start, str(run), "--pictures", "-1"], "pictures must be at least 0"),
        "seed": ([*start, str(run), "--seed", "-1"], "seed must be at least 0"),
        "time": ([*start, str(run), "--times", "[0.1,1.5]"], "from 0 (data) to 1 (noise); got [0.1, 1.5]"),
        "twice": ([*start, str(run), "--times", "[0.1,0.1]"], "all different"),
        "no time": ([*start, str(run), "--times", "[]"], "at least one"),
        "words": ([*start, str(run), "--times", "soon"], "times"),
        "data": ([*start, str(dna_run), "--times", "[0.0]"], "at least 0.001 on path ddpm"),
        "k": ([*start, str(run), "--k", "0"], "k must be at least 1"),
        "eps": ([*start, str(run), "--eps", "0"], "eps must be above 0"),
        "against": ([*start, str(run), "--against", "some"], "against must be top or all"),
        "labels": ([*start, str(run), "--labels", "cat"], "labels must be own or null"),
        "nothing there": ([*start, str(run), "--data", "nowhere"], "'nowhere'"),
        "other size": ([*start, str(run), "--data", "large"], "image_size is 8, but the shards in large were encoded with 16"),
        "other classes": ([*start, str(run), "--data", "fish"], "has the classes cat, fish, the model was trained on cat, dog"),
        "unknown": ([*start, str(run), "--tims", "[0.1]"], "did you mean --times"),
    }  # fmt: skip
    written = [*start, str(dna_run), "--num", "2", "--times", "[0.3]", "--pictures", "0", "--k", "3", "--against", "all"]
    commands = {name: arguments for name, (arguments, _) in cases.items()} | {"right": [*written, "--device", "cpu"]}
    done = dit_vca_forked(commands, cwd=tmp_path)
    for name, (_, words) in cases.items():
        assert done[name].returncode == 2 and words in done[name].stderr, (name, done[name].stderr)
        assert done[name].stderr.count("\n") == 1, (name, done[name].stderr)
    assert done["right"].returncode == 0 and done["right"].stdout == "out/diagnose.json\n", done["right"].stderr
    after = tree(tmp_path)
    report = json.loads(after.pop("out/diagnose.json"))
    assert report["made_from"]["against"] == "all" and len(report["layers"][1]["intruder_histogram"]) == 4
    assert {name: content for name, content in after.items() if name.split("/")[0] != "out"} == before


def test_a_failure_while_drawing_leaves_nothing_behind(tmp_path, run, monkeypatch):
    def fails(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr("dit_vca.diagnostics.plot_over_layers", fails)
    with pytest.raises(OSError, match="no space left"):
        diagnose(run, tmp_path / "out", num=1, times=[0.5], pictures=0, device="cpu")
    assert not list(tmp_path.iterdir())
