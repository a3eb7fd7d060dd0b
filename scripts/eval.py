"""Evaluates a trained model on held-out rows: the same as `sft-play eval`.

python scripts/eval.py --config configs/demo.yaml
"""

import sys

from sft_play.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
