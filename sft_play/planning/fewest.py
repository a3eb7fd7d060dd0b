"""The fewest GPUs of a kind that are enough for a run, on machines of eight."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

from sft_play.config.schema import RunConfig
from sft_play.errors import DoesNotFitError
from sft_play.machine.gpus import Machine
from sft_play.plan import Plan
from sft_play.planning.batch import batch_for
from sft_play.planning.drafts import with_offload
from sft_play.planning.facts import DataFacts
from sft_play.planning.groups import fits_in_groups
from sft_play.planning.run import plan_run
from sft_play.sizing import questions
from sft_play.sizing.architecture import AnyArchitecture, Architecture

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of GPUs
PADDED = 1.1  # of the weights: up to this, more GPUs never need more memory


def fewest_gpus(
    config: RunConfig,
    architecture: AnyArchitecture,
    facts: DataFacts,
    machine_of: Callable[[int], Machine],
    *,
    batch_grows: bool,
    least: int = 1,
) -> int | None:
    """How many of these GPUs are enough, in groups that divide tokens if need be; None if not even 512 are.

    Args:
        config: the run.
        architecture: of the model.
        facts: of the training rows.
        machine_of: a machine with so many of these GPUs, or one of several like it.
        batch_grows: whether the effective batch becomes as large as the number of GPUs that need it.
        least: how many there are at least.

    Raises:
        ConfigError: settings contradict each other, the model or the GPU.
    """

    @cache
    def fits(count: int) -> bool:
        grown = with_offload(with_batch_for(config, facts, count), "none")
        try:
            machine = machine_of(count)
            plan_run(grown, architecture, facts, machine, count, accept=saves_most, explain=False, mix=False)
        except DoesNotFitError:
            return fits_in_groups(grown, architecture, facts, machine, count)
        return True

    def saves_most(draft: Plan) -> bool:
        return draft.activations.recomputes or config.train.asked_activations == "keep"

    ranks = config.parallel.sequence_ranks
    counts = [count for count in COUNTS if count >= least and count % ranks == 0]
    allowed = [each for each in counts if batch_grows or with_batch_for(config, facts, each) is config]
    if allowed[:1] == [1] and fits(1):
        return 1
    found, asked = _first(allowed, fits), Architecture.of(architecture)
    if found or not allowed or asked.ask(questions.padded_share, allowed[-1]) <= PADDED:
        return found
    return next(filter(fits, allowed), None)


def _first(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first of ascending counts that fits, if each larger one fits too; None if none does.

    Not every count is tried: where weights are divided, each takes a trace of its own.
    """
    place = bisect_left(counts, True, key=fits)
    return counts[place] if place < len(counts) else None


def with_batch_for(config: RunConfig, facts: DataFacts, count: int) -> RunConfig:
    """The run, with an effective batch of at least one row for each of so many processes, or groups."""
    count //= config.parallel.sequence_ranks
    batch = batch_for(config.train, count, facts.longest_row if config.train.packing else 1)
    if batch is None:
        return config
    return config.model_copy(
        update={"train": config.train.model_copy(update={"effective_batch_size": batch})}
    )
