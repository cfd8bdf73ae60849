"""Other projects' weights to this project's and back: DiT, SiT, fast-DiT and REPA, and the DiT of diffusers.

Tensors have DiT's names here too (Peebles and Xie 2023), so all forms but diffusers' need little renaming. A file of
this project, or of an export of this project, says of itself what the others leave out.
"""

from pathlib import Path

from ..config import Config
from ..files import check_new, whole
from ..runs import objective_of, write_weights
from .configure import agreeing, check_tensors, config_of, in_words
from .export import export_weights
from .read import Found, open_found


def import_weights(
    ref: str, out: str | Path, *, objective: str | None = None, num_heads: int | None = None, weights: str = "ema",
    vae: str | None = None, time_freqs: str | None = None, source: str | None = None, license: str | None = None,
) -> list[str]:  # fmt: skip
    """Write the weights behind `ref` as a weight file of this project, and return lines that say what was read.

    `ref` is a published name, a file, or a folder. ValueError says what the file leaves open, or what is wrong with it.
    """
    out = Path(out)
    check_new(out)
    if out.suffix != ".safetensors":
        raise ValueError(f"the file to write must end in .safetensors, got {out}")
    given = {"objective": objective, "num_heads": num_heads, "vae": vae, "time_freqs": time_freqs}
    try:
        found = open_found(ref, weights, time_freqs)
        if found.config is not None:
            config = agreeing(found, given)
        else:
            config = config_of(found, objective=objective, num_heads=num_heads, vae=vae)
        objective_of(config)  # refuses a combination that a checkpoint's arguments may hold
        check_tensors(found, config)
    except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, RuntimeError) as error:
        kind = type(error).__name__
        raise ValueError(
            f"{ref} is damaged, or of a form that is not read ({kind}: {error}); docs/weights.md has the forms"
        ) from error
    source, license = source or found.source, license or found.license
    with whole(out) as temporary:
        write_weights(temporary, found.tensors, config, step=found.step, kind=found.kind, source=source, license=license)
    return [
        *found.notes,
        _summary(out, config, found),
        f"source: {source or 'not recorded'}",
        f"license: {license or 'not known; --license records it'}",
    ]


def _summary(out: Path, config: Config, found: Found) -> str:
    m, latent = config.model, config.data.latent
    parameters = sum(tensor.numel() for tensor in found.tensors.values())
    return (
        f"{out}: {parameters:,} parameters, width {m.dim}, {m.depth} blocks, {m.num_heads} heads, patches of side "
        f"{m.patch_size}, latents {m.in_channels}x{m.input_size}x{m.input_size} of VAE {latent.vae if latent else 'unknown'}, "
        f"{m.num_classes} classes, {'2C' if m.learn_sigma else 'C'} outputs; {in_words(config.objective)}; time_freqs "
        f"{m.time_freqs}"
    )


__all__ = ["export_weights", "import_weights"]
