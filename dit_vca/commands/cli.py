"""What every command shares: a strict parser, one line for a mistake, and the exit code."""

import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from safetensors import SafetensorError

from ..errors import Interrupted, NonFinite

MISTAKE, FAULT = 2, 1  # exit codes: of the user or the environment; of this program


def make_parser(verb: str, description: str) -> ArgumentParser:
    """A parser that raises instead of exiting and takes no abbreviations."""
    return ArgumentParser(
        prog=f"dit-vca {verb}", description=description, exit_on_error=False, allow_abbrev=False, default_env=False
    )


def parse(parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """Parsed and instantiated arguments; ValueError in one line, with the nearest name where one is unknown."""
    words = list(sys.argv[1:] if argv is None else argv)
    for before, word in zip(["", *words], words, strict=False):
        if word == "":
            raise ValueError(f"{before or 'an argument'} is empty: give a value, or leave the option out")
    try:
        return parser.instantiate(parser.parse_args(argv))
    except (ArgumentError, TypeError) as error:
        raise ValueError(_explain(str(error), parser)) from None


def _explain(message: str, parser: ArgumentParser) -> str:
    message = " ".join(re.sub(r"<class '(\w+)'>", r"\1", message).replace("typing.", "").split())
    known = _known_names(parser)
    if found := re.search(r"unrecognized arguments: (\S+)", message, re.IGNORECASE):
        given = found[1].split("=")[0]
        if not given.startswith("-"):
            return f"unexpected argument {given!r}; options are written --name value (--help lists them)"
        return f"unknown option {given}{_suggestion(given.lstrip('-'), known, '--')}"
    if found := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        given = f"{found[1]}.{found[2]}"
        return f"unknown key {given} in the configuration{_suggestion(given, known, '')}"
    if found := re.search(r"Key '?\"?([\w.]+)'?\"? is not expected|Key \"?'?([\w.]+)\"?'? is required", message):
        given = found[1] or found[2]
        return f"unknown or missing key {given} in the configuration{_suggestion(given, known, '')}"
    return re.sub(r'Parser key "([\w.]+)":', r"option --\1:", message)


def _known_names(parser: ArgumentParser) -> list[str]:
    names = []
    for action in parser._actions:  # no public listing exists
        names += [option.lstrip("-") for option in action.option_strings]
    return names


def _suggestion(given: str, known: list[str], prefix: str) -> str:
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{near[0]}?" if near else "; --help lists what there is"


def run(verb: str, main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0; 2 for a mistake, in one line on stderr; 1 for a fault of ours.

    Set DIT_VCA_TRACEBACK=1 to see where a mistake was found.
    """

    def terminated(number, frame):
        print(f"dit-vca {verb}: terminated", file=sys.stderr)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, terminated)
    try:
        main(argv)
        return 0
    except Interrupted as error:
        print(f"dit-vca {verb}: {error}; start it again to go on", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"dit-vca {verb}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, SafetensorError) as error:
        if os.environ.get("DIT_VCA_TRACEBACK"):
            raise
        print(f"dit-vca {verb}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return MISTAKE
    except MemoryError as error:
        print(f"dit-vca {verb}: error: not enough memory ({error}): ask for less at a time", file=sys.stderr)
        return MISTAKE
    except (NonFinite, FloatingPointError) as error:
        print(f"dit-vca {verb}: {' '.join(str(error).split())}", file=sys.stderr)
        return FAULT
