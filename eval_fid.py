"""Score images against a reference: python eval_fid.py images.npz --ref REF.npz"""

import sys

from dit_vca.__main__ import run_verb

if __name__ == "__main__":
    sys.exit(run_verb("score"))
