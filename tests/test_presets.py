import itertools
from dataclasses import replace

import pytest
import torch

from dit_vca.attention import ATTENTION, VCA_ROWS
from dit_vca.config import Config, from_dict, to_dict
from dit_vca.presets import preset
from dit_vca.runs import build_network, objective_of

NAMES = (*ATTENTION, *VCA_ROWS)
IMAGENET = [
    f"{family}-{size}{patch}{large}-{attention}"
    for family, size, patch, large, attention in itertools.product(
        ("dit", "sit"), ("s", "b", "l", "xl"), (2, 4, 8), ("", "-512"), NAMES
    )
]
DEMO = [f"demo{ddpm}{attention}" for ddpm in ("", "-ddpm") for attention in ("", *(f"-{name}" for name in NAMES))]

SOFTMAX_PARAMETERS = {
    "s8": 33_148_160, "s4": 32_945_024, "s2": 32_963_360, "b8": 130_881_536, "b4": 130_475_648, "b2": 130_512_416,
    "l8": 458_594_816, "l4": 458_053_760, "l2": 458_102_816, "xl8": 675_683_072, "xl4": 675_074_432, "xl2": 675_129_632,
}  # fmt: skip
TRAINABLE_PARAMETERS = {"s2": 32_865_056, "b4": 130_426_496, "l8": 458_578_432, "xl2": 674_834_720}
VCA_MILLIONS = {"s8": 33.792, "s4": 33.589, "s2": 33.607, "b8": 132.161, "b4": 131.755, "b2": 131.792}


def network_of(config: Config, input_size: int = 32) -> torch.nn.Module:
    """The network for ImageNet latents, without memory for its weights."""
    model = replace(config.model, input_size=input_size, in_channels=4, num_classes=1000)
    with torch.device("meta"):
        return build_network(replace(config, model=model))


def count(network: torch.nn.Module, *, trainable: bool = False) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad or not trainable)


@pytest.mark.parametrize("size", SOFTMAX_PARAMETERS)
def test_a_softmax_network_has_the_published_number_of_parameters(size):
    dit, sit = (preset(f"{family}-{size}-softmax") for family in ("dit", "sit"))
    assert count(network_of(dit)) == SOFTMAX_PARAMETERS[size]
    assert sit.model == dit.model


@pytest.mark.parametrize("size", TRAINABLE_PARAMETERS)
def test_the_position_embedding_is_counted_but_not_trained(size):
    assert count(network_of(preset(f"dit-{size}-softmax")), trainable=True) == TRAINABLE_PARAMETERS[size]


@pytest.mark.parametrize("size", VCA_MILLIONS)
def test_a_vca_network_has_the_number_of_parameters_of_its_specification(size):
    assert round(count(network_of(preset(f"sit-{size}-vca"))) / 1e6, 3) == VCA_MILLIONS[size]


def test_the_xl_network_has_the_published_number_of_weights_and_no_others():
    names = list(network_of(preset("dit-xl2-softmax")).state_dict())
    assert len(names) == 292 and names[0] == "pos_embed"


def test_every_name_of_the_grammar_gives_a_config_of_that_name_with_an_objective_that_can_be():
    for name in (*IMAGENET, *DEMO):
        config = preset(name)
        assert isinstance(config, Config) and config.preset == name
        objective_of(config)


@pytest.mark.parametrize("name", [*DEMO, "dit-xl2-512-softmax", "sit-s8-vca"])
def test_the_config_of_a_preset_survives_its_own_record(name):
    assert from_dict(to_dict(preset(name))) == preset(name)


@pytest.mark.parametrize("name", IMAGENET[:: len(NAMES)])
def test_a_name_says_patch_size_image_size_and_family(name):
    config = preset(name)
    assert config.model.patch_size == int(name.split("-")[1][-1])
    assert config.data.image_size == (512 if "-512-" in name else 256)
    assert config.objective.path == ("ddpm" if name.startswith("dit") else "linear")
    assert config.objective.learn_variance is name.startswith("dit")
    assert config.objective.data_at_1 is name.startswith("sit")
    assert config.model.learn_sigma and config.data.flip and config.sample.guidance_channels == 3


@pytest.mark.parametrize("name", [*IMAGENET[: len(NAMES)], *DEMO])
def test_a_name_says_the_attention_and_the_demo_is_vca_unless_it_says_otherwise(name):
    said = next((n for n in NAMES if name.endswith(f"-{n}")), "vca")
    assert preset(name).model.attention.name == ("vca" if said in VCA_ROWS else said)


@pytest.mark.parametrize("row", VCA_ROWS)
def test_a_row_of_the_paper_is_vca_with_its_options(row):
    for name in (f"sit-s2-{row}", f"demo-{row}"):
        config = preset(name).model.attention
        assert config.name == "vca" and VCA_ROWS[row].items() <= config.options.items()
    assert preset(f"demo-{row}").model.attention.options["pool"] == 4


@pytest.mark.parametrize(("name", "path"), [("demo", "linear"), ("demo-ddpm", "ddpm"), ("demo-ddpm-softmax", "ddpm")])
def test_a_demo_preset_is_a_flow_unless_it_says_ddpm(name, path):
    assert preset(name).objective.path == path


@pytest.mark.parametrize(
    "name",
    ["", "dit", "dit-s2", "dit-m2-vca", "dit-s3-vca", "dit-s2-256-vca", "dit-s2-vca-512", "dit-s2-nonsense", "DIT-S2-VCA",
     "unet-s2-vca", "demo-", "demo-vca-ddpm", "demo-nonsense", "dit-s2-vca\n"],
)  # fmt: skip
def test_an_unknown_preset_is_refused_with_the_grammar(name):
    with pytest.raises(ValueError) as error:
        preset(name)
    message = str(error.value)
    assert repr(name) in message
    assert "demo[-ddpm][-ATTENTION]" in message and "{dit|sit}-{s|b|l|xl}{2|4|8}[-512]-ATTENTION" in message
    assert all(attention in message for attention in NAMES)
