"""From a config file to everything that training needs: the run directory, the tokenizer, the tokenised data and the plan."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play import demo
from sft_play.config.load import ResolvedConfig, dump_resolved, load_config
from sft_play.config.schema import RunConfig
from sft_play.data.prepare import PreparedData, prepare
from sft_play.errors import ConfigError, LaunchError
from sft_play.hardware import detect
from sft_play.launch.accelerate import DEEPSPEED_CONFIG
from sft_play.launch.deepspeed import deepspeed_config
from sft_play.runlog import RunDir, cache_dir, console, open_run, set_aside_earlier_run
from sft_play.sizing.planner import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PLAN_VARIABLE = "SFT_PLAY_PLAN"  # a launcher that has made the plan hands its file to the ranks


@dataclass(frozen=True)
class Job:
    """One run, ready to be trained."""

    resolved: ResolvedConfig
    run: RunDir
    tokenizer: "PreTrainedTokenizerBase"
    data: PreparedData
    plan: Plan

    @property
    def config(self) -> RunConfig:
        """The settings."""
        return self.resolved.config


def load_job_config(path: str | Path, overrides: list[str]) -> ResolvedConfig:
    """The config with built-in models and data made and replaced by their folders."""
    return demo.materialise(load_config(path, overrides))


def world_size() -> int:
    """How many processes the launcher started (WORLD_SIZE; one without a launcher).

    Raises:
        ConfigError: the variable is not a number, or its companions are missing.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE={text}: expected a whole number above 0, as torchrun and accelerate set it")
    missing = [name for name in LAUNCHER_VARIABLES if not os.environ.get(name)] if int(text) > 1 else []
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={text}, but {', '.join(missing)} not set: start all processes with torchrun or "
            "`make train-distributed`, or unset WORLD_SIZE to train with one"
        )
    return int(text)


def prepare_job(resolved: ResolvedConfig, *, processes: int, progress: bool = True) -> Job:
    """Tokenises the data (or finds it in the cache) and makes the plan for so many processes."""
    from sft_play.model import load_model_config, load_tokenizer, position_limit
    from sft_play.planning import DataFacts, plan_run

    config = resolved.config
    model_config = load_model_config(config.model)
    tokenizer = load_tokenizer(config.model)
    data = prepare(config, tokenizer, model_limit=position_limit(model_config), progress=progress)
    _check_vocabulary(model_config, data)
    run = open_run(config.output.dir, config.output.name)
    handed_over = os.environ.get(PLAN_VARIABLE)
    if handed_over:
        plan = Plan.from_json(json.loads(Path(handed_over).read_text(encoding="utf-8")))
    else:
        plan = plan_run(config, model_config, DataFacts.of(data, config), detect(), processes)
    if plan.engine == "deepspeed_z2":
        deepspeed_config(DEEPSPEED_CONFIG, plan, max_grad_norm=config.train.max_grad_norm)  # before anything is launched
    return Job(resolved, run, tokenizer, data, plan)


def fingerprint(job: Job) -> str:
    """Of the settings and the data, wherever a machine keeps its cache and its runs."""
    settings = job.config.model_dump_json(exclude={"output": {"dir"}}).replace(str(cache_dir()), "")
    return hashlib.sha256(f"{settings} {job.data.cache_path.name}".encode()).hexdigest()


def agreed_plan(offers: Sequence[tuple[str, dict[str, Any]]]) -> Plan:
    """One plan for all who take part: that of the one with the least memory to spend, since free memory differs.

    Args:
        offers: fingerprint and plan, as JSON, of each.

    Raises:
        LaunchError: they were given different settings or data, or some have GPUs and some have none.
    """
    if len({given for given, _ in offers}) > 1:
        raise LaunchError("the processes were given different settings or data; start all with the same config and overrides")
    plans = [Plan.from_json(tree) for _, tree in offers]
    if len({plan.device for plan in plans}) > 1:
        raise LaunchError("some processes found a GPU and some did not; compare `make gpu-info` on the machines")
    return min(plans, key=lambda plan: plan.memory.budget_bytes if plan.memory else 0)


def _check_vocabulary(model_config: "PretrainedConfig", data: PreparedData) -> None:
    size, largest = model_config.get_text_config().vocab_size, data.stats["largest_token_id"]
    if largest >= size:
        raise ConfigError(
            f"the tokenizer made token {largest} and the model knows {size} tokens: they do not belong together; "
            "give model.name a folder or repository whose tokenizer and weights were saved together"
        )


def begin_run(job: Job) -> None:
    """Claims the run directory: moves an earlier run of the name aside and writes the config and the plan of this one.

    Called on the main rank, right before the first step: whatever fails earlier leaves the earlier run as it is.
    """
    earlier = set_aside_earlier_run(job.run) if job.config.train.resume == "never" else None
    if earlier:
        console().print(f"  [dim]an earlier run of this name was moved to {earlier}[/]")
    job.run.config.write_text(dump_resolved(job.resolved), encoding="utf-8")
    job.run.write_json(job.run.plan, job.plan.to_json())
