"""The longest row that fits, for each method and number of devices, by the exact memory of its step."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.data.length import MAX_UNSTATED
from sft_play.errors import ConfigError, DoesNotFitError
from sft_play.machine.gpus import Machine
from sft_play.parts import flat
from sft_play.plan import Estimator, Memory, Plan
from sft_play.planning.allowed import candidates, estimator_of, leanest_that_may_fit
from sft_play.planning.answers.kept import kept
from sft_play.planning.candidates.drafts import leanest
from sft_play.planning.candidates.sequence import group_sizes
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts

GRAIN = 1024  # tokens: rows are multiples of it, or as long as the model allows
BEYOND = 1 + 1e-9  # of what is within the budget, but ran out of memory before
LONGEST = "max"  # what is asked, unless it is a number of tokens

Use = Callable[[int], float]  # tokens of a row -> share of the budget that it takes; it fits up to 1
Engine = tuple[str, int]  # and its replicas


@dataclass(frozen=True)
class LongestRow:
    """The longest row of a run that fits, and the plan for rows of that length, or of the asked one."""

    longest: int | None  # tokens; None if not even the shortest fits
    limit: Literal["positions", "memory"]
    sequence_ranks: int
    fits: bool | None  # whether the length that is asked does; None if none is
    plan: Plan | None
    tokens_per_second: float | None

    def to_json(self) -> dict[str, object]:
        """A row of the table: `fits` if a length is asked, and the key numbers of the plan, if any."""
        row: dict[str, object] = {"longest": self.longest, "limit": self.limit}
        row["sequence_ranks"] = self.sequence_ranks
        if self.fits is not None:
            row["fits"] = self.fits
        if self.plan is None or self.plan.memory is None:
            return row
        plan, memory = self.plan, self.plan.memory
        return row | {
            "row_tokens": plan.rows.max_seq_len,
            "engine": plan.sharing.engine,
            "replicas": plan.sharing.replicas,
            "effective_batch_size": plan.batch.effective,
            **flat(plan.activations),
            "tokens_per_second": self.tokens_per_second,
            "peak_bytes": memory.peak_bytes,
            "process_bytes": memory.process_bytes,
            "budget_bytes": memory.budget_bytes,
            "host_bytes": memory.host.needed_bytes if memory.host else None,
        }


@dataclass
class Tried:
    """What a search has seen of engines: which take less than others, and for which a model is too large."""

    best_first: list[Engine] = field(default_factory=list)
    too_large_for: set[Engine] = field(default_factory=set)


def longest_multiple(use: Use, most: int, grain: int = GRAIN, first: int | None = None) -> int | None:
    """The most tokens that fit the budget: `most`, or a multiple of the grain; None if not even the grain.

    What is taken grows with the tokens, nearly in a line, so the next guess is where the line through the
    last two meets the budget (the secant method); each third one halves the bracket, which so closes. The
    search begins at `most`, or where it is expected to end (`first`). An infinite share ends it.
    """
    end = -(-most // grain)
    if first is None or first >= most:
        last, used = end, use(most)
        if used <= 1:
            return most
        if used == inf:
            return None
        low, high, guess = 0, last, int(last / used)  # as if nothing but the tokens took memory
    else:
        last, used = 0, 0.0
        low, high, guess = 0, end, max(1, first // grain)
    for step in itertools.count():
        if high - low <= 1:
            reached = high == end and first is not None and use(most) <= 1
            return most if reached else low * grain or None
        guess = (low + high) // 2 if step % 3 == 2 else min(max(guess, low + 1), high - 1)
        found = use(guess * grain)
        if found == inf:
            return None
        low, high = (guess, high) if found <= 1 else (low, guess)
        slope = (found - used) / (guess - last) if guess != last else 0.0
        following = int(guess + (1 - found) / slope) if slope > 0 else (low + high) // 2
        last, used, guess = guess, found, following
    raise AssertionError("the bracket closes")


def longest_row(
    request: Request, asked: int | None, *, first: int | None = None, tried: Tried | None = None
) -> LongestRow:
    """The longest row that fits, one in a micro-batch, with the plan for it.

    Args:
        request: the run; its effective batch stays, or grows to a row for each process.
        asked: tokens of a row that the speed is wanted for, and whether they fit; default: the longest.
        first: where the search begins, as in `longest_multiple`.
        tried: what an earlier search for this run has seen; is kept up to date.

    Raises:
        ConfigError: settings contradict each other, the model or the machine.
    """
    most = request.architecture.facts.position_limit or MAX_UNSTATED
    seen = tried or Tried()

    @cache
    def use(tokens: int) -> float:
        return _use(_with_rows_of(request, tokens), seen)

    fits = None if asked is None else use(asked) <= 1
    longest = longest_multiple(use, most, first=first)
    if fits and asked and asked > (longest or 0):  # between two multiples
        longest = asked
    shown = longest if asked is None else asked
    plan = speed = None
    if shown and fits is not False:
        rows = _with_rows_of(request, shown)
        plan = _plan_of(rows, tight=shown == longest != most)
        speed = rows.facts.tokens_per_second(plan)
    limit: Any = "positions" if longest == most else "memory"
    return LongestRow(longest, limit, request.config.parallel.sequence_ranks, fits, plan, speed)


def longest_row_in_groups(
    request: Request, asked: int | None, *, whole: LongestRow, tried: Tried
) -> LongestRow | None:
    """The longest row if groups of processes divide its tokens; of the smallest groups that reach it.

    The larger a group, the fewer tokens has a process, so the largest are searched. Smaller ones reach as far
    only where the model's positions are the limit.

    Returns:
        As `longest_row`, which found `whole`; None if whole rows are enough, if none fits, if there are no
        groups, or if the config says how large they are.
    """
    reached = whole.longest or 0
    enough = whole.limit == "positions" if asked is None else whole.fits
    sizes = group_sizes(request.config, request.architecture, request.processes, request.on_machines)
    if request.config.parallel.sequence_parallel_size != "auto" or not reached or enough or not sizes:
        return None

    def found(size: int) -> LongestRow:
        return longest_row(request.in_groups_of(size), asked, first=reached * size, tried=tried)

    def reaches(size: int, tokens: int) -> bool:
        return _use(_with_rows_of(request.in_groups_of(size), tokens), tried) <= 1

    with suppress(ConfigError):  # for the model, or for a setting
        row = found(sizes[-1])
        if row.longest and row.limit == "positions":
            smaller = next((size for size in sizes[:-1] if reaches(size, row.longest)), None)
            row = found(smaller) if smaller else row
        return row if (row.longest or 0) > reached else None
    return None


def _with_rows_of(request: Request, tokens: int) -> Request:
    """The request with rows of so many tokens."""
    facts = DataFacts.full_rows(tokens, request.config.train.seed)
    return request.changed(facts=facts).with_batch_for(request.processes)


def _plan_of(request: Request, *, tight: bool) -> Plan:
    """The plan with one row in a micro-batch.

    If it is `tight`, with MLPs in tiles, since such a plan is the only one that fits.
    """
    run = request.in_groups_of(request.config.parallel.sequence_ranks)
    drafts = leanest(candidates(run))
    lean = {(draft.batch.micro, draft.activations) for draft in drafts}
    if not tight:
        lean |= {(micro, activations.whole) for micro, activations in lean}

    def as_lean(draft: Plan) -> bool:
        return (draft.batch.micro, draft.activations.uniform) in lean

    return fastest_plan(run, as_lean, explain=False)


def _use(request: Request, tried: Tried) -> float:
    """The share of its budget that a process takes with the engine that takes least; of all if none fits.

    Infinite if weights, gradients and states alone are too much for each engine.
    """
    estimate = estimator_of(request)
    of_engine: dict[Engine, list[Plan]] = {}
    for draft in leanest_that_may_fit(request):
        of_engine.setdefault((draft.sharing.engine, draft.sharing.replicas), []).append(draft)
    order = {engine: place for place, engine in enumerate(tried.best_first)}
    shares: dict[Engine, float] = {}
    for engine in sorted(of_engine, key=lambda engine: order.get(engine, len(order))):
        if engine in tried.too_large_for:
            continue
        share = shares[engine] = _least_share(request.config, of_engine[engine], estimate)
        if share == inf:
            tried.too_large_for.add(engine)
        if share <= 1:
            break
    tried.best_first[:] = sorted(shares, key=lambda engine: shares[engine])
    return min(shares.values(), default=inf)


def _least_share(run: RunConfig, drafts: Sequence[Plan], estimate: Estimator) -> float:
    """The least that the drafts of an engine take; infinite if it is too much before there is a row."""
    least = inf
    for draft in sorted(drafts, key=lambda draft: draft.activations.policy != "offload"):
        memory = estimate(run, draft, complete=True)
        if memory.phases.get("load", 0) > memory.budget_bytes:
            return inf
        least = min(least, _share(memory))
        if least <= 1 or memory.process_bytes > memory.budget_bytes:
            break  # what is in RAM here would be on the device, too
    return least


def _share(memory: Memory) -> float:
    """Of the budget, or of that of the host if it is the tighter one."""
    share = memory.process_bytes / memory.budget_bytes
    if memory.host and memory.host.budget_bytes is not None:
        share = max(share, memory.host.needed_bytes / max(memory.host.budget_bytes, 1))
    return share if memory.fits else max(share, BEYOND)


def places_of(config: RunConfig, machine: Machine) -> tuple[str, ...]:
    """Where weights may be that are not in use: nowhere but on the device, and then in RAM."""
    asked = config.parallel.offload
    if asked != "auto":
        return (asked,)
    return ("none", "ram") if machine.gpus else ("none",)


def longest_rows(
    requests: Sequence[Request], modes: Sequence[str], asked: int | None = None
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each method, number of processes and place of the weights, and of tokens that are divided.

    RAM is looked at where memory of the device is the limit without it, and so are tokens that are divided.
    There is a request for each number of processes.

    Yields:
        The rows of one search; none where weights in RAM reach no farther.
    """
    for mode in modes:
        for request in requests:
            in_mode = request.changed({"tuning.mode": mode})
            for place in places_of(request.config, request.machine):
                run = in_mode.with_offload(place)
                found, limit = kept("longest rows", run, asked, find=partial(_searched, run, asked))
                wanted = place == "none" or request.config.parallel.offload == place or found[0]["longest"]
                head = {"mode": mode, "processes": request.processes, "offload": place}
                yield [head | row for row in found] if wanted else []
                if limit == "positions":
                    break


def _searched(request: Request, asked: int | None) -> tuple[list[dict[str, object]], str | None]:
    """The longest row, and that of groups that reach farther; and what its limit is."""
    tried = Tried()
    try:
        whole = longest_row(request, asked, tried=tried)
        divided = longest_row_in_groups(request, asked, whole=whole, tried=tried)
    except (ConfigError, DoesNotFitError) as error:
        return [{"longest": None, "problem": str(error).splitlines()[0]}], None
    return [row.to_json() for row in (whole, divided) if row], whole.limit
