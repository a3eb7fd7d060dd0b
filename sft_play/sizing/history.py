"""The first steps of a run as its allocator sees them, which decides what it reserves. Pure."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from sft_play.sizing.allocator import EMPTY_CACHE, Replay, replay
from sft_play.timeline import PHASES, TERMS, Step


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a run does around its steps."""

    workspace_bytes: int = 0  # that cuBLAS keeps from its first product in either direction
    warmup_bytes: int = 0  # allocated and freed before the weights are loaded
    clears_cache: bool = False  # of the allocator, once the weights are loaded
    holds_outputs: bool = False  # of the model, until the forward pass of the next step has ended


def replay_steps(step: Step, habits: Habits, *, expandable: bool = True) -> Replay:
    """What PyTorch's caching allocator reserves for loading and two such steps.

    The order decides which freed blocks can be reused: optimizer states are born in the first optimizer step,
    when the memory of the backward pass is free, and the second step finds the cached blocks of the first.

    Args:
        step: the step, from loading the weights to the evaluation.
        habits: of the run.
        expandable: as in `sft_play.sizing.allocator.replay`.
    """
    key, known = (step.sizes.tobytes(), habits, expandable), step.timeline.replays
    if key not in known:  # plans for several numbers of processes often have the same step
        known[key] = replay(history(step, habits), expandable=expandable)
    return known[key]


def history(step: Step, habits: Habits) -> Iterator[tuple[int, int]]:
    """Yields the allocations, (block number, bytes), and frees, (block number, 0), in order."""
    sizes = dict(enumerate(step.sizes[step.timeline.source].tolist(), start=1))
    events, states = _events_by_phase(step, sizes)
    first = len(sizes) + 1  # number of the next block; two workspaces, warm-up, then what is held over
    sizes |= {
        first: habits.workspace_bytes,
        first + 1: habits.workspace_bytes,
        first + 2: habits.warmup_bytes,
    }
    before, later = [first + 2, -(first + 2), *events["load"]], _again(events)
    forward, backward = [first, *events["forward"]], [first + 1, *events["backward"], *states]
    after, next_forward = [*events["optimizer"], *events["evaluation"]], later["forward"]
    if habits.holds_outputs:
        held = _outputs(step, events)
        after = [event for event in after if -event not in held]
        moved = {block: first + 3 + place for place, block in enumerate(sorted(held))}
        sizes |= {moved[block]: sizes[block] for block in held}
        next_forward = [moved.get(event, event) for event in next_forward]
        next_forward += [-block for block in moved]
        later["evaluation"] = [-moved.get(-event, -event) for event in later["evaluation"]]
    for part in (before, None, forward, backward, after, next_forward, *list(later.values())[1:]):
        if part is None:
            yield from [EMPTY_CACHE] * habits.clears_cache
            continue
        yield from ((abs(event), sizes[event] if event > 0 else 0) for event in part if sizes[abs(event)])


def _events_by_phase(step: Step, sizes: dict[int, int]) -> tuple[dict[str, list[int]], list[int]]:
    """The events of each phase, and the blocks of the optimizer's states, which they do not have."""
    line = step.timeline
    terms = line.terms[line.source].tolist()
    events: dict[str, list[int]] = {phase: [] for phase in PHASES}
    states = []
    for event, number in zip(line.events.tolist(), line.phases.tolist(), strict=True):
        if PHASES[number] == "forward" and TERMS[terms[abs(event) - 1]] == "optimizer":
            states.append(event)
        else:
            events[PHASES[number]].append(event)
    return events, states


def _again(events: dict[str, list[int]]) -> dict[str, list[int]]:
    """The events of another step: of blocks that a step both allocates and frees."""
    parts = {phase: events[phase] for phase in PHASES if phase != "load"}
    every = set(itertools.chain.from_iterable(parts.values()))
    for phase, part in parts.items():
        parts[phase] = [event for event in part if -event in every]
    return parts


def _outputs(step: Step, events: dict[str, list[int]]) -> set[int]:
    """Blocks of the forward pass that live until the step has ended, without gradients."""
    terms = step.timeline.terms[step.timeline.source].tolist()
    freed = {-event for event in events["evaluation"]}.intersection(events["forward"])
    return {block for block in freed if TERMS[terms[block - 1]] != "gradients"}
