"""The fewest GPUs of a kind that are enough for a run, on machines of eight."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache

from sft_play.errors import ConfigError, DoesNotFitError, UntraceableModel
from sft_play.plan import Plan
from sft_play.planning.candidates import leanest_memories
from sft_play.planning.planner import fastest_plan, groups_may_help, sizes_of_groups
from sft_play.planning.request import Request

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of GPUs
PADDED = 1.1  # of the weights: up to this, more GPUs never need more memory


def fewest_gpus(request: Request, *, batch_grows: bool, least: int = 1) -> int | None:
    """How many GPUs are enough, in groups that divide tokens if need be; None if not even 512 are.

    Args:
        request: the run on a machine with such a GPU.
        batch_grows: whether the effective batch becomes as large as the number of GPUs that need it.
        least: how many there are at least.

    Raises:
        ConfigError: settings contradict each other, the model or the GPU.
    """
    config = request.config

    def saves_most(draft: Plan) -> bool:
        return draft.recomputes or config.train.asked_activations == "keep"

    @cache
    def fits(count: int) -> bool:
        run = request.with_batch_for(count).with_offload("none").on_gpus(count)
        try:
            whole = run.in_groups_of(config.parallel.sequence_ranks)
            fastest_plan(whole, saves_most, explain=False, mix=False)
        except DoesNotFitError:
            return fits_in_groups(run)
        return True

    counts = [n for n in COUNTS if n >= least and n % config.parallel.sequence_ranks == 0]
    allowed = [n for n in counts if batch_grows or request.with_batch_for(n) is request]
    if allowed[:1] == [1] and fits(1):
        return 1
    found = _first(allowed, fits)
    if found or not allowed or request.architecture.modules.padded_share(allowed[-1]) <= PADDED:
        return found
    return next(filter(fits, allowed), None)


def fits_in_groups(request: Request) -> bool:
    """Whether a run whose whole rows do not fit does if the largest groups divide their tokens."""
    if sizes := sizes_of_groups(request):
        with suppress(ConfigError, UntraceableModel):
            return groups_may_help(request) and any(
                memory.fits for memory in leanest_memories(request.in_groups_of(sizes[-1]))
            )
    return False


def _first(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first of ascending counts that fits, if each larger one fits too; None if none does.

    Not every count is tried: where weights are divided, each takes a trace of its own.
    """
    place = bisect_left(counts, True, key=fits)
    return counts[place] if place < len(counts) else None
