"""Many commands, each a process forked from one that has imported what they need: `python forked.py < JSON > JSON`.

Reads {name: arguments}, runs `dit-vca ARGUMENTS` for each in the current folder, and writes {name: [code, stdout, stderr]}.
"""

import json
import os
import sys
import tempfile
import traceback


def run(arguments):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            in_child(arguments, out.fileno(), err.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0), err.seek(0)
        return code, out.read().decode(), err.read().decode()


def in_child(arguments, out, err):
    from dit_vca.__main__ import main

    code = 1
    try:
        os.dup2(out, 1), os.dup2(err, 2)
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    import diffusers.models.autoencoders.autoencoder_kl  # noqa: F401

    import dit_vca.evaluation.score
    import dit_vca.sampling
    import dit_vca.training  # noqa: F401

    json.dump({name: run(arguments) for name, arguments in json.load(sys.stdin).items()}, sys.stdout)
