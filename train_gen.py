"""Train a generation model: accelerate launch train_gen.py --preset NAME --run FOLDER"""

import sys

from dit_vca.__main__ import run_verb

if __name__ == "__main__":
    sys.exit(run_verb("train"))
