"""dit-vca train: preset and overrides -> Config -> run folder -> training."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..config import AttentionConfig, Config, add_config_arguments, config_from_namespace
from ..presets import preset
from ..runs import RunFolder
from .cli import make_parser, parse

DEFAULT_PRESET = "demo"


def main(argv: Sequence[str] | None = None) -> None:
    """Train a model; in a folder that holds a run, go on with it."""
    config, arguments = read_arguments(argv)
    from ..training import train  # after parsing: --help and a mistyped option need not wait for it

    folder = train(config, arguments.run, allow_change=arguments.allow_change)
    print(f"run: {folder.path}")


def read_arguments(argv: Sequence[str] | None):
    """The config that the command line asks for, and the parsed arguments."""
    first = _parser(Config())
    asked = parse(first, argv)
    resumed = asked.run is not None and RunFolder(Path(asked.run)).exists()
    if resumed:
        from ..training import current_config

        base = current_config(RunFolder(Path(asked.run)))
        if asked.preset not in (None, base.preset):
            raise ValueError(
                f"{asked.run} holds a run of preset {base.preset or '(none)'} and goes on with its own configuration: "
                f"leave --preset {asked.preset} out, or choose another --run"
            )
    else:
        base = preset(asked.preset or DEFAULT_PRESET)
    arguments = parse(_parser(base), argv)
    if not resumed and arguments.model.attention.name != base.model.attention.name:
        base = _with_attention(base, arguments.model.attention.name)
        arguments = parse(_parser(base), argv)
    return config_from_namespace(arguments, base.preset), arguments


def _parser(base: Config):
    parser = make_parser("train", "Train a generation model; in a folder that holds a run, go on with it.")
    parser.add_argument(
        "--preset",
        type=str | None,
        default=None,
        help="a named recipe: demo[-ddpm][-ATTENTION] or {dit|sit}-{s|b|l|xl}{2|4|8}[-512]-ATTENTION (default demo)",
    )
    parser.add_argument("--run", type=str | None, default=None, help="the run's folder; default: a new numbered one under runs/")
    parser.add_argument(
        "--allow-change", type=bool, default=False, help="permit another learning rate, batch size or EMA on resume"
    )
    parser.add_argument("--config", action="config", help="a YAML or JSON file with any of these options")
    add_config_arguments(parser, base)
    return parser


def _with_attention(base: Config, name: str) -> Config:
    """The options of a preset belong to its own attention; another one starts from its defaults."""
    return replace(base, model=replace(base.model, attention=AttentionConfig(name)))
