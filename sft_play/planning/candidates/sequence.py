"""Whether rows can be joined, and processes divide the tokens of a micro-batch, before anything is loaded."""

from math import gcd

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.model.attention.table import ATTENTIONS, NAME
from sft_play.planning.candidates.batch import divisors
from sft_play.reasons.method import Padded
from sft_play.sizing.facts.architecture import Architecture
from sft_play.spelling import var
from sft_play.units import counted


def why_padded(
    packing: bool, padding_free: bool | str, rows_mix: Padded | None, attention: str
) -> Padded | None:
    """Why rows are padded; None if they can be joined end to end without seeing each other.

    Attention must know the boundaries of sequences: ours and FlashAttention do; masks would cost the square
    of all tokens. `rows_mix` is that of `ModelFacts`.

    Raises:
        ConfigError: train.packing or train.padding_free asks for what the layers cannot do.
    """
    if padding_free is False and not packing:
        return Padded("config")
    if packing or padding_free != "auto":
        if rows_mix:
            asked = "train.packing=true" if packing else "train.padding_free=true"
            remedy = "train.packing=false" if packing else "train.padding_free=auto"
            raise ConfigError(
                f"{asked} joins rows end to end, but {rows_mix.why()}; set {remedy}, which pads them"
            )
        return None
    return rows_mix or (None if ATTENTIONS[attention].boundaries else Padded("attention", attention))


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
            f"or start {ranks} processes or a multiple ({var(NGPU=ranks)})"
        )
    if padded:
        raise ConfigError(
            f"{asked} divides rows that are joined end to end, but {padded.why()}; set "
            "parallel.sequence_parallel_size=1"
        )
    if attention != NAME:
        raise ConfigError(
            f"{asked} exchanges heads around model.attention={NAME}, but this run has {attention}; set "
            "model.attention=auto, or parallel.sequence_parallel_size=1"
        )
    heads, scaling = architecture.facts.heads, architecture.facts.scaling
    if heads is None:
        raise ConfigError(
            f"{asked}: the layers of {architecture.facts.model_type} have different numbers of attention "
            "heads; set parallel.sequence_parallel_size=1"
        )
    if heads % ranks:
        raise ConfigError(
            f"{asked} does not divide the {heads} attention heads of {architecture.facts.model_type}; "
            f"sizes that do: {_sizes(heads)}"
        )
    if scaling:
        raise ConfigError(
            f"{asked}: {architecture.facts.model_type} scales its positions by the longest one that it sees "
            f"(rope type {scaling}), which differs between processes; set parallel.sequence_parallel_size=1"
        )


def group_sizes(config: RunConfig, architecture: Architecture, processes: int, machines: int) -> list[int]:
    """Sizes of groups, larger than the config's, that divide processes and heads, ascending.

    `require_divisible` may still refuse them for what the model or the config is.
    """
    asked, heads = config.parallel.sequence_ranks, architecture.facts.heads
    both = divisors(gcd(processes // machines, heads or 1))
    return [size for size in both if size > asked and size % asked == 0]


def _sizes(count: int) -> str:
    return ", ".join(map(str, divisors(count)))
