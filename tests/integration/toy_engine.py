"""An engine of a dozen lines, all that it takes to plan, launch and train with it.

accelerate launch ... toy_engine.py <specs.json>     trains as worker.py does, with this engine known
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script finds its own folder alone

from sft_play.engines import registry  # noqa: E402
from sft_play.engines.base import Division, Engine, Message  # noqa: E402
from sft_play.plan import Plan  # noqa: E402
from sft_play.timeline import Buffer, Step  # noqa: E402
from sft_play.units import MIB  # noqa: E402
from sft_play.work import Work  # noqa: E402

BUFFER = 123 * MIB


class Toy(Engine):
    """accelerate's DDP under another name, with a buffer that it claims to need, and weights that it gathers."""

    def transform(self, step: Step, division: Division) -> Step:
        return step.with_buffers(Buffer("engine", BUFFER, "load", None))

    def full_weights(self, model: Any, types: Any = None) -> dict[str, Any]:
        """The mean over all processes, which waits for those that do not take part."""
        from torch import distributed

        weights = {name: value.clone() for name, value in model.state_dict().items()}
        for value in weights.values():
            distributed.all_reduce(value)
            value /= distributed.get_world_size()
        return weights

    def messages(self, work: Work, element_bytes: int, plan: Plan) -> tuple[Message, ...]:
        return (Message("all_reduce", work.trained_elements * element_bytes, 1),)


def with_toy() -> list[Engine]:
    """All engines, this one preferred to the others that distribute."""
    return [
        registry.ALONE,
        Toy(name="toy", label="Toy", principle="keeps a buffer that nothing needs"),
        *registry.distributed_engines(),
    ]


if __name__ == "__main__":
    registry.ENGINES[:] = with_toy()
    from tests.integration.worker import main

    sys.exit(main(Path(sys.argv[1])))
