"""scripts/train_distributed.py on CPUs that are said to gain by compiled layers: norms sleep unless compiled."""

import sys
from functools import partial
from pathlib import Path

from sft_play.machine.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script finds its own folder alone
    import torch

    from sft_play.choices.kernels import COMPILED
    from sft_play.cli import run_rank
    from sft_play.model.layers import own_passes
    from tests.integration.slowed_rank import slow_down

    COMPILED.expected["cpu"] = (0.001, 1.41)
    torch.compile = partial(torch.compile, backend="aot_eager")
    slow_down(own_passes, 0.05)
    raise SystemExit(run_rank(sys.argv[1:]))
