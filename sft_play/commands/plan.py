"""`sft-play plan`: a plan for this machine, for another GPU, or for each of the common ones."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from sft_play.builtin.demo import materialise
from sft_play.cache import project_dir
from sft_play.commands.command_line import Arguments
from sft_play.commands.context import context_answer
from sft_play.commands.plan_flags import Asked
from sft_play.config.inputs import asked_name
from sft_play.config.load import ResolvedConfig, load_config
from sft_play.config.methods import METHODS
from sft_play.config.schema import RunConfig
from sft_play.engines.registry import label_of
from sft_play.errors import ConfigError
from sft_play.machine.gpus import Machine, detect, what_if
from sft_play.machine.prices import price_of
from sft_play.model.architecture.published import hub_name
from sft_play.plan import Plan
from sft_play.planning.answers.advice import Change, as_overrides, plan_or_advise
from sft_play.planning.answers.other_machines import (
    COMMON_GPUS,
    COUNTS,
    MODES,
    cost_at,
    fewest_gpus,
    gpu_hours,
    plans_by_gpu,
    scaling,
)
from sft_play.planning.answers.other_methods import cheapest_ways, other_methods
from sft_play.planning.request import Request
from sft_play.planning.rows.described_rows import DescribedRows, described_facts, described_rows
from sft_play.planning.rows.facts import DataFacts, data_facts
from sft_play.planning.speed.devices import ensure_profile
from sft_play.reasons.evidence import AssumedRows, DescribedLengths
from sft_play.reasons.reason import Reason
from sft_play.report.layout import make_command, training_command
from sft_play.report.plan import plan_answer, plan_report
from sft_play.report.ways import gpus_report
from sft_play.sizing.facts.architecture import Architecture, planning_architecture
from sft_play.ui.console import quiet_libraries
from sft_play.ui.progress import PLANNING, progress_bar, spinner
from sft_play.units import counted


def plan_command(args: Arguments) -> tuple[dict[str, Any], RenderableType]:
    """The plan as JSON and as a report.

    Raises:
        ConfigError: neither a config nor a model is given, or as of `fastest_plan`.
        DoesNotFitError: nothing fits; the message has the commands that would.
    """
    asked = Asked.of(args)
    described = described_rows(asked.rows, asked.tokens, asked.lengths)
    if asked.context and (described or asked.gpu_hour):
        raise ConfigError(
            "CONTEXT asks for the longest row; ROWS, TOKENS, LENGTHS and GPU_HOUR have no effect on it: "
            "leave them out"
        )
    with quiet_libraries(project_dir() / "plan.log"):
        resolved = _config(asked)
        config = resolved.config
        architecture, notes = planning_architecture(config.model)
        if asked.context:
            return context_answer(asked, resolved, architecture, notes)
        facts, row_notes = _facts(asked, resolved, architecture, described)
        notes = [*map(str, row_notes), *notes]
        if asked.model and not asked.gpu:
            if asked.gpu_hour:
                raise ConfigError('GPU_HOUR is the price of one kind of GPU: add GPU="H100 80GB"')
            tree = _on_each_gpu(asked, resolved, architecture, facts) | {"why": notes}
            return tree, gpus_report(tree)
        machine = what_if(asked.gpu, asked.gpus or 1) if asked.gpu else detect()
        request = Request(config, architecture, facts, machine, asked.gpus or len(machine.gpus) or 1)
        if not asked.gpu:
            ensure_profile(config, machine, request.processes)
        with spinner(PLANNING):
            if asked.gpu and not asked.gpus:
                count = fewest_gpus(request, batch_grows=_batch_grows(asked, resolved)) or 1
                request = request.with_batch_for(count).on_gpus(count)
                if count > 1:
                    said = f"{count} x {asked.gpu}: the fewest that fit, of 1, 2, 4 ... {COUNTS[-1]}"
                    notes = [said, *notes]
            chosen = plan_or_advise(request, partial(_again, asked, request.processes))
            chosen = replace(chosen, why=(*chosen.why, *notes))
            methods = []
            if chosen.memory and machine.gpus:
                methods = other_methods(request, chosen, fewer=bool(asked.gpu) and not asked.gpus)
            whole = asked.why or asked.json or not chosen.memory  # what was not sized has to say so
            scaled = request.with_offload(chosen.sharing.offload).in_groups_as(chosen.sharing)
            scales = scaling(scaled, least=request.processes) if whole else []
    tree = chosen.to_json() | {"method": config.tuning.mode, "methods": methods}
    tree["plan"]["tokens_per_second"] = facts.tokens_per_second(chosen)
    tree["plan"]["gpu_hours"] = gpu_hours(chosen) if machine.gpus and facts.seen else None
    price = asked.gpu_hour or (price_of(machine.gpus[0].name) if machine.gpus else None)
    tree["plan"]["cost"] = cost_at(price, tree["plan"]["gpu_hours"])
    command = _command(asked, resolved, request.config, chosen)
    report = plan_report(tree, scales)
    if not facts.seen:
        notes = [str(AssumedRows(len(facts.lengths), facts.longest_row)), *notes]
    if chosen.memory and not asked.why:
        report = plan_answer(tree, _title(config, chosen, machine), notes)
    return tree | {"scaling": scales, "command": command}, report


def _facts(
    asked: Asked, resolved: ResolvedConfig, architecture: Architecture, described: DescribedRows | None
) -> tuple[DataFacts, list[Reason]]:
    """The facts of the rows that are described, or here, or assumed; and what to say of those described."""
    config = resolved.config
    if described:
        facts, longer = described_facts(described, config, architecture.facts.position_limit)
        lengths = described.lengths
        found = DescribedLengths(
            rows=described.rows,
            median=lengths.median,
            p95=lengths.p95,
            longest=facts.longest_row,
            longer=longer,
            overlong=config.data.overlong,
        )
        return facts, [found]
    facts = DataFacts.unseen(config, architecture)
    if config.data.sources or resolved.origins["data.train_path"] != "default":
        facts = data_facts(config, architecture, progress=not asked.json)
    return facts, []


def _title(config: RunConfig, chosen: Plan, machine: Machine) -> str:
    """What fits where."""
    what = f"{METHODS[config.tuning.mode]} of {asked_name(config.model.name)}"
    place = counted(chosen.sharing.world_size, "process") + " on this CPU"
    if machine.gpus:
        place = f"{chosen.sharing.world_size} x {machine.gpus[0].name}"
    engine = label_of(chosen.sharing.engine, chosen.sharing.replicas, chosen.sharing.offload)
    return f"{what} fits on {place} ({engine})"


def _config(asked: Asked) -> ResolvedConfig:
    """The config file, the same with another model, or the shipped one of its tuning mode with a model."""
    if asked.model is None and not asked.config:
        raise ConfigError(
            "nothing to plan; give a config (make plan CONFIG=configs/run_lora.yaml) or a model "
            '(make plan MODEL=qwen3-8b GPU="RTX 4090")'
        )
    model = [f"model.name={hub_name(asked.model)}"] if asked.model is not None else []
    overrides = [*model, *asked.overrides]
    if asked.config:
        return materialise(load_config(asked.config, overrides))
    if any(override.startswith("data.sources=") for override in asked.overrides):
        overrides.insert(0, "data.train_path=null")
    resolved = load_config(_shipped("lora"), overrides)
    if resolved.config.tuning.mode != "lora":
        resolved = load_config(_shipped(resolved.config.tuning.mode), overrides)
    for name in ("data.train_path", "tuning.mode"):  # those of the file are examples
        if resolved.origins[name] != "override":
            resolved.origins[name] = "default"
    return materialise(resolved)


def _shipped(mode: str) -> Path:
    """The config that a person starts from in this tuning mode."""
    return Path(f"configs/run_{mode}.yaml")


def _batch_grows(asked: Asked, resolved: ResolvedConfig) -> bool:
    """Whether the effective batch may grow with the GPUs, since nobody has said how large it should be."""
    return not asked.config and resolved.origins["train.effective_batch_size"] != "override"


def _command(asked: Asked, resolved: ResolvedConfig, config: RunConfig, chosen: Plan) -> str:
    """What to type to train by this plan; a model alone is trained by the shipped config of its mode."""
    path, overrides = resolved.path, list(resolved.overrides)
    if not asked.config:
        overrides = [override for override in overrides if not override.startswith("tuning.mode=")]
        if resolved.origins["data.train_path"] == "default":
            overrides.append("data.train_path=my.jsonl")
    planned = load_config(resolved.path, overrides).config.train
    if planned.effective_batch_size != config.train.effective_batch_size:  # it has grown with the GPUs
        overrides.append(f"train.effective_batch_size={config.train.effective_batch_size}")
    return training_command(chosen, path, overrides)


def _again(asked: Asked, processes: int, change: Change) -> str:
    """What to type to plan the same with a change, which may be more GPUs than these."""
    world, gpu = change.plan.sharing.world_size, asked.gpu
    if world != processes and gpu is None:
        gpu = detect().gpus[0].name
    named = {"MODEL": asked.model, "GPU": gpu, "NGPU": world if asked.gpus or world != processes else None}
    return make_command("plan", asked.config, as_overrides(change.settings, asked.overrides), **named)


def _on_each_gpu(
    asked: Asked, resolved: ResolvedConfig, architecture: Architecture, facts: DataFacts
) -> dict[str, Any]:
    """The plans for so many of each common GPU, or the fewest that are enough, in one tuning mode or each."""
    config = resolved.config
    modes = MODES if resolved.origins["tuning.mode"] == "default" else (config.tuning.mode,)
    grows = _batch_grows(asked, resolved)
    request = Request(config, architecture, facts, what_if(COMMON_GPUS[0]), 1)
    with progress_bar(PLANNING, len(COMMON_GPUS)) as planned:
        cards = []
        for card in plans_by_gpu(request, modes, asked.gpus, batch_grows=grows):
            cards.append(card)
            planned(1)
        cheapest = [] if asked.gpus else cheapest_ways(request, modes, cards)
    return {
        "model": config.model.name,
        "gpus": asked.gpus,
        "row_tokens": facts.longest_row,
        "seen": facts.seen,
        "cheapest": cheapest,
        "cards": cards,
    }
