"""What some settings of a plan cost or save in memory: the same plan without them is sized. Pure."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of
from sft_play.plan import Estimator, Memory, Plan
from sft_play.reasons import choices, method


def master_weights(config: RunConfig, plan: Plan, estimate: Estimator) -> Iterator[str]:
    """What fp32 masters cost, or pure bf16 saves: the same plan in the other type is sized."""
    for changed_config, changed_plan in _other_dtype(config, plan):
        other = estimate(changed_config, changed_plan, complete=True)
        masters, pure = (plan.memory, other) if plan.precision.dtype == "float32" else (other, plan.memory)
        dtype: Any = plan.precision.dtype
        assert masters and pure
        if masters.host and pure.host:
            yield method.master_weights(dtype, masters.host.needed_bytes - pure.host.needed_bytes, "RAM")
        else:
            yield method.master_weights(dtype, masters.process_bytes - pure.process_bytes)


def _other_dtype(config: RunConfig, plan: Plan) -> Iterator[tuple[RunConfig, Plan]]:
    """Full fine-tuning in pure bf16 instead of with fp32 masters, or the other way round, if it can be.

    An engine that casts the model keeps fp32 masters of its own either way.
    """
    bf16 = plan.device == "cpu" or plan.precision.autocast == "bf16"
    if config.tuning.mode == "full" and bf16 and not engine_of(plan.sharing.engine).casts_model:
        dtype = "bfloat16" if plan.precision.dtype == "float32" else "float32"
        precision = replace(plan.precision, dtype=dtype)
        yield config.changed({"model.dtype": dtype}), replace(plan, precision=precision)


def states_on_disk(config: RunConfig, plan: Plan, estimate: Estimator) -> Iterator[str]:
    """What `parallel.nvme_path` saves: the same plan without it is sized."""
    folder = config.parallel.nvme_path
    if folder and plan.memory:
        kept = estimate(config.changed({"parallel.nvme_path": None}), plan, complete=True)
        files = "AdamW's states" + " and weights" * engine_of(plan.sharing.engine).weights_on_disk
        yield choices.states_on_disk(files, folder, _ram(kept) - _ram(plan.memory))


def _ram(memory: Memory) -> int:
    """What the processes need of a machine's RAM; of a CPU, what one needs."""
    return memory.host.needed_bytes if memory.host else memory.process_bytes
