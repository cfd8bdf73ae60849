"""`dit-vca VERB`, `python -m dit_vca VERB`, and the entry points of the root scripts."""

import sys
from importlib import import_module

# verb: (module, function, what it does); modules are imported when their verb is used
VERBS = {
    "train": ("train", "main", "train a model, or go on with a run (= train_gen.py)"),
    "sample": ("sample", "main", "sample images to an npz (= sample.py)"),
    "score": ("score", "main", "score images against a reference (= eval_fid.py)"),
    "likelihood": ("likelihood", "main", "bits per dimension of a flow model's data"),
    "sweep": ("sweep", "main", "sample and score a grid of settings"),
    "complexity": ("complexity", "main", "parameters and operations of the paper's rows and of presets"),
    "diagnose": ("diagnose", "main", "look inside a model's attentions, layer by layer"),
    "pretrained": ("pretrained", "main", "weights of DiT, SiT, REPA or diffusers to a weight file of this project"),
    "export": ("export", "main", "a model to DiT's or diffusers' form"),
    "encode": ("encode", "main", "images to latent shards"),
    "train-vae": ("train_vae", "main", "train a small autoencoder for small images"),
    "demo": ("demo", "main", "encode, train, sample and score the embedded images"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, VERBS))
        print("usage: dit-vca VERB [options]   (dit-vca VERB --help lists them)\n")
        print("\n".join(f"  {verb:{width}}  {about}" for verb, (_, _, about) in VERBS.items()))
        return 0 if argv else 2
    if argv[0] == "--version":
        from . import __version__

        print(__version__)
        return 0
    if argv[0] not in VERBS:
        print(f"dit-vca: error: unknown verb {argv[0]!r}; there is {', '.join(VERBS)}", file=sys.stderr)
        return 2
    return run_verb(argv[0], argv[1:])


def run_verb(verb: str, argv: list[str] | None = None) -> int:
    """What `dit-vca VERB` and the root scripts share."""
    from .commands import cli

    module, function, _ = VERBS[verb]

    def command(arguments):
        getattr(import_module(f".commands.{module}", __package__), function)(arguments)

    return cli.run(verb, command, argv)


if __name__ == "__main__":
    sys.exit(main())
