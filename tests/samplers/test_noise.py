import itertools

import numpy as np
import pytest
import torch

from samplers import ImageNoise
from samplers.noise import PURPOSES, keyed_generator, normal, uniform

SHAPE = (2, 3, 4)


def first_words(seed: int, purpose: str, position: int = 0, count: int = 1) -> tuple[int, ...]:
    return tuple(int(word) for word in keyed_generator(seed, purpose, position).bit_generator.random_raw(count))


@pytest.mark.parametrize("positions", [[5], [0, 7, 3], [9, 5, 9, 1, 0]])
def test_a_row_depends_on_its_position_only(positions):
    table = normal(1, "eps", range(10), SHAPE)
    assert torch.equal(normal(1, "eps", positions, SHAPE), table[positions])
    numbers = uniform(1, "t", range(10))
    assert torch.equal(uniform(1, "t", positions), numbers[positions])


@pytest.mark.parametrize("other", [(2, "eps", 5), (1, "latent", 5), (1, "eps", 6)], ids=["seed", "purpose", "position"])
def test_another_seed_purpose_or_position_gives_other_noise(other):
    seed, purpose, position = other
    assert not torch.isclose(normal(1, "eps", [5], SHAPE), normal(seed, purpose, [position], SHAPE)).any()
    assert uniform(1, "eps", [5]) != uniform(seed, purpose, [position])


def test_no_two_triples_share_a_word_of_their_first_draws():
    seeds, positions = (0, 1, 2, 2**32, 2**64 - 1), (0, 1, 2, 3, 255, 256, 2**32, 2**40, 2**63)
    triples = list(itertools.product(seeds, PURPOSES, positions))
    words = [word for triple in triples for word in first_words(*triple, count=8)]
    assert len(set(words)) == len(words)


def test_no_two_of_many_neighbouring_positions_share_noise():
    words = {first_words(0, "eps", position) for position in range(20_000)}
    assert len(words) == 20_000


def test_the_purposes_keep_their_numbers_because_finished_runs_depend_on_them():
    assert PURPOSES == {
        "order": 1, "flip": 2, "latent": 3, "t": 4, "eps": 5, "label_drop": 6,
        "image_noise": 7, "image_label": 8, "preview": 9, "init": 10, "reference": 11, "score_order": 12,
        "probe": 13, "dequantization": 14,
    }  # fmt: skip


def test_the_generator_is_philox_keyed_by_the_seed_and_counting_from_position_and_purpose():
    philox = np.random.Philox(key=0x1234, counter=(5 << 192) + (77 << 128))
    assert first_words(0x1234, "eps", 77, count=9) == tuple(int(word) for word in philox.random_raw(9))


def test_normal_noise_is_standard_normal_float32():
    noise = normal(0, "eps", range(500), (400,))
    assert noise.dtype == torch.float32 and noise.shape == (500, 400)
    assert float(noise.mean()) == pytest.approx(0, abs=0.01)
    assert float(noise.var()) == pytest.approx(1, abs=0.01)
    assert float(noise.mean(0).std()) == pytest.approx(500**-0.5, rel=0.15)  # rows are independent of each other


def test_uniform_draws_fill_the_unit_interval_in_float64():
    draws = uniform(0, "t", range(10_000))
    assert draws.dtype == torch.float64 and float(draws.min()) >= 0 and float(draws.max()) < 1
    counts = torch.histc(draws, bins=10, min=0, max=1)
    assert float(counts.min()) > 850 and float(counts.max()) < 1150


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits_is_refused(seed):
    with pytest.raises(ValueError, match="a seed must be in"):
        keyed_generator(seed, "eps")


def draws_of(indices, count: int = 3, seed: int = 4) -> list[torch.Tensor]:
    noise = ImageNoise(seed, indices, SHAPE)
    like = torch.zeros(len(indices), *SHAPE, dtype=torch.float64)
    return [noise.initial(), *(noise.randn_like(like) for _ in range(count))]


@pytest.mark.parametrize("indices", [[6], [2, 0], [6, 6, 1]])
def test_every_draw_of_an_image_is_the_same_whatever_batch_it_is_in(indices):
    for part, whole in zip(draws_of(indices), draws_of(range(8)), strict=True):
        assert torch.equal(part, whole[indices])


def test_successive_draws_images_and_seeds_differ():
    blocks = torch.cat([*draws_of(range(3)), *draws_of(range(3), seed=5)]).flatten(1)
    assert len(torch.unique(blocks.float(), dim=0)) == len(blocks) == 24


def test_noise_of_a_step_has_the_dtype_of_the_state_and_the_starting_noise_is_float32():
    initial, step = draws_of([0], count=1)
    assert initial.dtype == torch.float32 and step.dtype == torch.float64


def test_the_starting_noise_of_an_image_is_a_function_of_seed_and_index():
    assert torch.equal(ImageNoise(4, [3, 9], SHAPE).initial(), normal(4, "image_noise", [3, 9], SHAPE))
