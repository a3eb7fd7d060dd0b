"""When MLPs compute in tiles: how many there are, and whether they could make a plan fit. Pure.

A tile of a thousand tokens keeps a GPU busy. With eight of them, what is left of the intermediates is less
than what attention needs beside them, so more would save little, and each has to be traced.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.config.train import TrainConfig
from sft_play.errors import ConfigError
from sft_play.plan import Plan
from sft_play.reasons import choices

MOST, FEWEST = 8, 4
TILE_TOKENS = 1024  # at least, where nobody says how many tiles there are
SAVED = ("activations", "temporaries")  # terms of a peak that tiles make smaller


def may_tile(config: RunConfig, longest: int) -> bool:
    """Whether plans for rows of up to so many tokens may have MLPs in tiles: if asked for, or long enough."""
    if config.train.mlp_tiles != "auto":
        return config.train.asks_tiles
    can = config.train.asked_activations != "keep" and not config.train.asks_compile
    return can and config.parallel.divided(longest) >= FEWEST * TILE_TOKENS


def untiled(train: TrainConfig, model_type: str) -> ConfigError:
    """That the layers of such a model cannot do what is asked for."""
    return ConfigError(
        f"{train.tiles_setting}: the layers of {model_type} have no MLP that can compute in "
        "tiles (mixtures of experts have none); set train.mlp_tiles=auto"
    )


def with_tiles(train: TrainConfig, drafts: Sequence[Plan]) -> list[Plan]:
    """The drafts of a model whose MLPs can compute in tiles: those that recompute, in tiles too.

    As many as are asked for, and nothing else, or one for each thousand tokens of the largest micro-batch.
    """
    found = []
    for draft in drafts:
        most = min(MOST, draft.sharing.tokens_of_rank(draft.rows.most_tokens) // TILE_TOKENS)
        counts = (1, most) if train.mlp_tiles == "auto" else (train.mlp_tiles,)
        for count in counts if draft.activations.recomputes else (1,):
            tiled = replace(draft.activations, mlp_tiles=count)
            found.append(replace(draft, activations=tiled))
    return found


def worth_sizing(drafts: list[Plan], sized: Sequence[Plan]) -> list[Plan]:
    """The drafts, but for those whose tiles, or activations in RAM, cannot be what makes them fit.

    Plans that were sized, recompute, and share the work alike would not fit even without what that saves.
    """

    def may_fit(draft: Plan) -> bool:
        saved = SAVED if draft.activations.in_tiles else ("activations",) * draft.offloads_activations
        alike = [plan for plan in sized if plan.sharing == draft.sharing and plan.activations.recomputes]
        return not saved or not alike or any(each.memory.fits_without(saved) for each in alike if each.memory)

    return [draft for draft in drafts if may_fit(draft)]


def why_tiled(train: TrainConfig, plan: Plan) -> list[str]:
    """What is said of a plan whose MLPs compute in tiles."""
    if not plan.activations.in_tiles:
        return []
    cause: Any = "config" if train.asks_tiles else "exceed"
    return [choices.tiles(plan.activations.mlp_tiles, plan.mlp_tile, cause)]
