"""Chats with a trained model, or answers the prompts of a file: the same as `sft-play infer`.

python scripts/infer.py --config configs/demo.yaml
"""

import sys

from sft_play.cli import main

if __name__ == "__main__":
    sys.exit(main(["infer", *sys.argv[1:]]))
