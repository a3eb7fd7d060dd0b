"""`sft-play plan`: a plan for this machine, for another GPU, or for each of the common ones."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from sft_play.builtin.demo import materialise
from sft_play.cache import log_of
from sft_play.commands.command_line import Arguments
from sft_play.commands.context import context_answer
from sft_play.commands.each_gpu import each_gpu_answer
from sft_play.commands.plan_flags import Asked
from sft_play.config.inputs import asked_name
from sft_play.config.load import ResolvedConfig, load_config
from sft_play.config.methods import METHODS
from sft_play.config.schema import RunConfig
from sft_play.engines.registry import label_of
from sft_play.errors import ConfigError, first_line
from sft_play.machine.gpus import Machine, detect, what_if, with_freest
from sft_play.machine.prices import price_of
from sft_play.model.architecture.published import hub_name
from sft_play.plan import Plan
from sft_play.planning.answers.advice import Change, as_overrides, plan_or_advise
from sft_play.planning.answers.kept import kept
from sft_play.planning.answers.other_machines import (
    COMMON_GPUS,
    COUNTS,
    cost_at,
    fewest_gpus,
    gpu_hours,
    scaling,
)
from sft_play.planning.answers.other_methods import other_methods
from sft_play.planning.request import Request
from sft_play.planning.rows.described_rows import DescribedRows, described_facts, described_rows
from sft_play.planning.rows.facts import DataFacts, data_facts
from sft_play.planning.speed.devices import ensure_profile
from sft_play.reasons.evidence import assumed_rows, described_images, described_lengths
from sft_play.report.layout import apart, stopped, training_command
from sft_play.report.plan import plan_answer, plan_lines, plan_others, plan_report
from sft_play.results import Planned
from sft_play.sizing.facts.architecture import Architecture, planning_architecture
from sft_play.spelling import by_make, make, quoted, var
from sft_play.ui.console import quiet_libraries
from sft_play.ui.progress import PLANNING, spinner
from sft_play.units import counted
from sft_play.vision.described import NO_PICTURE, described_picture, processor_settings


def plan_command(args: Arguments, say: Callable[[RenderableType], None] | None = None) -> Planned:
    """The plan as JSON and as a report; `complete` in the JSON is false if Ctrl-C ended the search.

    `say` shows what is known first, the plan itself, while other methods are still being planned. The report
    begins after it.

    Raises:
        ConfigError: neither a config nor a model is given, or as of `fastest_plan`.
        DoesNotFitError: nothing fits; the message has the commands that would.
    """
    asked = Asked.of(args)
    described = described_rows(asked.rows, asked.tokens, asked.lengths, asked.images, asked.pixels)
    if asked.context and (described or asked.gpu_hour):
        raise ConfigError(
            f"{var(CONTEXT=None)} asks for the longest row; {var(ROWS=None)}, {var(TOKENS=None)}, "
            f"{var(LENGTHS=None)}, {var(IMAGES=None)} and {var(GPU_HOUR=None)} have no effect on it: leave "
            "them out"
        )
    with quiet_libraries(log_of("plan")):
        resolved = _config(asked)
        config = resolved.config
        architecture, notes = planning_architecture(config.model)
        if asked.context:
            return context_answer(asked, resolved, architecture, notes)
        facts, row_notes = _facts(asked, resolved, architecture, described)
        notes = [*row_notes, *notes]
        if asked.model and not asked.gpu:
            request = Request(config, architecture, facts, what_if(COMMON_GPUS[0]), 1)
            grows = _batch_grows(asked, resolved)
            return each_gpu_answer(asked, resolved, request, notes, batch_grows=grows)
        machine = what_if(asked.gpu, asked.gpus or 1) if asked.gpu else detect()
        if asked.gpus and not asked.gpu:
            machine = with_freest(machine, asked.gpus)
        request = Request(config, architecture, facts, machine, asked.gpus or len(machine.gpus) or 1)
        if not asked.gpu:
            ensure_profile(config, machine, request.processes)
        with spinner(PLANNING):
            return _answer(asked, resolved, request, notes, say)


def _answer(
    asked: Asked,
    resolved: ResolvedConfig,
    request: Request,
    notes: list[str],
    say: Callable[[RenderableType], None] | None,
) -> Planned:
    """The plan of a request, then the other methods and numbers of GPUs."""
    chosen = cache(partial(_chosen, asked, resolved, request, notes))
    about, complete = (asked, resolved.path, notes, by_make()), True
    found = kept("plan", request, *about, find=lambda: _found(asked, resolved, *chosen()))
    tree, title, notes = found["tree"], found["title"], found["notes"]
    briefly = tree["memory"] and not asked.why
    if say and briefly:
        say(Group(plan_lines(tree, title, notes), ""))
    others: dict[str, Any] = {"methods": [], "scaling": []}
    try:
        others = kept("other ways", request, *about, find=lambda: _other_ways(asked, *chosen()))
    except KeyboardInterrupt:
        complete = False
    tree |= others | {"command": found["command"], "complete": complete}
    if briefly:
        report = apart(*plan_others(tree)) if say else plan_answer(tree, title, notes)
    else:
        report = plan_report(tree, tree["scaling"])
    if not complete:
        report = apart(report, stopped("the other methods were not planned", asked.command))
    return Planned(tree, report)


def _chosen(
    asked: Asked, resolved: ResolvedConfig, request: Request, notes: list[str]
) -> tuple[Request, Plan, list[str]]:
    """The request, on the fewest GPUs if nobody said how many; its plan; and what to say of both.

    On one GPU of this machine, if the config does not allow all and nobody asked for them.
    """
    if asked.gpu and not asked.gpus:
        count = fewest_gpus(request, batch_grows=_batch_grows(asked, resolved)) or 1
        request = request.with_batch_for(count).on_gpus(count)
        if count > 1:
            said = f"{count} x {asked.gpu}: the fewest that fit, of 1, 2, 4 ... {COUNTS[-1]}"
            notes = [said, *notes]
    try:
        plan = plan_or_advise(request, partial(_again, asked, request.processes))
    except ConfigError as error:
        if asked.gpu or asked.gpus or request.processes == 1:
            raise
        notes = [f"on one GPU of {request.processes}: {first_line(error)}", *notes]
        request = replace(request, machine=with_freest(request.machine, 1), processes=1)
        plan = plan_or_advise(request, partial(_again, asked, 1))
    return request, replace(plan, why=(*plan.why, *notes)), notes


def _found(
    asked: Asked, resolved: ResolvedConfig, request: Request, chosen: Plan, notes: list[str]
) -> dict[str, Any]:
    """The plan as JSON, what a person reads above it, and what to type to train by it."""
    facts, gpus = request.facts, request.machine.gpus
    tree = chosen.to_json() | {"method": request.config.tuning.mode}
    hours = gpu_hours(chosen) if gpus and facts.seen else None
    price = asked.gpu_hour or (price_of(gpus[0].name) if gpus else None)
    tree["plan"]["tokens_per_second"] = facts.tokens_per_second(chosen)
    tree["plan"] |= {"gpu_hours": hours, "cost": cost_at(price, hours)}
    assumed = [] if facts.seen else [assumed_rows(len(facts.lengths), facts.longest_row)]
    return {
        "tree": tree,
        "title": _title(request.config, chosen, request.machine),
        "notes": [*assumed, *notes],
        "command": _command(asked, resolved, request.config, chosen),
    }


def _other_ways(asked: Asked, request: Request, chosen: Plan, notes: list[str]) -> dict[str, Any]:
    """What else there is: the other methods, and for those who asked why, other numbers of GPUs."""
    methods, scales = list[dict[str, Any]](), list[dict[str, Any]]()
    if chosen.memory and request.machine.gpus:
        methods = other_methods(request, chosen, fewer=bool(asked.gpu) and not asked.gpus)
    if asked.why or asked.json or not chosen.memory:  # what was not sized has to say so
        scaled = request.with_offload(chosen.sharing.offload).in_groups_as(chosen.sharing)
        scales = scaling(scaled, least=request.processes)
    return {"methods": methods, "scaling": scales}


def _facts(
    asked: Asked, resolved: ResolvedConfig, architecture: Architecture, described: DescribedRows | None
) -> tuple[DataFacts, list[str]]:
    """The facts of the rows that are described, or here, or assumed; and what to say of those described."""
    config = resolved.config
    if described:
        return _described(described, config, architecture)
    facts = DataFacts.unseen(config, architecture)
    if config.data.sources or resolved.origins["data.train_path"] != "default":
        facts = data_facts(config, architecture, progress=not asked.json)
    return facts, []


def _described(
    asked: DescribedRows, config: RunConfig, architecture: Architecture
) -> tuple[DataFacts, list[str]]:
    picture, seen = NO_PICTURE, list[str]()
    settings, max_pixels = processor_settings(config.model.name), config.data.image_max_pixels
    for height, width in asked.sizes:
        picture = architecture.ask(described_picture, settings, max_pixels, height, width)
        seen = [described_images(asked.images, width, height, picture.fit.tokens, picture.row_tokens)]
    facts, longer = described_facts(asked, config, architecture.facts.position_limit, picture)
    lengths = described_lengths(
        rows=asked.rows,
        median=asked.lengths.median,
        p95=asked.lengths.p95,
        longest=facts.longest_row,
        longer=longer,
        overlong=picture.overlong(config.data.overlong),
    )
    return facts, [lengths, *seen]


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
            f"nothing to plan; give a config ({make('plan', CONFIG='configs/run_lora.yaml')}) or a model "
            f"({make('plan', MODEL='qwen3-8b', GPU=quoted('RTX 4090'))})"
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
    """What to type to plan the same with a change, which may be fewer of these GPUs, or more than these."""
    world, gpu = change.plan.sharing.world_size, asked.gpu
    if world > processes and gpu is None:
        gpu = detect().gpus[0].name
    overrides = as_overrides(change.settings, asked.overrides)
    return asked.command_with(overrides, GPU=gpu, NGPU=world if asked.gpus or world != processes else None)
