"""Random steps for benchmarks that divide a model among processes of a CPU."""

import itertools
import json
import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from transformers import PretrainedConfig

from benchmarks.random_models import MORE_NAMES, TIED, draw_geometry, drawn_config
from benchmarks.small_models import NAMES
from benchmarks.steps import step_of
from sft_play.config.schema import LoraSettings
from sft_play.model.architecture.shape import setting
from sft_play.model.attention.choice import calls_ours, why_rows_mix
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec

WORLDS = (2, 4)
UNPACKED = ("gpt2",)  # its products are no torch.nn.Linear, which random_models packs
FEW_TARGETS = ("q_proj", "v_proj")
PRECISIONS = ("fp32", "bf16", "autocast")


@dataclass(frozen=True)
class Case:
    """A random model and step; each process has a micro-batch of its own size."""

    number: int
    world: int
    architecture: str
    geometry: dict[str, int]
    tied: bool
    mode: str
    dtype: str
    mixed_precision: str
    activations: str
    accumulates: bool
    joined: bool
    rows: tuple[int, ...]  # of each process
    row_tokens: int
    replicas: int  # of the model, divided among as many processes each
    defers_exchange: bool  # gradients stay whole until the last micro-batch
    sequence_ranks: int = 1  # processes that divide the tokens of a micro-batch
    few_targets: bool = False  # adapters beside the projections of queries and values alone
    reshard_after_forward: bool = True
    kept_layers: int = 0  # the last ones, if others are recomputed
    mlp_tile: int = 0  # tokens that an MLP computes at a time; 0: all

    @property
    def key(self) -> str:
        """All of it, as text."""
        return json.dumps(asdict(self))

    @property
    def config(self) -> PretrainedConfig:
        """The architecture."""
        return drawn_config(self.architecture, self.geometry, tied=self.tied)

    def step(self, rank: int) -> StepSpec:
        """The step of one process."""
        rows, tokens = self.rows[rank], self.row_tokens
        own = rows * tokens // self.sequence_ranks
        return step_of(
            mode=self.mode,
            lora=LoraSettings(r=8, target_modules=FEW_TARGETS if self.few_targets else "auto"),
            dtype=self.dtype,
            mixed_precision=self.mixed_precision,
            activations=self.activations,
            batch=JoinedRows(own) if self.joined else PaddedRows(rows, tokens),
            longest=tokens if self.joined else None,
            accumulates=self.accumulates,
            sequence_ranks=self.sequence_ranks,
            shards=self.world // self.replicas,
            replicated=self.replicas > 1,
            defers_exchange=self.defers_exchange,
            reshard_after_forward=self.reshard_after_forward,
            kept_layers=self.kept_layers,
            mlp_tile=self.mlp_tile,
        )


def draw(number: int, world: int, seed: int) -> Case:
    """The case of this number, the same for the same seed."""
    pick = random.Random(f"{seed} {number}")
    architecture, heads = pick.choice((*NAMES, *MORE_NAMES)), pick.choice((3, 4, 6, 8))
    mode = pick.choice(("full", "lora") if architecture in UNPACKED else ("full", "lora", "qlora"))
    precision = pick.choice(PRECISIONS)
    return Case(
        number=number,
        world=world,
        architecture=architecture,
        geometry=draw_geometry(pick, heads),
        tied=architecture in TIED and pick.random() < 0.4,
        mode=mode,
        dtype="bfloat16" if precision == "bf16" else "float32",
        mixed_precision="bf16" if precision == "autocast" else "no",
        activations=pick.choice(("keep", "recompute")),
        accumulates=pick.random() < 0.5,
        joined=pick.random() < 0.5,
        rows=tuple(pick.choices(pick.sample(range(2, 7), 2), k=world)),
        row_tokens=pick.choice((48, 64, 96, 130)),
        replicas=pick.choice((1, 2)) if world == 4 else 1,
        defers_exchange=pick.random() < 0.5,
    )


def drawn_cases(count: int, seed: int, *, sequence: bool) -> list[Case]:
    """So many cases; with `sequence`, of joined rows whose tokens all processes divide, and half of them."""
    worlds = itertools.cycle(WORLDS)
    if not sequence:
        return [draw(number, next(worlds), seed) for number in range(count)]
    drawn = (draw(number, world, seed) for number, world in zip(itertools.count(), worlds, strict=False))
    groups = (divided(case, max(2, case.world // (1 + case.number // 2 % 2))) for case in drawn)
    return list(itertools.islice(filter(None, groups), count))


def some_gathered(cases: list[Case], seed: int) -> list[Case]:
    """The same cases, of which weights of about two in three stay gathered for the backward pass."""
    frees = (random.Random(f"gathered {seed} {case.number}").random() < 1 / 3 for case in cases)
    return [replace(case, reshard_after_forward=free) for case, free in zip(cases, frees, strict=True)]


def mixed(cases: list[Case], seed: int) -> list[Case]:
    """The same cases with layers recomputed: all but the last few, or all with MLPs in three tiles."""
    return [_mixed(case, random.Random(f"mixed {seed} {case.number}")) for case in cases]


def _mixed(case: Case, pick: random.Random) -> Case:
    kept = pick.randint(1, case.geometry["layers"] - 1)
    recomputed = replace(case, activations="recompute", kept_layers=kept)
    if pick.random() < 0.5 or not Architecture.of(case.config).modules.tiled_mlps:
        return recomputed
    return replace(recomputed, kept_layers=0, mlp_tile=max(case.rows) * case.row_tokens // 3)


def in_ram(cases: list[Case]) -> list[Case]:
    """The same cases, whose layers are recomputed from inputs that are copied to RAM."""
    return [replace(case, activations="offload") for case in cases]


def divided(case: Case, ranks: int) -> Case | None:
    """The same with joined rows whose tokens so many processes divide; None if they cannot."""
    config = case.config
    heads = setting(config.get_text_config(), "num_attention_heads")
    if heads % ranks or not calls_ours(config) or why_rows_mix(config):
        return None
    return replace(case, joined=True, rows=(4,) * case.world, replicas=1, sequence_ranks=ranks)


def case_of(tree: dict[str, Any]) -> Case:
    """A case as JSON has it, alone or with what else is in a row of a result."""
    known = {each.name: tree[each.name] for each in fields(Case) if each.name in tree}
    return Case(**{**known, "rows": tuple(tree["rows"])})
