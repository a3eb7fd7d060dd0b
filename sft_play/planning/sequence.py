"""Whether the processes of a run can divide the tokens of a micro-batch, before anything is loaded."""

from math import gcd

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.model.attention_table import NAME
from sft_play.planning.batch import divisors
from sft_play.reasons.method import Padded
from sft_play.sizing import questions
from sft_play.sizing.architecture import Architecture
from sft_play.units import counted


def require_divisible(
    config: RunConfig,
    architecture: Architecture,
    attention: str,
    padded: Padded | None,
    processes: int,
    machines: int,
) -> None:
    """Checks parallel.sequence_parallel_size against processes, model and attention.

    Raises:
        ConfigError: it does not divide the processes of a machine or the attention heads, or tokens see each
            other elsewhere than in our attention over joined rows.
    """
    ranks = config.parallel.sequence_ranks
    if ranks == 1:
        return
    asked = f"parallel.sequence_parallel_size={ranks}"
    each = processes // machines
    if each % ranks:
        raise ConfigError(
            f"{asked} does not divide the {counted(each, 'process')} of a machine; allowed: {_sizes(each)}; "
            f"or start {ranks} processes or a multiple (NGPU={ranks})"
        )
    if padded:
        raise ConfigError(
            f"{asked} divides rows that are joined end to end, but {padded.why()}; set "
            "parallel.sequence_parallel_size=1"
        )
    if attention != NAME:
        raise ConfigError(
            f"{asked} exchanges heads around model.attention={NAME}, but this run has {attention}; set "
            f"model.attention=auto, or parallel.sequence_parallel_size=1"
        )
    heads, scaling = architecture.ask(questions.heads_and_scaling)
    if heads is None:
        raise ConfigError(
            f"{asked}: the layers of {architecture.config.model_type} have different numbers of attention "
            "heads; set parallel.sequence_parallel_size=1"
        )
    if heads % ranks:
        raise ConfigError(
            f"{asked} does not divide the {heads} attention heads of {architecture.config.model_type}; "
            f"sizes that do: {_sizes(heads)}"
        )
    if scaling:
        raise ConfigError(
            f"{asked}: {architecture.config.model_type} scales its positions by the longest one that it sees "
            f"(rope type {scaling}), which is another on each process; set parallel.sequence_parallel_size=1"
        )


def group_sizes(config: RunConfig, architecture: Architecture, processes: int, machines: int) -> list[int]:
    """Sizes of groups, larger than the config's, that divide processes and heads, ascending.

    `require_divisible` may still refuse them for what the model or the config is.
    """
    asked, heads = config.parallel.sequence_ranks, architecture.ask(questions.heads_and_scaling)[0]
    both = divisors(gcd(processes // machines, heads or 1))
    return [size for size in both if size > asked and size % asked == 0]


def _sizes(count: int) -> str:
    return ", ".join(map(str, divisors(count)))
