"""What makes a run fit that fits nowhere: each change is planned as the run that it gives, never estimated.

Single changes come first, the one that costs least at the head; several at once only where none is enough.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice, product
from typing import Any

import numpy as np
from pydantic import ValidationError

from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.config.load import ResolvedConfig
from sft_play.config.methods import lighter_modes
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFitError
from sft_play.machine.gpus import Machine, with_gpus
from sft_play.plan import Plan
from sft_play.planning.devices import machines_of, training_device
from sft_play.planning.drafts import choose_precision
from sft_play.planning.facts import DataFacts
from sft_play.planning.fewest import fewest_gpus, with_batch_for
from sft_play.planning.groups import leanest_memories, plan_in_groups
from sft_play.planning.other_machines import tokens_per_second
from sft_play.planning.sequence import group_sizes
from sft_play.report.misfit import advice_text
from sft_play.report.training import training_command
from sft_play.sizing.architecture import AnyArchitecture, Architecture

MOST = 3  # changes of settings that are planned and shown
MOST_TOGETHER = 3  # settings that are changed at once
SHARES = (0.75, 0.5, 0.25)  # of the longest row, for shorter ones
Settings = Mapping[str, Any]  # by their dotted names


@dataclass(frozen=True)
class Request:
    """A run to be planned; the fields are arguments of `plan_in_groups`."""

    config: RunConfig
    architecture: AnyArchitecture
    facts: DataFacts
    machine: Machine
    processes: int
    machines: int | None = None

    @property
    def on_machines(self) -> int:
        """Number of machines."""
        return self.machines or machines_of(self.machine, self.processes)

    def plan(self, **how: Any) -> Plan:
        """As `plan_in_groups`."""
        asked = self.config, self.architecture, self.facts, self.machine, self.processes
        return plan_in_groups(*asked, machines=self.machines, **how)


@dataclass(frozen=True)
class Change:
    """Settings with which a run fits, and its plan with them."""

    settings: Settings
    plan: Plan
    tokens_per_second: float | None

    @classmethod
    def of(cls, request: Request, settings: Settings) -> "Change":
        """Plans the run, which has these settings already; errors as of `plan_in_groups`."""
        plan = request.plan(explain=False)
        return cls(settings, plan, tokens_per_second(plan, request.facts))


def plan_or_advise(request: Request, typed: Callable[[Change], str]) -> Plan:
    """The fastest plan that fits, as of `plan_in_groups`.

    Args:
        request: the run.
        typed: the command that asks for the run with a change.

    Raises:
        ConfigError: as in `plan_in_groups`.
        DoesNotFitError: nothing fits; the message has what would, each with its plan's memory and speed.
    """
    try:
        return request.plan()
    except DoesNotFitError as error:
        found = changes_that_fit(request)
        ways = [(typed(change), change.plan, change.tokens_per_second) for change in found]
        advice = advice_text(ways, gpus=bool(request.machine.gpus))
        raise DoesNotFitError(f"{error}\n{advice}") from None


def _divisions(request: Request) -> list[Settings]:
    """Groups that divide tokens, from small to large; the effective batch stays."""
    config, architecture = request.config, Architecture.of(request.architecture)
    found: list[Settings] = []
    for size in group_sizes(config, architecture, request.processes, request.on_machines):
        settings: dict[str, Any] = {"parallel.sequence_parallel_size": size}
        if config.train.grad_accum != "auto":
            times = size // config.parallel.sequence_ranks
            settings["train.grad_accum"] = config.train.grad_accum * times
        found.append(settings)
    return found


def changes_that_fit(request: Request) -> list[Change]:
    """Changes with which the run fits as it is planned then, the one that costs least first; [] if none."""
    kinds = [kind for kind in _kinds(request) if kind]
    found = list(islice(_fitting(request, kinds), MOST))
    strongest = {name: value for kind in kinds for name, value in kind[-1].items()}
    if not found and _fits(request, strongest):
        for number in range(2, MOST_TOGETHER + 1):
            ways = (_together(each) for each in combinations(kinds, number))
            if found := list(islice(_fitting(request, ways), MOST)):
                break
        found = found or list(_fitting(request, [[strongest]]))
    return found + list(_more_gpus(request))


def _kinds(request: Request) -> Iterator[list[Settings]]:
    """Ways to save memory, of each kind from the weakest to the strongest; the kinds by what they cost."""
    config, train = request.config, request.config.train
    if train.asked_activations != "auto":  # what the config has decided is left to the plan
        way = "activations" if train.activations != "auto" else "gradient_checkpointing"
        yield [{f"train.{way}": "auto"}]
    if train.batch_size != "auto":
        yield [{"train.batch_size": "auto"}]
    if config.parallel.offload == "none":
        yield [{"parallel.offload": "auto"}]
    if config.parallel.reshard_after_forward is False:
        yield [{"parallel.reshard_after_forward": "auto"}]
    yield _divisions(request)
    if lighter_states := OPTIMIZERS[train.optimizer].lighter:
        yield [{"train.optimizer": lighter_states}]
    device = training_device(request.machine)
    if config.tuning.mode == "full" and device.bf16 and choose_precision(config, device)[0] == "float32":
        yield [{"model.dtype": "bfloat16"}]
    lighter = lighter_modes(config.tuning.mode, config.tuning.lora.init)
    bf16 = {"train.float8": False} if train.float8 else {}
    plain = {"train.compile": False} if train.compile else {}
    yield [{"tuning.mode": mode} | bf16 | (plain if mode == "qlora" else {}) for mode in lighter]
    lengths = [int(request.facts.longest_row * share) // 64 * 64 for share in SHARES]
    yield [{"model.max_seq_len": length} for length in lengths if length]


def _together(kinds: Iterable[list[Settings]]) -> list[Settings]:
    """One way of each of these kinds at once."""
    return [{name: value for way in ways for name, value in way.items()} for ways in product(*kinds)]


def _fitting(request: Request, kinds: Iterable[list[Settings]]) -> Iterator[Change]:
    """Of each kind, the weakest way with which the run fits."""
    for ways in kinds:
        for settings in ways:
            if _fits(request, settings):
                with suppress(ConfigError, DoesNotFitError):
                    yield Change.of(changed(request, settings), settings)
                    break


def _fits(request: Request, settings: Settings) -> bool:
    """Whether the leanest plan with these settings fits; not if they contradict each other or the model."""
    try:
        run = changed(request, settings)
        asked = run.config, Architecture.of(run.architecture), run.facts, run.machine, run.processes
        return any(memory.fits for memory in leanest_memories(asked, run.on_machines))
    except (ConfigError, DoesNotFitError):
        return False


def changed(request: Request, settings: Settings) -> Request:
    """The run with these settings; of its rows, those that are too long for it then are cut or left out.

    Raises:
        ConfigError: the settings contradict others.
    """
    tree = request.config.model_dump()
    for name, value in settings.items():
        section, _, key = name.partition(".")
        tree[section][key] = value
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(str(error)) from None
    longest = settings.get("model.max_seq_len")
    facts = _with_shorter_rows(request.facts, longest, config) if longest else request.facts
    return replace(request, config=config, facts=facts)


def _with_shorter_rows(facts: DataFacts, longest: int, config: RunConfig) -> DataFacts:
    """The facts of rows of at most so many tokens; packed sequences are taken to stay as many."""
    if not facts.seen:
        return DataFacts.full_rows(longest, facts.seed)
    kept = facts.lengths <= longest
    if config.train.packing or config.data.overlong != "drop" or facts.shares or not kept.any():
        kept = np.ones_like(kept)
    cut = partial(np.minimum, longest)
    lengths, supervised = cut(facts.lengths[kept]), cut(facts.supervised[kept])
    return replace(
        facts,
        lengths=lengths,
        supervised=supervised,
        longest_row=longest if config.train.packing else int(lengths.max()),
        mean_tokens=float(lengths.mean()),
        mean_squared_tokens=float((lengths.astype(float) ** 2).mean()),
        eval_lengths=None if facts.eval_lengths is None else cut(facts.eval_lengths),
        eval_supervised=None if facts.eval_supervised is None else cut(facts.eval_supervised),
        parts=None if facts.parts is None else cut(facts.parts),
    )


def _more_gpus(request: Request) -> Iterator[Change]:
    """The fewest GPUs like these that are enough, with a batch that has a row for each."""
    if not request.machine.gpus:
        return
    machine_of = partial(with_gpus, request.machine)
    asked = request.config, request.architecture, request.facts, machine_of
    with suppress(ConfigError, DoesNotFitError):
        count = fewest_gpus(*asked, batch_grows=True, least=request.processes + 1)
        if count:
            config = with_batch_for(request.config, request.facts, count)
            more = replace(request, config=config, machine=machine_of(count), processes=count, machines=None)
            batch = config.train.effective_batch_size
            grown = batch != request.config.train.effective_batch_size
            settings = {"train.effective_batch_size": batch} if grown else {}
            yield Change.of(more, settings)


def changed_command(resolved: ResolvedConfig, change: Change) -> str:
    """What to type to train a run with a change."""
    return training_command(change.plan, resolved.path, as_overrides(change.settings, resolved.overrides))


def as_overrides(settings: Settings, earlier: Sequence[str] = ()) -> list[str]:
    """Overrides as they are typed: the earlier ones that these settings leave, and the settings."""
    left = [each for each in earlier if each.partition("=")[0] not in settings]
    return [*left, *(f"{name}={value}" for name, value in settings.items())]
