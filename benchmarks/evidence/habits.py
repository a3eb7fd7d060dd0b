"""What published runs do around their steps, as their allocator sees it, and ours do not."""

from collections.abc import Iterator
from dataclasses import dataclass

from sft_play.sizing.estimate.allocator import EMPTY_CACHE, as_changes, events_by_phase, first_steps
from sft_play.timeline import TERMS, Step


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a run does around its steps; the bytes are those of `first_steps`."""

    workspace_bytes: int = 0
    warmup_bytes: int = 0
    clears_cache: bool = False  # of the allocator, once the weights are loaded
    holds_outputs: bool = False  # of the model, until the forward pass of the next step has ended


def history(step: Step, habits: Habits) -> Iterator[tuple[int, int]]:
    """The first steps of such a run, for `allocator.replay`."""
    sizes, parts = first_steps(step, habits.workspace_bytes, habits.warmup_bytes)
    if habits.holds_outputs:
        _hold_outputs(step, sizes, parts)
    load, *steps = parts
    yield from as_changes(sizes, [load])
    yield from [EMPTY_CACHE] * habits.clears_cache
    yield from as_changes(sizes, steps)


def _hold_outputs(step: Step, sizes: dict[int, int], parts: list[list[int]]) -> None:
    """Lets the outputs of the first step live until the next forward pass has ended, which has its own."""
    held = _outputs(step)
    moved = {block: len(sizes) + place for place, block in enumerate(sorted(held), start=1)}
    sizes |= {moved[block]: sizes[block] for block in held}
    parts[3] = [event for event in parts[3] if -event not in held]
    parts[4] = [*(moved.get(event, event) for event in parts[4]), *(-block for block in moved)]
    parts[7] = [-moved.get(-event, -event) for event in parts[7]]


def _outputs(step: Step) -> set[int]:
    """Blocks of the forward pass that live until the step has ended, without gradients."""
    events, _ = events_by_phase(step)
    terms = step.timeline.terms[step.timeline.source].tolist()
    freed = {-event for event in events["evaluation"]}.intersection(events["forward"])
    return {block for block in freed if TERMS[terms[block - 1]] != "gradients"}
