"""ZeRO-3 of DeepSpeed: weights are partitioned among the processes too, and gathered layer by layer.

After partition_parameters.py, parameter_offload.py and stage3.py of DeepSpeed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.engines import deepspeed
from sft_play.engines.base import FP32, Division
from sft_play.engines.sharded import Sharded
from sft_play.engines.zero import Zero
from sft_play.plan import Plan
from sft_play.timeline import TERMS, WHOLE_MODEL, Buffer, Step
from sft_play.units import AUTOCAST
from sft_play.upstream.deepspeed import forget_hooks
from sft_play.work import Work


class Zero3(Sharded, Zero):
    """DeepSpeed's ZeRO, stage 3."""

    stage = 3

    def problem(self, config: RunConfig) -> str | None:
        """PEFT's DoRA puts a new weight in the place of one in 4 bits, which DeepSpeed does not know."""
        if config.tuning.mode == "qlora" and config.tuning.lora.use_dora:
            return (
                "tuning.lora.use_dora=true with tuning.mode=qlora does not work with parallel.engine="
                f"{self.name}; use parallel.engine=fsdp2 or deepspeed_z2"
            )
        return super().problem(config)

    def divide(self, units: Sequence[Any], config: RunConfig, plan: Plan) -> None:
        """Each process keeps its part of each parameter."""
        from sft_play.engines.zero3_parts import partition

        partition(
            units,
            plan.device,
            AUTOCAST.get(plan.precision.autocast),
            offload=plan.sharing.offloads,
            folder=config.parallel.nvme_path,
        )

    def alone(self) -> AbstractContextManager[None]:
        """Sets the variables that DeepSpeed wants of a launcher, and afterwards undoes what it has set up."""
        from sft_play.engines.zero3_parts import alone

        return alone()

    def computing(self, model: Any) -> AbstractContextManager[None]:
        """In the block, modules gather their weights, as they do in training."""
        from sft_play.engines.zero3_parts import gathering

        return gathering(model)

    def let_go(self, model: Any) -> None:
        """Takes the hooks off each unit, too."""
        if hasattr(model, "destroy"):
            model.optimizer.empty_partition_cache()
            super().let_go(model)
            forget_hooks(model.module)

    def torch_half(self) -> ModuleType:
        """Parameters have their part in `ds_tensor`."""
        from sft_play.engines import zero3_parts

        return zero3_parts

    def trained_by(self, optimizer: Any) -> list[Any]:
        """DeepSpeed's own optimizer has one vector for each group in place of the parameters."""
        return [parameter for group in optimizer.fp16_groups for parameter in group]

    def trainer_arguments(
        self, config: RunConfig, plan: Plan, *, trained_parameters: int, shared: bool
    ) -> dict[str, Any]:
        """The DeepSpeed config; on a CPU, which waits for what it gathers, nothing is gathered ahead.

        What is offloaded is updated by the trainer's own AdamW, as fast on a CPU as DeepSpeed's, which would
        have to be compiled.
        """
        arguments = super().trainer_arguments(
            config, plan, trained_parameters=trained_parameters, shared=shared
        )
        tree = arguments["deepspeed"]
        zero = dict(tree["zero_optimization"])
        if plan.device == "cpu":
            zero["stage3_prefetch_bucket_size"] = 0
        if plan.sharing.offloads:
            place = {"device": "cpu", "pin_memory": plan.device == "cuda"}
            zero |= {"offload_optimizer": place, "offload_param": place}
            tree = {**tree, "zero_force_ds_cpu_optimizer": False}
        return {**arguments, "deepspeed": {**tree, "zero_optimization": zero}}

    def transform(self, step: Step, division: Division) -> Step:
        """Puts fp32 weights and flat buffers in the place of gradients and optimizer states.

        The step is that of a model that `fully_shard` has divided into the same units: weights are gathered
        alike, into a buffer from which each is copied. A process keeps the reduced gradients of its part,
        and a bucket for those that it computes, which is copied to be reduced: at the end of the backward
        pass, if it takes them all. A GPU gathers a bucket of weights ahead of their use.
        """
        own, element = step.bytes_of("gradients"), division.element_bytes
        share = own // element
        zero = deepspeed.configuration(self.stage)["zero_optimization"]
        limit, elements = zero["reduce_bucket_size"], share * division.world_size
        bucket = element * min(limit, elements)
        ahead = element * zero["stage3_prefetch_bucket_size"] if division.device == "cuda" else 0
        reduced = bucket * (1 + (division.device == "cpu"))  # gloo makes a copy of its own
        at_end = elements <= limit
        if at_end:  # what belongs to no layer is gathered until DeepSpeed's backward pass is over
            reduced += division.world_size * _outside_layers(step)
        place = _held_in_ram if division.offloads else _held
        return place(step.without("optimizer", "gradients"), division, share).with_buffers(
            Buffer("engine", bucket, "load", None),
            Buffer("engine", ahead, "forward", "evaluation"),
            Buffer("engine", reduced, "backward", "backward", "end" if at_end else "layers"),
        )

    def moved_by_offload(self, work: Work, accumulation: int) -> tuple[float, float]:
        """The GPU adds up gradients, so those of earlier micro-batches are copied there and back.

        FSDP2, whose step is traced, adds them in RAM, which reads two tensors and writes one. The sums are
        copied once more before the update, and the CPU scales them and copies weights to those that are
        gathered.
        """
        copied, summed = super().moved_by_offload(work, accumulation)
        gradients = summed / 3 / accumulation  # bytes
        copies = 2 * (accumulation - 1) + 1
        return copied + 2 * copies * gradients, 2 * 2 * gradients

    def moved_by_disk(self, work: Work, accumulation: int, share: float) -> float:
        """Weights too: what each pass reads of them, and their fp32 copies, which are read and written."""
        copied, summed = super().moved_by_offload(work, accumulation)
        weights = copied / 2 - summed / 3
        moments = super().moved_by_disk(work, accumulation, share)
        return moments + weights + 2 * FP32 * share * work.trained_elements


def _outside_layers(step: Step) -> int:
    """Bytes that a process holds of the weights that belong to no decoder layer."""
    line = step.timeline
    here = (line.events > 0) & (line.layers == WHOLE_MODEL)
    kept = np.setdiff1d(line.events[here], -line.events[line.events < 0]) - 1  # blocks that are never freed
    sources = line.source[kept]
    return int(step.sizes[sources][line.terms[sources] == TERMS.index("weights")].sum())


def _held(step: Step, division: Division, share: int) -> Step:
    """The step with what a process keeps of its part, which is flattened and cast to be updated."""
    element = division.element_bytes
    cast = FP32 if element != FP32 else 0
    return step.with_buffers(
        Buffer("optimizer", FP32 * share, "load", None),
        Buffer("optimizer", division.state_bytes(share), "forward", None),
        Buffer("gradients", element * share, "load", None),
        Buffer("engine", (element + cast) * share, "optimizer", "optimizer"),
    )


def _held_in_ram(step: Step, division: Division, share: int) -> Step:
    """The same in RAM, where gradients are kept in fp32 too, and what is trained is in one pinned block.

    With AdamW's moments on a disk, all weights are there too.
    """
    element, in_ram = division.element_bytes, division.device == "cuda"
    trained = "adapters" if step.bytes_of("adapters") else "weights"
    step = step.with_buffers(
        Buffer("optimizer", division.state_bytes(share), "forward", None, in_ram=in_ram),
        Buffer("gradients", element * share, "load", None, in_ram=in_ram),
        *(
            Buffer("gradients", FP32 * size, "load", None, in_ram=in_ram)
            for size in sub_groups(division.trained() or [[share * division.world_size]], division.world_size)
        ),
    )
    if division.states_on_disk:
        return step.without("weights", "adapters", in_ram=in_ram)
    step = step.with_buffers(Buffer("optimizer", FP32 * share, "load", None, in_ram=in_ram))
    if not in_ram:
        return step
    weights = Buffer(trained, element * share, "load", None, in_ram=True)
    return step.without(trained, in_ram=True).with_buffers(weights)


def sub_groups(groups: Sequence[Sequence[int]], world_size: int) -> list[int]:
    """Elements of the fp32 vectors of a process, each pinned for itself.

    `groups` has those of the parameters of each of the optimizer's groups.
    """
    zero = deepspeed.configuration(Zero3.stage)["zero_optimization"]
    found = []
    for group in groups:
        size = 0
        for elements in group:
            size += -(-elements // world_size)
            if size >= zero["sub_group_size"]:
                found.append(size)
                size = 0
        found += [size] if size else []
    return found
