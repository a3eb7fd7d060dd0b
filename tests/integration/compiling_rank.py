"""scripts/train_distributed.py on CPUs that are said to gain by compiled layers: norms sleep unless compiled."""

import sys
import time
from functools import partial
from pathlib import Path

from sft_play.machine.process import die_with_parent


def slow_unless_compiled(module, seconds):
    """Lets the norms of a module with kernels sleep, but neither in a trace nor in a compiled layer."""
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
    import torch

    from sft_play.choices.kernels import COMPILED
    from sft_play.cli import run_rank
    from sft_play.model.layers import own_passes

    COMPILED.expected["cpu"] = (0.001, 1.41)
    torch.compile = partial(torch.compile, backend="aot_eager")
    slow_unless_compiled(own_passes, 0.05)
    raise SystemExit(run_rank(sys.argv[1:]))
