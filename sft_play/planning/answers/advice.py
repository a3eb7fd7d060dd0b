"""What makes a run fit that fits nowhere: each change is planned as the request that it gives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.config.load import ResolvedConfig
from sft_play.config.methods import lighter_modes
from sft_play.engines.registry import chosen_engines
from sft_play.errors import ConfigError, DoesNotFitError
from sft_play.machine.gpus import with_freest
from sft_play.plan import Plan
from sft_play.planning.allowed import leanest_memories
from sft_play.planning.answers.other_machines import fewest_gpus
from sft_play.planning.candidates.drafts import choose_precision
from sft_play.planning.candidates.sequence import group_sizes
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request, Settings
from sft_play.report.layout import training_command
from sft_play.report.misfit import advice_text

MOST = 3  # changes of settings that are planned and shown
SHARES = (0.75, 0.5, 0.25)  # of the longest row, for shorter ones


@dataclass(frozen=True)
class Change:
    """Settings with which a run fits, and its plan with them."""

    settings: Settings
    plan: Plan
    tokens_per_second: float | None

    @classmethod
    def of(cls, request: Request, settings: Settings) -> "Change":
        """Plans the run, which has these settings already; errors as of `fastest_plan`."""
        plan = fastest_plan(request, explain=False)
        return cls(settings, plan, request.facts.tokens_per_second(plan))


def plan_or_advise(request: Request, typed: Callable[[Change], str]) -> Plan:
    """The fastest plan that fits; `typed` gives the command that asks for the run with a change.

    Raises:
        ConfigError: as of `fastest_plan`.
        DoesNotFitError: nothing fits; the message has what would, each with its plan's memory and speed.
    """
    try:
        return fastest_plan(request)
    except DoesNotFitError as error:
        ways = [(typed(change), change.plan, change.tokens_per_second) for change in advise(request)]
        advice = advice_text(ways, gpus=bool(request.machine.gpus))
        raise DoesNotFitError(f"{error}\n{advice}") from None


def advise(request: Request) -> list[Change]:
    """Changes with which the run fits as it is planned then, the one that costs least first; [] if none."""
    gpus = [*_fewer_gpus(request)] or [*_more_gpus(request)]
    return [*islice(_fitting(request, _kinds(request)), MOST), *gpus]


def _divisions(request: Request) -> list[Settings]:
    """Groups that divide tokens, from small to large; the effective batch stays."""
    config, found = request.config, list[Settings]()
    for size in group_sizes(config, request.architecture, request.processes, request.on_machines):
        settings: dict[str, Any] = {"parallel.sequence_parallel_size": size}
        if config.train.grad_accum != "auto":
            settings["train.grad_accum"] = config.train.grad_accum * config.parallel.divided(size)
        found.append(settings)
    return found


def _kinds(request: Request) -> Iterator[list[Settings]]:
    """Ways to save memory, of each kind from the weakest to the strongest; the kinds by what they cost."""
    config, train = request.config, request.config.train
    if train.asked_activations != "auto":  # what the config has decided is left to the plan
        way = "activations" if train.activations != "auto" else "gradient_checkpointing"
        yield [{f"train.{way}": "auto"}]
    if train.batch_size != "auto":
        yield [{"train.batch_size": "auto"}]
    if config.parallel.engine != "auto" and request.processes > 1:
        yield [{"parallel.engine": engine.name} for engine in chosen_engines()]
    if config.parallel.offload == "none":
        yield [{"parallel.offload": "auto"}]
    if config.parallel.reshard_after_forward is False:
        yield [{"parallel.reshard_after_forward": "auto"}]
    yield _divisions(request)
    lighter_states = OPTIMIZERS[train.optimizer].lighter
    # whose states may be larger, but not of each process: more engines divide them
    larger = [name for name, other in OPTIMIZERS.items() if other.lighter == train.optimizer]
    yield [{"train.optimizer": name} for name in (lighter_states, *larger) if name]
    device = request.device
    if config.tuning.mode == "full" and device.bf16 and choose_precision(config, device)[0] == "float32":
        yield [{"model.dtype": "bfloat16"}]
    lighter = lighter_modes(config.tuning.mode, config.tuning.lora.init)
    bf16 = {"train.float8": False} if train.float8 else {}
    plain = {"train.compile": False} if train.asks_compile else {}
    yield [{"tuning.mode": mode} | bf16 | (plain if mode == "qlora" else {}) for mode in lighter]
    lengths = [int(request.facts.longest_row * share) // 64 * 64 for share in SHARES]
    yield [{"model.max_seq_len": length} for length in lengths if length]


def _fitting(request: Request, kinds: Iterator[list[Settings]]) -> Iterator[Change]:
    """Of each kind, the weakest way with which the run fits."""
    for ways in kinds:
        for settings in ways:
            if _fits(request, settings):
                with suppress(ConfigError, DoesNotFitError):
                    yield Change.of(request.changed(settings), settings)
                    break


def _fits(request: Request, settings: Settings) -> bool:
    """Whether the leanest plan with these settings fits; not if they contradict each other or the model."""
    try:
        return any(memory.fits for memory in leanest_memories(request.changed(settings)))
    except (ConfigError, DoesNotFitError):
        return False


def _fewer_gpus(request: Request) -> Iterator[Change]:
    """The most of these GPUs that are enough without the fullest ones, or one, which has no communicator."""
    if request.on_machines > 1:
        return
    counts = range(min(request.processes, len(request.machine.gpus)), 0, -1)
    left = [replace(request, machine=with_freest(request.machine, n), processes=n) for n in counts]
    for more, fewer in pairwise(left):
        freer = (fewer.device.free_bytes or 0) > (more.device.free_bytes or 0)
        if (freer or fewer.processes == 1) and _fits(fewer, {}):
            with suppress(ConfigError, DoesNotFitError):
                yield Change.of(fewer, {})
                return


def _more_gpus(request: Request) -> Iterator[Change]:
    """The fewest GPUs like these that are enough, with a batch that has a row for each."""
    if not request.machine.gpus:
        return
    with suppress(ConfigError, DoesNotFitError):
        if count := fewest_gpus(request, batch_grows=True, least=request.processes + 1):
            more = request.with_batch_for(count)
            batch = more.config.train.effective_batch_size
            settings = {} if more is request else {"train.effective_batch_size": batch}
            yield Change.of(more.on_gpus(count), settings)


def changed_command(resolved: ResolvedConfig, change: Change) -> str:
    """What to type to train a run with a change."""
    return training_command(change.plan, resolved.path, as_overrides(change.settings, resolved.overrides))


def as_overrides(settings: Settings, earlier: Sequence[str] = ()) -> list[str]:
    """Overrides as they are typed: the earlier ones that these settings leave, and the settings."""
    left = [each for each in earlier if each.partition("=")[0] not in settings]
    return [*left, *(f"{name}={value}" for name, value in settings.items())]
