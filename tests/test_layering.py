"""Imports go one way. What a module imports is read from its source, imports inside functions included."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [*(ROOT / "dit_vca").rglob("*.py"), *(ROOT / "samplers").rglob("*.py"), *ROOT.glob("*.py")]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


LEARNING = tuple(f"dit_vca.{name}" for name in ("objectives", "interpolants", "backbones", "attention", "training", "runs"))
MODULES = {module_name(path): path for path in FILES}


@cache
def imports(module: str) -> frozenset[str]:
    """Everything a module imports: modules of the project by their full name, others by the name of their package."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*base, *filter(None, [source])])
            names = {f"{source}.{alias.name}" for alias in node.names} - {"dit_vca.__version__"}  # a constant, not the API
            modules = names & MODULES.keys()
            found |= modules | ({source} if modules != names else set())
    return frozenset(name if name in MODULES else name.partition(".")[0] for name in found)


def of_project(module: str) -> set[str]:
    return set(imports(module)) & MODULES.keys()


def reached_from(module: str) -> set[str]:
    """The modules of the project that a module needs, directly or not."""
    reached, waiting = set(), [module]
    while waiting:
        for name in of_project(waiting.pop()) - reached:
            reached.add(name)
            waiting.append(name)
    return reached


def within(package: str) -> list[str]:
    """The package and the modules in it; ValueError if there is none, lest a test of nothing passes."""
    found = [name for name in MODULES if name == package or name.startswith(f"{package}.")]
    if not found:
        raise ValueError(f"no module {package}")
    return found


def outside(names: set[str], *packages: str) -> set[str]:
    return names - {name for package in packages for name in within(package)}


def test_the_reading_of_imports_finds_absolute_relative_and_late_ones():
    assert "samplers.types" in imports("dit_vca.objectives")  # from samplers.types import
    assert "dit_vca.interpolants" in imports("dit_vca.objectives")  # from .interpolants import
    assert "dit_vca.attention" in imports("dit_vca.backbones.dit")  # from ..attention import
    assert "dit_vca.data.fashion_mnist" in imports("dit_vca.data.images")  # from . import fashion_mnist
    assert "dit_vca.training" in imports("dit_vca.commands.train")  # inside a function
    assert "torch" in imports("dit_vca.vae")
    assert {"samplers.noise", "dit_vca.vae"} <= reached_from("dit_vca.training.loop")


@pytest.mark.parametrize("module", within("samplers"))
def test_the_samplers_need_torch_and_numpy_alone(module):
    foreign = {name for name in imports(module) if name not in MODULES and name not in sys.stdlib_module_names}
    assert foreign <= {"torch", "numpy"}
    assert not outside(of_project(module), "samplers")


def test_the_contract_between_network_and_sampler_imports_nothing_of_the_project():
    assert not of_project("samplers.types")


def test_the_configuration_imports_nothing_of_the_project():
    assert not of_project("dit_vca.config")


@pytest.mark.parametrize("module", within("dit_vca.attention"))
def test_attention_imports_nothing_else_of_the_project(module):
    assert not outside(of_project(module), "dit_vca.attention")


@pytest.mark.parametrize("module", within("dit_vca.backbones"))
def test_backbones_import_attention_alone(module):
    assert not outside(of_project(module), "dit_vca.backbones", "dit_vca.attention")


def test_interpolants_import_the_samplers_alone():
    assert not outside(of_project("dit_vca.interpolants"), "samplers")


def test_objectives_import_interpolants_and_samplers_and_never_reach_a_backbone():
    assert not outside(reached_from("dit_vca.objectives"), "samplers", "dit_vca.interpolants")


@pytest.mark.parametrize("module", within("dit_vca.evaluation"))
def test_evaluation_reaches_neither_objectives_nor_networks_nor_training(module):
    reached = reached_from(module)
    assert reached == outside(reached, *LEARNING)


@pytest.mark.parametrize("module", [*within("dit_vca.data"), "dit_vca.vae"])
def test_data_and_vae_reach_neither_objectives_nor_networks_nor_training(module):
    reached = reached_from(module)
    assert reached == outside(reached, *LEARNING)


def test_a_task_knows_objectives_and_no_backbone():
    reached = reached_from("dit_vca.training.tasks")
    assert "dit_vca.objectives" in reached
    assert reached == outside(reached, "dit_vca.backbones", "dit_vca.attention", "dit_vca.runs")


@pytest.mark.parametrize("module", ["dit_vca.runs", "dit_vca.sampling", "dit_vca.presets"])
def test_what_training_and_commands_build_on_reaches_neither(module):
    reached = reached_from(module)
    assert reached == outside(reached, "dit_vca.training", "dit_vca.commands")


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith(("dit_vca", "samplers"))])
def test_only_commands_and_the_entry_point_import_commands(module):
    if module != "dit_vca.__main__" and module not in within("dit_vca.commands"):
        assert not of_project(module) & set(within("dit_vca.commands"))


@pytest.mark.parametrize("script", ["train_gen", "sample", "eval_fid"])
def test_a_root_script_imports_the_entry_point_alone(script):
    assert of_project(script) == {"dit_vca.__main__"}


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_itself_by_a_detour(module):
    assert module not in reached_from(module)
