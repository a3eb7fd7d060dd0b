"""Merges a LoRA adapter into its base model: the same as `sft-play merge`.

python scripts/merge_lora.py --config configs/demo.yaml
"""

import sys

from sft_play.cli import main

if __name__ == "__main__":
    sys.exit(main(["merge", *sys.argv[1:]]))
