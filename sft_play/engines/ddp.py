"""DDP: each process holds the whole model, and gradients are averaged at the end of a step."""

import math

from sft_play.engines.base import Division, Engine, Message
from sft_play.plan import Plan
from sft_play.timeline import Buffer, Step
from sft_play.units import MIB
from sft_play.work import Work

BROADCAST = 250 * MIB  # the weights of rank 0 are broadcast in buffers of this size
BUCKETS = 16  # per backward pass


class Ddp(Engine):
    """PyTorch's DistributedDataParallel."""

    def transform(self, step: Step, division: Division) -> Step:
        """Adds the buffers of the weights' broadcast and, while they are there, second copies of gradients.

        Gradients are views into buckets (gradient_as_bucket_view), which live from the first step on, also
        while the model is evaluated. Those of earlier micro-batches are beside them until the last backward
        pass of the step copies them; the backward pass of the first one makes them. DDP frees each as soon as
        it is copied. Here all live to the end of the pass, so its peak may be predicted too high by some.
        """
        gradients, beside = step.bytes_of("gradients"), division.accumulates or division.precedes
        return step.with_buffers(
            Buffer("engine", min(BROADCAST, step.peaks()["load"].bytes), "load", "load"),
            Buffer("engine", gradients if beside else 0, "forward", "backward"),
            Buffer("engine", gradients, "evaluation", "evaluation"),
        )

    def messages(self, work: Work, element_bytes: int, plan: Plan) -> tuple[Message, ...]:
        """All gradients are reduced once per step, bucket by bucket."""
        gradient_bytes = work.trained_elements * element_bytes
        buckets = max(1, math.ceil(gradient_bytes / (bucket_mib(gradient_bytes) * MIB)))
        return (Message("all_reduce", gradient_bytes / buckets, buckets),)


def bucket_mib(gradient_bytes: int) -> int:
    """The size of DDP's gradient buckets in MiB.

    No computation is left to overlap with the last bucket of a backward pass, so buckets hold a sixteenth of
    the gradients. Below 1 MiB latency dominates, above 100 MiB nothing is gained.
    """
    return min(100, max(1, gradient_bytes // BUCKETS // MIB))
