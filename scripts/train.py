"""Trains: the same as `sft-play train`.

python scripts/train.py --config configs/demo.yaml
"""

import sys

from sft_play.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
