"""The fewest GPUs of a kind that are enough for a run, on machines of eight."""

from sft_play.config.schema import RunConfig
from sft_play.errors import DoesNotFitError
from sft_play.machine.gpus import what_if
from sft_play.plan import Plan
from sft_play.planning.batch import batch_for
from sft_play.planning.changes import fewest
from sft_play.planning.drafts import with_offload
from sft_play.planning.facts import DataFacts
from sft_play.planning.run import plan_run
from sft_play.sizing.architecture import AnyArchitecture

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of GPUs


def fewest_gpus(
    config: RunConfig, architecture: AnyArchitecture, facts: DataFacts, gpu: str, *, batch_grows: bool
) -> int | None:
    """How many of these GPUs are enough; None if not even 512 are.

    Args:
        config: the run.
        architecture: of the model.
        facts: of the training rows.
        gpu: a name in configs/hardware.yaml.
        batch_grows: whether the effective batch becomes as large as the number of GPUs that need it.

    Raises:
        ConfigError: settings contradict each other, the model or the GPU.
    """

    def fits(count: int) -> bool:
        grown = with_offload(with_batch_for(config, facts, count), "none")
        try:
            machine = what_if(gpu, count)
            plan_run(grown, architecture, facts, machine, count, accept=saves_most, explain=False, mix=False)
        except DoesNotFitError:
            return False
        return True

    def saves_most(draft: Plan) -> bool:
        return draft.recomputes or config.train.asked_activations == "keep"

    allowed = [count for count in COUNTS if batch_grows or with_batch_for(config, facts, count) is config]
    ranks = config.parallel.sequence_parallel_size
    if ranks > 1:
        return fewest([count for count in allowed if count % ranks == 0], fits)
    return 1 if fits(1) else fewest(allowed[1:], fits)


def with_batch_for(config: RunConfig, facts: DataFacts, count: int) -> RunConfig:
    """The run, with an effective batch of at least one row for each of so many processes, or groups."""
    count //= config.parallel.sequence_parallel_size
    batch = batch_for(config.train, count, facts.longest_row if config.train.packing else 1)
    if batch is None:
        return config
    return config.model_copy(
        update={"train": config.train.model_copy(update={"effective_batch_size": batch})}
    )
