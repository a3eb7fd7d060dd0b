"""Random training runs: an architecture, settings, and rows of very different lengths."""

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.random_models import MORE_NAMES, TIED, draw_geometry, drawn_config
from benchmarks.small_models import NAMES
from sft_play.builtin.models import byte_level_tokenizer
from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.prepare import PreparedData
from sft_play.data.stats import SPLITS
from sft_play.errors import ConfigError, SftPlayError
from sft_play.job import Job
from sft_play.launch.ranks import RankEnvironment
from sft_play.machine.gpus import detect
from sft_play.model.load import load_model_config, load_tokenizer
from sft_play.parts import IGNORED
from sft_play.plan import Plan
from sft_play.planning.budget import memory_device
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.speed.clock import batches_of
from sft_play.runlog import open_run
from sft_play.sizing.estimate.estimator import estimator
from sft_play.sizing.facts.architecture import Architecture
from sft_play.train.ranks import from_main

ARCHITECTURES = (*NAMES, *MORE_NAMES, "nemotron", "deepseek_v3", "qwen3_5_text")
PADDED = ("nemotron", "qwen3_5_text")  # no row boundaries reach their attention
FUSED = ("mixtral", "qwen3_moe", "deepseek_v3")  # experts, whose adapters have no dropout
WITHOUT_INPUT_NORM = ("gpt2", "olmo2", "olmo3", "exaone4")
UNPACKED = ("gpt2", "mixtral", "qwen3_moe", "deepseek_v3")  # weights that QLoRA does not pack, or refuses
LATENT = dict(  # of DeepSeek's attention and experts
    q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
    first_k_dense_replace=1, moe_intermediate_size=128,
)  # fmt: skip
LINEAR = dict(  # attention of Qwen 3.5, of three layers in four
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
)  # fmt: skip
NEW_TOKENS = ["<tool>", "<end of tool>"]
LONGEST = 800  # tokens
MEDIAN, SPREAD = 60, 1.1  # of the tokens of rows, which are drawn from a log-normal distribution
ENOUGH = 2**40  # bytes: memory decides nothing
METHODS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"dropout": 0.05}, {"use_dora": True}, {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["input_layernorm"]}, {"use_dora": True, "modules_to_save": ["lm_head"]},
    {"use_rslora": True},
)  # fmt: skip
OPTIMIZERS_OF = {"deepspeed_z2": ("adamw", "adamw", "adamw_8bit"), "fsdp2": ("adamw",)}
OPTIMIZERS = ("adamw", "adamw", "adamw", "adafactor", "lion_32bit", "adamw_8bit", "lion_8bit")


@dataclass(frozen=True)
class RandomRun:
    """A model, settings of a run and its rows; all follow from seed and number."""

    number: int
    seed: int
    architecture: str
    geometry: dict[str, int]
    tied: bool
    precision: str  # "fp32", "bf16" or "autocast"
    engine: str  # "none" for one process
    tree: dict[str, Any]  # sections of the config
    rows: tuple[tuple[int, int], ...]  # tokens, and those without loss in front
    val: tuple[tuple[int, int], ...]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return 1 if self.engine == "none" else 2

    @property
    def probes(self) -> bool:
        """Whether its batches are probed before: every second one."""
        return self.number % 2 == 1

    @property
    def key(self) -> str:
        """All of it, as text."""
        return json.dumps(asdict(self))

    @property
    def architecture_config(self) -> PretrainedConfig:
        """The architecture."""
        changes: dict[str, Any] = {}
        if self.architecture == "deepseek_v3":
            changes = LATENT | {"num_key_value_heads": self.geometry["heads"]}
        if self.architecture == "qwen3_5_text":
            changes = LINEAR | {"head_dim": 64}
        return drawn_config(self.architecture, self.geometry, tied=self.tied, **changes)


def draw(number: int, seed: int, engines: tuple[str, ...]) -> RandomRun:
    """The run of this number, the same for the same seed."""
    pick = random.Random(f"{seed} {number}")
    architecture, heads = pick.choice(ARCHITECTURES), pick.choice((3, 4, 6, 8))
    mode = pick.choice(("full", "lora") if architecture in UNPACKED else ("full", "lora", "qlora"))
    geometry = draw_geometry(pick, heads)
    precision, engine = pick.choice(("fp32", "bf16", "autocast")), pick.choice(engines)
    rows = _draw_rows(pick, pick.randint(12, 60))
    longest = max(tokens for tokens, _ in rows)
    world = 1 if engine == "none" else 2
    tree = {
        "model": {"dtype": "bfloat16" if precision == "bf16" else "float32", "new_tokens": []},
        "tuning": _draw_tuning(pick, mode, architecture),
        "train": _draw_steps(pick, architecture, longest, world)
        | {
            "mixed_precision": "bf16" if precision == "autocast" else "no",
            "optimizer": pick.choice(OPTIMIZERS_OF.get(engine, OPTIMIZERS)),
        },
        "eval": {"batch_size": pick.choice(("auto", "auto", 1, 3))},
    }
    if "modules_to_save" not in tree["tuning"].get("lora", {}) and pick.random() < 0.2:
        tree["model"]["new_tokens"] = NEW_TOKENS
    return RandomRun(
        number=number,
        seed=seed,
        architecture=architecture,
        geometry=geometry,
        tied=architecture in TIED and pick.random() < 0.4,
        precision=precision,
        engine=engine,
        tree=tree,
        rows=rows,
        val=_draw_rows(pick, pick.randint(2, 12)),
    )


def divided(run: RandomRun) -> RandomRun | None:
    """The same with rows joined, their tokens divided between its two processes; None if they cannot be."""
    if run.world_size == 1 or run.architecture in PADDED or run.geometry["heads"] % run.world_size:
        return None
    train = {name: value for name, value in run.tree["train"].items() if name != "neftune_noise_alpha"}
    parallel = {"sequence_parallel_size": run.world_size}
    return replace(run, tree={**run.tree, "train": train | {"padding_free": "auto"}, "parallel": parallel})


def _draw_rows(pick: random.Random, count: int) -> tuple[tuple[int, int], ...]:
    lengths = [max(1, min(LONGEST, round(MEDIAN * pick.lognormvariate(0, SPREAD)))) for _ in range(count)]
    # the first token of a row never has loss
    return tuple((tokens, max(1, round(tokens * pick.uniform(0, 0.9)))) for tokens in lengths)


def _draw_steps(pick: random.Random, architecture: str, longest: int, world: int) -> dict[str, Any]:
    """How rows are dealt to so many processes."""
    layout = "padded" if architecture in PADDED else pick.choice(("joined", "joined", "packed", "padded"))
    accumulation = pick.choice((None, 1, 2, 2))
    shares = world * (accumulation or 1)
    sequences = pick.choice((1, 1, 2, 3) if layout == "packed" else (2, 3, 4, 8)) * shares
    steps: dict[str, Any] = {
        "packing": layout == "packed",
        "padding_free": False if layout == "padded" else "auto",
        "effective_batch_size": longest * sequences if layout == "packed" else sequences,
        "max_steps": pick.randint(2, 4),
        "gradient_checkpointing": pick.random() < 0.5,
        "seed": pick.randrange(1000),
    }
    if accumulation:
        steps["grad_accum"] = accumulation
    if pick.random() < 0.2:
        steps["neftune_noise_alpha"] = 5
    return steps


def _draw_tuning(pick: random.Random, mode: str, architecture: str) -> dict[str, Any]:
    if mode == "full":
        return {"mode": mode}
    left_out = {"use_dora"} if mode == "qlora" else {"dropout"} if architecture in FUSED else set()
    methods = [method for method in METHODS if not left_out & set(method)]
    if architecture in WITHOUT_INPUT_NORM:
        methods = [method for method in methods if method.get("modules_to_save") != ["input_layernorm"]]
    return {"mode": mode, "lora": {"r": pick.choice((4, 8, 16, 33)), **pick.choice(methods)}}


def save_model(run: RandomRun, folder: Path) -> None:
    """Writes the model with random weights and its tokenizer."""
    torch.manual_seed(run.number)
    save_architecture(run, folder)
    AutoModelForCausalLM.from_config(run.architecture_config).save_pretrained(folder)


def save_architecture(run: RandomRun, folder: Path) -> None:
    """Writes the model without weights: its config and its tokenizer."""
    config = run.architecture_config
    byte_level_tokenizer([], 300, config.max_position_embeddings).save_pretrained(folder)
    config.save_pretrained(folder)


def config_of(run: RandomRun, model: Path, output: Path) -> RunConfig:
    """The config of the run.

    Raises:
        ValueError: settings contradict each other.
    """
    tree, engine = run.tree, "auto" if run.engine == "none" else run.engine
    return RunConfig.model_validate(
        {
            "model": {"name": str(model), **tree["model"]},
            "data": {"train_path": "generated"},
            "tuning": tree["tuning"],
            "train": {"probe": False, "report_to": [], **tree["train"]},
            "eval": tree["eval"],
            "parallel": {"engine": engine, **tree.get("parallel", {})},
            "output": {"name": f"run-{run.number}", "dir": str(output)},
        }
    )


def _dataset(rows: tuple[tuple[int, int], ...]) -> Dataset:
    return Dataset.from_list(
        [
            {
                "input_ids": [7 + place % 200 for place in range(tokens)],
                "labels": [IGNORED] * prompt + [9] * (tokens - prompt),
                "length": tokens,
            }
            for tokens, prompt in rows
        ]
    )


def _request(config: RunConfig, architecture: PretrainedConfig, facts: DataFacts, world: int) -> Request:
    return Request(config, Architecture.of(architecture), facts, detect(), world, budget_bytes=ENOUGH)


def _planned(config: RunConfig, architecture: PretrainedConfig, facts: DataFacts, world: int) -> Plan | str:
    """The plan, or why there is none, which all processes are told."""
    try:
        return fastest_plan(_request(config, architecture, facts, world))
    except SftPlayError as error:
        return str(error)


def facts_of(run: RandomRun, config: RunConfig, output: Path) -> tuple[PreparedData, DataFacts]:
    """The rows of the run, and what a plan needs to know of them."""
    longest = max(tokens for tokens, _ in run.rows)
    data = PreparedData(_dataset(run.rows), _dataset(run.val), None, longest, dict.fromkeys(SPLITS), output)
    return data, DataFacts.of(data, config)


def job_of(run: RandomRun, model: Path, output: Path, ranks: RankEnvironment) -> Job:
    """The job with its plan, which holds the prediction.

    Raises:
        SftPlayError: these settings are refused for this model.
        ValueError: settings contradict each other.
    """
    config = config_of(run, model, output)
    data, facts = facts_of(run, config, output)
    architecture = load_model_config(config.model)
    planned = from_main(lambda: _planned(config, architecture, facts, run.world_size))
    if isinstance(planned, str):
        raise ConfigError(planned)
    folder = open_run(str(output), f"run-{run.number}", ranks.rank)
    resolved = ResolvedConfig(config, {}, Path("bench"))
    return Job(resolved, folder, architecture, load_tokenizer(config.model), data, detect(), planned, ranks)


def without_memory(plan: Plan) -> dict[str, Any]:
    """A plan as JSON, without its prediction and reasons."""
    return replace(plan, memory=None, why=(), alternatives=()).to_json()


def predicted_again(run: RandomRun, tree: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    """The plan of a run that was measured before, and bytes of each phase as today's code predicts them.

    Args:
        run: the run.
        tree: its plan, as `without_memory` gives it; None makes it again.
        folder: for the model's config and tokenizer.
    """
    save_architecture(run, folder)
    config = config_of(run, folder, folder)
    architecture, (_, facts) = load_model_config(config.model), facts_of(run, config, folder)
    if tree is None:
        plan = fastest_plan(_request(config, architecture, facts, run.world_size), explain=False)
        assert plan.memory
        return {"plan": without_memory(plan), "predicted": plan.memory.phases}
    usual = memory_device(config, detect(), run.world_size)
    assert usual
    known = Architecture.of(architecture)
    estimate = estimator(known, replace(usual, budget_bytes=ENOUGH), batches_of(known, facts))
    return {"plan": tree, "predicted": estimate(config, Plan.from_json(tree), complete=True).phases}
