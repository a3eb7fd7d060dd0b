"""One process of a training run, for `accelerate launch`, `torchrun` or plain `python`.

torchrun --nproc_per_node=2 scripts/train_distributed.py --config configs/run_distributed.yaml
"""

import sys

from sft_play.machine.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from sft_play.cli import run_rank

    raise SystemExit(run_rank(sys.argv[1:]))
