"""scripts/train_distributed.py with norms that take long: ours on rank 0, those of transformers on rank 1."""

import os
import sys
import time
from pathlib import Path

from sft_play.machine.process import die_with_parent


def slow_down(module, seconds):
    """Lets the norms of a module with kernels sleep first, but neither in a trace nor in a compiled layer."""
    import torch
    from torch._subclasses import FakeTensor

    forward = module.norm_forward

    def norm_forward(norm, x):
        if not isinstance(x, FakeTensor) and not torch.compiler.is_compiling():
            time.sleep(seconds)
        return forward(norm, x)

    module.norm_forward = norm_forward


if __name__ == "__main__":
    die_with_parent()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script finds its own folder alone
    from sft_play.cli import run_rank
    from sft_play.model.layers import library_passes, own_passes

    slow_down(*((own_passes, 0.1) if os.environ["RANK"] == "0" else (library_passes, 0.4)))
    raise SystemExit(run_rank(sys.argv[1:]))
