"""Corrections: what probes measured, stored to correct later predictions of the same kind of step."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sft_play.cache import entry, read_value, update_value
from sft_play.config.schema import RunConfig
from sft_play.fingerprints import installed_versions
from sft_play.parts import flat
from sft_play.plan import EARLIER, Estimator, Memory, Plan
from sft_play.reasons.evidence import ran_out_before
from sft_play.sizing.step import step_code
from sft_play.units import KIB

# By a smaller difference of a measurement, no prediction is corrected: a share of it, and bytes of what is no
# part of a step, such as saved states of random number generators.
CORRECTED_FROM, NOISE_BYTES = 0.005, 64 * KIB
LOAD = "load"
RESERVED = "reserved"  # by the allocator; corrected as phases are
# After memory ran out, the same is tried again once the budget is larger by this factor: the free memory of a
# machine is never quite the same twice.
CLEARLY_MORE = 1.1

# Phase, or RESERVED -> measured / predicted memory above the weights
Ratios = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a probe measured; for several ranks, the maximum over all of them."""

    phases: dict[str, int] = field(default_factory=dict)  # peak bytes; empty if they could not be measured
    expected: dict[str, int] = field(default_factory=dict)  # the prediction for the very step; {} if unknown
    reserved_bytes: int | None = None
    overhead_bytes: int | None = None  # GPU memory outside the allocator: context, kernels, communicator
    step_seconds: float | None = None  # of an optimizer step of average size
    seconds_per_token: float | None = None  # per process, in such a step, padding not counted
    ran_out: bool = False  # out of memory, or the device was full and the allocator had to free cached blocks

    @property
    def peak_bytes(self) -> int | None:
        """The peak of the highest phase."""
        return max(self.phases.values(), default=None)

    def budgeted_bytes(self, memory: Memory) -> int | None:
        """What the budget is for: on a GPU the process, with the predicted context if it was not measured."""
        if self.reserved_bytes is None:
            return self.peak_bytes
        context = memory.terms.get("context", 0) if self.overhead_bytes is None else self.overhead_bytes
        return self.reserved_bytes + context

    def fits(self, plan: Plan) -> bool:
        """Whether the plan can be run: memory did not run out, and the process is within the budget."""
        if self.ran_out or plan.memory is None:
            return not self.ran_out
        return (self.budgeted_bytes(plan.memory) or 0) <= plan.memory.budget_bytes

    @classmethod
    def of_all(cls, ranks: list["ProbeResult"]) -> "ProbeResult":
        """The maximum of every number over the ranks; a phase counts only if all ranks measured it."""

        def highest(name: str) -> Any:
            values = [getattr(result, name) for result in ranks]
            return max((value for value in values if value is not None), default=None)

        phases: dict[str, int] = {}
        for phase in ranks[0].phases:
            sizes = [result.phases[phase] for result in ranks if phase in result.phases]
            if len(sizes) == len(ranks):
                phases[phase] = max(sizes)
        numbers = ("reserved_bytes", "overhead_bytes", "step_seconds", "seconds_per_token", "ran_out")
        return cls(phases=phases, expected=ranks[0].expected, **{name: highest(name) for name in numbers})


def record_path(architecture: str, device: str, config: RunConfig, plan: Plan) -> Path:
    """Where the record of this kind of step is kept.

    Steps are of the same kind if device, code, model (its config as JSON) and settings are equal, whatever
    the micro-batch size, and whether few or many of the layers are recomputed if some are.
    """
    rows = replace(plan.rows, most_tokens=0, most_supervised=0)
    parts = [flat(each) for each in (plan.sharing, rows, plan.activations.kind, plan.precision, plan.kernels)]
    kind = parts, plan.device, plan.compute_capability
    tuning, tokens = config.tuning.model_dump_json(), len(config.model.new_tokens)
    train = config.train
    settings = tuning, tokens, train.optimizer, config.eval.batch_size, train.float8
    return entry("probes", architecture, device, settings, kind, step_code())


@dataclass(frozen=True)
class RanOut:
    """Memory ran out with `micro_batch_tokens` in the largest micro-batch, and `budget_bytes` to use.

    How much more would have been needed is not known, so this is a verdict on such plans, not a size.
    """

    micro_batch_tokens: int
    budget_bytes: int

    def applies_to(self, plan: Plan, memory: Memory) -> bool:
        """Whether the plan has as large a micro-batch, and not clearly more memory to use."""
        enough_now = memory.budget_bytes > CLEARLY_MORE * self.budget_bytes
        return plan.rows.most_tokens >= self.micro_batch_tokens and not enough_now


@dataclass(frozen=True)
class Record:
    """What earlier runs and their probes have shown of a kind of step."""

    ratios: Ratios = field(default_factory=dict)
    ran_out: RanOut | None = None


RecordOf = Callable[[RunConfig, Plan], Record]  # of a plan's kind of step


def read_record(path: Path) -> Record:
    """The record in the file that `record_path` names; an empty one if there is none."""
    found = TypeAdapter(Record).validate_python(read_value(path) or {})
    return replace(found, ratios={name: ratio for name, ratio in found.ratios.items() if 0 < ratio < 100})


def records_of(architecture: str, device: str) -> RecordOf:
    """A function that gives the record of a plan's kind of step; it reads each file once."""
    read = cache(read_record)
    return lambda config, plan: read(record_path(architecture, device, config, plan))


def write_ran_out(path: Path, plan: Plan, used_bytes: int = 0) -> None:
    """Remembers that memory ran out, at a peak of `used_bytes`, so that the next such plan is smaller.

    Without a predicted memory nothing is known of the budget, or remembered.
    """
    if plan.memory is None or plan.rows.most_tokens <= 0:
        return
    earlier = read_record(path).ran_out
    if earlier is not None and earlier.applies_to(plan, plan.memory):
        return  # nothing new
    found = RanOut(plan.rows.most_tokens, max(plan.memory.budget_bytes, used_bytes))
    update_value(path, lambda record: record | {"ran_out": asdict(found)})


def write_record(path: Path, plan: Plan, result: ProbeResult) -> None:
    """Keeps what a probe of the plan measured of its memory in the file that `record_path` names."""
    if plan.memory is not None and result.phases:
        ratios = ratios_of(plan.memory, result, read_record(path).ratios)
        update_value(path, lambda record: record | {"ratios": ratios})


def write_run_memory(path: Path, plan: Plan, run: ProbeResult) -> None:
    """Keeps what a whole run of the plan took at most, whose only phase is the run."""
    if plan.memory is not None and run.peak_bytes:
        ratios = run_ratios(plan.memory, run.peak_bytes, run.reserved_bytes, read_record(path).ratios)
        update_value(path, lambda record: record | {"ratios": ratios})


def ratios_of(predicted: Memory, result: ProbeResult, earlier: Ratios) -> dict[str, float]:
    """Measured / predicted memory above the weights of the same step, by phase and for reserved bytes.

    The prediction may already be corrected by `earlier` ratios. A probe has not seen a whole run, so it
    lowers no prediction: only `run_ratios` does. What differs by next to nothing changes nothing.
    """
    weights = predicted.phases.get(LOAD, 0)
    expected = result.expected | ({RESERVED: predicted.reserved_bytes or 0} if result.expected else {})
    measured = result.phases | {RESERVED: result.reserved_bytes or 0}
    found = dict(earlier)
    for name, size in expected.items():
        comparable = name != LOAD and size > weights and measured.get(name, 0) > weights
        if comparable and _differs(measured[name], size):
            known = earlier.get(name, 1.0)
            found[name] = max((measured[name] - weights) / (size - weights) * known, min(known, 1.0))
    return {name: ratio for name, ratio in found.items() if ratio != 1}


def _differs(measured: int, predicted: int) -> bool:
    return abs(measured - predicted) > max(CORRECTED_FROM * predicted, NOISE_BYTES)


def run_ratios(
    predicted: Memory, peak_bytes: int, reserved_bytes: int | None, earlier: Ratios
) -> dict[str, float]:
    """The `earlier` ratios, lowered to what a whole run took at most: no phase can have taken more.

    The prediction is corrected by them already.
    """
    weights = predicted.phases.get(LOAD, 0)
    found = dict(earlier)
    for name, size, most in (
        *((phase, size, peak_bytes) for phase, size in predicted.phases.items() if phase != LOAD),
        (RESERVED, predicted.reserved_bytes or 0, reserved_bytes or 0),
    ):
        if size > most > weights and _differs(most, size):
            found[name] = (most - weights) / (size - weights) * earlier.get(name, 1.0)
    return found


def _overhead_path(device: str, driver: str | None, world_size: int) -> Path:
    return entry("overhead", device, driver, world_size > 1, installed_versions())


def write_overhead(device: str, driver: str | None, world_size: int, size: int) -> None:
    """Stores how much of this GPU a process used outside the allocator; the maximum so far is kept."""
    path = _overhead_path(device, driver, world_size)
    update_value(path, lambda known: {"bytes": max(size, known.get("bytes", 0))})


def read_overhead(device: str, driver: str | None, world_size: int) -> int | None:
    """Bytes of context, kernels and communicator that a probe measured on such a GPU with this driver."""
    return (read_value(_overhead_path(device, driver, world_size)) or {}).get("bytes")


def corrected(memory: Memory, ratios: Ratios) -> Memory:
    """The prediction with the memory above the weights multiplied by `ratios`, phase by phase.

    The difference in the peak is added to the temporaries.
    """
    if not ratios:
        return memory
    weights = memory.phases.get(LOAD, 0)

    def multiplied(sizes: Mapping[str, int]) -> dict[str, int]:
        return {
            phase: weights + round((size - weights) * ratios.get(phase, 1.0)) for phase, size in sizes.items()
        }

    phases = multiplied(memory.phases)
    top = max(phases, key=lambda phase: phases[phase])
    phase_terms = {
        phase: _with_temporaries(terms, phases[phase] - memory.phases[phase])
        for phase, terms in memory.phase_terms.items()
    }
    reserved = memory.reserved_bytes
    if reserved is not None and RESERVED in ratios:
        reserved = weights + round((reserved - weights) * ratios[RESERVED])
    elif reserved is not None:
        reserved += phases[top] - memory.peak_bytes
    return replace(
        memory,
        phases=phases,
        peak_phase=top,
        peak_bytes=phases[top],
        terms=_with_temporaries(memory.terms, phases[top] - memory.peak_bytes),
        phase_terms=phase_terms,
        reserved_bytes=None if reserved is None else max(reserved, phases[top]),
        origin=EARLIER,
        highest=memory.highest and replace(memory.highest, phases=multiplied(memory.highest.phases)),
    )


def _with_temporaries(terms: dict[str, int], size: int) -> dict[str, int]:
    return terms | {"temporaries": terms.get("temporaries", 0) + size}


def corrected_estimator(estimate: Estimator, record_of: RecordOf) -> Estimator:
    """The estimator, corrected by earlier runs."""

    def estimate_corrected(config: RunConfig, plan: Plan, *, complete: bool = False) -> Memory:
        record = record_of(config, plan)
        memory = corrected(estimate(config, plan, complete=complete), record.ratios)
        ran_out = record.ran_out is not None and record.ran_out.applies_to(plan, memory)
        return replace(memory, ran_out=ran_out)

    return estimate_corrected


def reasons_of(record: Record, plan: Plan, memory: Memory) -> list[str]:
    """What earlier runs make of a plan with this memory."""
    ratio, found = record.ratios.get(memory.peak_phase, 1.0), list[str]()
    if ratio != 1:
        found.append(f"corrected by an earlier probe of such a step: memory beyond the weights x {ratio:.3f}")
    if record.ran_out is not None:
        tokens = record.ran_out.micro_batch_tokens
        if memory.ran_out:
            found.append(ran_out_before(tokens, "again"))
        elif plan.rows.most_tokens >= tokens:
            found.append(ran_out_before(tokens, "more_free"))
        else:
            found.append(ran_out_before(tokens, "smaller"))
    return found
