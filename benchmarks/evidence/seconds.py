"""How fast the clock of the planner predicts published steps to be, from the data sheet of their GPU."""

from benchmarks.evidence.runs import Run
from sft_play.machine.gpus import what_if
from sft_play.planning.speed.clock import step_seconds
from sft_play.planning.speed.devices import derived_profile
from sft_play.planning.speed.profile import MicroBatch
from sft_play.timeline import StepTrace


def tokens_per_second(trace: StepTrace, run: Run) -> float:
    """Tokens that a GPU trains on in a second, if its steps are as the traced one; as `plan --gpu` predicts.

    Nothing that was measured on a GPU is used, on this machine neither.

    Raises:
        ConfigError: the GPU is not in configs/hardware.yaml, or its speed is not.
    """
    machine = what_if(run.gpu)
    profile = derived_profile(machine, 1)
    assert profile, f"configs/hardware.yaml does not say how fast {run.gpu} is"
    tokens = run.rows * run.row_tokens
    batch = MicroBatch(tokens, tokens * run.row_tokens)
    parts = step_seconds(trace.work, profile, batch)
    return tokens / (sum(parts) - parts.update + parts.update / run.accumulation)
