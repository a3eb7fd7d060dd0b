"""What the processes of a run exchange in an optimizer step, and how long that takes. Pure.

Units: seconds, bytes of the whole tensor that is reduced or gathered.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.engines.base import Message
from sft_play.engines.registry import engine_of
from sft_play.plan import Plan
from sft_play.planning.profile import Curve
from sft_play.sizing.step import StepSpec

SIZES = (1 << 14, 1 << 18, 1 << 22, 1 << 26)  # of measured tensors
LATENCY_S = 20e-6  # of a collective over a link of which only the data sheet is known
# Times that the tensor goes around the ring of processes; each of them sends (n - 1) / n of it every time.
ROUNDS = {"all_reduce": 2, "all_gather": 1}


@dataclass(frozen=True)
class Collectives:
    """Seconds of the collective operations of a number of processes, by the bytes of the tensor."""

    all_reduce: Curve
    all_gather: Curve
    measured: bool = True

    def seconds(self, messages: Iterable[Message]) -> float:
        """Seconds of the messages, one after the other."""
        curves = {"all_reduce": self.all_reduce, "all_gather": self.all_gather}
        return sum(
            (one.times * float(curves[one.kind].at(np.array(one.tensor_bytes))) for one in messages), 0.0
        )

    @classmethod
    def over_link(cls, bytes_per_s: float, processes: int, latency_s: float = LATENCY_S) -> "Collectives":
        """As derived from the speed of the link from one device to another, one way."""

        def curve(kind: str) -> Curve:
            share = ROUNDS[kind] * (processes - 1) / processes
            return Curve.of(SIZES, lambda size: latency_s + share * size / bytes_per_s)

        return cls(curve("all_reduce"), curve("all_gather"), measured=False)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "Collectives":
        """The inverse of `asdict`."""
        return cls(_curve(tree["all_reduce"]), _curve(tree["all_gather"]))


def _curve(tree: Mapping[str, Any]) -> Curve:
    return Curve(tuple(tree["sizes"]), tuple(tree["seconds"]))


def messages_of(trained: int, run: RunConfig, plan: Plan) -> tuple[Message, ...]:
    """The messages of a plan that trains `trained` parameters."""
    gradient_bytes = trained * StepSpec.of(run, plan).trained_element_bytes
    return engine_of(plan.engine).messages(gradient_bytes, plan.gradient_accumulation_steps)


def sent_bytes(exchanged: Iterable[Message], processes: int) -> int:
    """Bytes that each process sends to others, by ring algorithms."""
    around = sum(ROUNDS[message.kind] * message.tensor_bytes * message.times for message in exchanged)
    return round(around * (processes - 1) / processes)
