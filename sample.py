"""Sample images from a run or a weight file to an npz: python sample.py --ckpt RUN --num 1000"""

import sys

from dit_vca.__main__ import run_verb

if __name__ == "__main__":
    sys.exit(run_verb("sample"))
