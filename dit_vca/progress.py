"""One progress bar for every command: on a terminal each second, in a log file a line now and then."""

import sys

from tqdm import tqdm


def progress(total: int, unit: str, desc: str, *, initial: int = 0, disable: bool = False, delay: float = 0) -> tqdm:
    """A bar over `total` units, of which `initial` are done already; not shown before `delay` seconds."""
    interval = 1.0 if sys.stderr.isatty() else 20.0
    return tqdm(
        total=total, unit=unit, desc=desc, initial=initial, disable=disable, mininterval=interval, maxinterval=4 * interval,
        smoothing=0.05, delay=delay,
    )  # fmt: skip
