"""Memory and work of any plan of a run, derived from a few traces for the search.

Steps are traced at a few micro-batch sizes of each kind (checkpointing, accumulation, sequence length, tuning
mode); all other sizes follow exactly. Traces are kept on disk by content, so nothing is traced twice,
whatever machine a plan is for.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

from sft_play.cache import cache_dir, entry
from sft_play.choices.kernels import Capability
from sft_play.config.schema import RunConfig
from sft_play.engines.base import Division
from sft_play.engines.registry import engine_of
from sft_play.errors import UntraceableModel, first_line
from sft_play.machine.process import importing_libraries
from sft_play.parts import RECOMPUTED, Activations
from sft_play.plan import Estimator, Memory, Plan
from sft_play.sizing.estimate import memory
from sft_play.sizing.estimate.budget import DeviceBudget
from sft_play.sizing.estimate.memory import SizedStep, scaled_step
from sft_play.sizing.estimate.micro_batches import anywhere, heaviest, with_held
from sft_play.sizing.estimate.mixed_step import mixed_step
from sft_play.sizing.estimate.samples import (
    SMALLEST,
    Size,
    basis,
    counts_of,
    kind_of,
    more_samples,
    of_size,
    resized,
    samples,
    size_of,
)
from sft_play.sizing.facts import step_facts
from sft_play.sizing.facts.architecture import AnyArchitecture, Architecture
from sft_play.sizing.facts.model_facts import require_packable
from sft_play.sizing.step import MicroBatch, RunBatches, StepSpec, step_code
from sft_play.sizing.trace.files import load_trace, save_trace
from sft_play.timeline import LayersDiffer, Step, StepTrace
from sft_play.ui.console import warn
from sft_play.work import Work, WorkLine, mixed

_SHARED: dict[str, "Traces"] = {}


def shared_traces(config: AnyArchitecture, threads: int = 1) -> "Traces":
    """The traces of this architecture, for a CPU's threads, shared by this process and kept in the cache."""
    folder, architecture = cache_dir(), Architecture.of(config)
    made = Traces(architecture, folder, threads)
    return _SHARED.setdefault(f"{folder} {threads} {architecture.text}", made)


class Traces:
    """Traces steps on demand, until a few traces of a kind of step give all others of that kind."""

    def __init__(self, config: AnyArchitecture, cache: Path | None = None, threads: int = 1):
        """`cache`: folder of earlier traces; None keeps them in memory alone. `threads`: of a CPU."""
        self.architecture, self._cache, self._threads = Architecture.of(config), cache, threads
        self.count = 0  # of steps that were traced, not read
        self._kinds: dict[str, dict[Size, StepTrace]] = {}
        self._all_layers: dict[bool, bool] = {}  # whether fewer did not do, by whether tensors are divided
        self._generates = True  # whether the compiler's code can be traced, as far as is known
        self._gpus: dict[tuple[str, str, Capability], Capability] = {}  # whose traces serve others
        # kept, since finding out may take a while; by whether tensors are divided
        self._untraceable: dict[bool, UntraceableModel] = {}

    def step(self, spec: StepSpec) -> Step:
        """The step of this micro-batch, traced or derived from other traces.

        One with compiled layers for which no code can be generated takes at most what it takes without them.

        Raises:
            UntraceableModel: the architecture cannot be traced.
        """
        if spec.kernels.compiled and self._generates:
            try:
                return self._any_step(spec)
            except UntraceableModel as error:
                self._generates = False
                why = first_line(error.__cause__ or error)
                warn(f"compiled layers cannot be traced ({why}); memory is predicted for others")
        return self._any_step(spec.uncompiled)

    def _any_step(self, spec: StepSpec) -> Step:
        if spec.sharing.sharded in self._untraceable:
            raise self._untraceable[spec.sharing.sharded]
        spec = self._on_device(spec)
        if not spec.activations.apart:
            return self._step_of(spec)
        ways = spec.activations.uniform, Activations()
        recomputed, kept = (self._step_of(replace(spec, activations=way)) for way in ways)
        try:
            return mixed_step(recomputed, kept, spec.activations.apart)
        except LayersDiffer as error:
            raise UntraceableModel(f"its layers cannot be mixed: {error}") from error

    def _step_of(self, spec: StepSpec) -> Step:
        """The step, whose layers are all treated alike."""
        if not spec.is_linear:
            return self._traced(spec).step
        alike = replace(spec, eval_batch=None, eval_share=None)
        if spec.eval_batch is None or not spec.joined or alike.tiles != spec.tiles:
            return self._step(spec)
        # An evaluation batch of joined rows grows as the micro-batch does.
        self._step(alike)
        share = spec.supervised_share if spec.eval_share is None else spec.eval_share
        evaluated = replace(alike, batch=spec.eval_batch, supervised_share=share)
        return self._derived(alike, evaluated) or self._traced(spec).step

    def _on_device(self, spec: StepSpec) -> StepSpec:
        """The step on this CPU, or on the GPU whose traces serve its own too."""
        if spec.device == "cpu":
            return spec.on_this_cpu(self._threads)
        about = spec.kernels.attention, spec.precision.computed_in, spec.compute_capability
        if spec.joined and about not in self._gpus:
            self._gpus[about] = self.architecture.ask(step_facts.traced_capability, *about)
        return replace(spec, compute_capability=self._gpus[about]) if spec.joined else spec

    def _step(self, spec: StepSpec) -> Step:
        known = self._known(spec)
        if not known or size_of(spec) in known or spec.batch.size < SMALLEST:
            return self._traced(spec).step
        return self._derived(spec, spec) or self._traced(spec).step

    def _derived(self, spec: StepSpec, evaluated: StepSpec) -> Step | None:
        """The step, with the evaluation of another one, as other traces give it; None if they do not."""
        known = self._known(spec)
        plane = evaluated.supervised_share != spec.supervised_share
        found = self._basis(spec, samples(spec, list(known), plane=plane), plane=plane)
        if not found:
            return None
        counts = [counts_of(of_size(spec, size)) for size in found]
        return scaled_step([known[size] for size in found], counts, counts_of(spec), counts_of(evaluated))

    def work(self, spec: StepSpec, tokens: float | None = None) -> WorkLine:
        """What a micro-batch of this kind and share computes and moves, by its tokens; raises as `step`.

        If it is asked for at these `tokens` alone, and the step has as many, a single trace will do. Where
        weights stay gathered, those of a step that gathers them again do.
        """
        spec = self._on_device(spec).without_lengths().uncompiled
        if spec.joined:
            spec = replace(spec, eval_batch=None, eval_share=None)
        again = replace(spec, sharing=replace(spec.sharing, reshard_after_forward=True))
        if again != spec and self._known(again) and not self._known(spec):
            line = self.work(again, tokens)
            return replace(line, base=line.base.kept_gathered())
        known, exact = self._known(spec), tokens == spec.tokens and spec.batch.size >= SMALLEST
        if spec.is_alone or (exact and (not known or size_of(spec) in known)):
            return WorkLine.in_proportion(self._traced(spec).work, spec.tokens)
        found = self._basis(spec, chain(samples(spec, list(known)), more_samples(spec)))
        if not found:  # no two have the same structure: one is scaled with the tokens
            nearest = min(known, key=lambda size: abs(size[0] - spec.batch.size))
            return WorkLine.in_proportion(known[nearest].work, of_size(spec, nearest).tokens)
        steps = [of_size(spec, size) for size in found]
        counts = [(step.tokens, step.supervised(step.batch)) for step in steps]
        share = spec.supervised(spec.batch) / spec.tokens
        return WorkLine.fit(counts, [known[size].work for size in found], share)

    def _basis(self, spec: StepSpec, wanted: Iterable[StepSpec], *, plane: bool = False) -> list[Size]:
        """The traces that a step follows from, once as many of the wanted steps are traced as that takes."""
        known, wanted = self._known(spec), iter(wanted)
        while not (found := basis(spec, known, plane=plane)) and (step := next(wanted, None)):
            self._traced(step)
        return found

    def _known(self, spec: StepSpec) -> dict[Size, StepTrace]:
        """The traces of this kind so far, at first those on disk."""
        kind = kind_of(spec)
        if kind not in self._kinds:
            self._kinds[kind] = {}
            for path in sorted(self._folder(spec).glob("[0-9]*")) if self._cache else ():
                size, share = path.name.split("-")
                trace = load_trace(path)
                if trace is not None:
                    self._add(of_size(spec, (int(size), float(share))), trace)
        return self._kinds[kind]

    def _folder(self, spec: StepSpec) -> Path:
        assert self._cache
        return entry("traces", self.architecture.text, kind_of(spec), step_code(), within=self._cache)

    def _traced(self, spec: StepSpec) -> StepTrace:
        """The trace of exactly this step."""
        known, (size, share) = self._known(spec), size_of(spec)
        if (size, share) in known:
            return known[size, share]
        with importing_libraries():  # most plans need no new trace
            from sft_play.sizing.trace.trace import trace_step

        try:
            whole = self._all_layers.get(spec.sharing.sharded, False)
            trace = trace_step(self.architecture.config, spec, all_layers=whole)
        except UntraceableModel as error:
            if not spec.kernels.compiled:
                self._untraceable[spec.sharing.sharded] = error
            raise
        self._add(spec, trace)
        self.count += 1
        if self._cache:
            save_trace(self._folder(spec) / f"{size}-{share}", trace)
        return trace

    def _add(self, spec: StepSpec, trace: StepTrace) -> None:
        self._kinds[kind_of(spec)][size_of(spec)] = trace
        self._all_layers[spec.sharing.sharded] = not trace.stand_ins


BatchesOf = Callable[[Plan], RunBatches]  # of a plan


def estimator(
    config: AnyArchitecture, device: DeviceBudget, batches_of: BatchesOf = lambda plan: RunBatches()
) -> Estimator:
    """A function that predicts the memory of a plan; for QLoRA, it raises what `require_packable` does.

    The search asks for many plans: these are predicted from the largest micro-batch, as if it had all that
    any other has most of. What is `complete` is predicted from the run's own micro-batches.
    """
    traces = shared_traces(config, device.threads)
    ask = traces.architecture.ask

    def estimate(run: RunConfig, plan: Plan, *, complete: bool = False) -> Memory:
        if run.tuning.mode == "qlora":
            require_packable(traces.architecture.facts, traces.architecture.modules)
        batches = batches_of(plan)
        spec = StepSpec.of(run, plan)
        division = Division(
            world_size=plan.sharing.world_size,
            accumulates=plan.batch.accumulation > 1,
            device=plan.device,
            element_bytes=spec.trained_element_bytes,
            autocasts=plan.precision.autocast != "no",
            offloads=plan.sharing.offloads,
            states_on_disk=(on_disk := run.parallel.nvme_path is not None),
            trained=lambda: ask(step_facts.trained_elements, *spec.method),
            state_bytes=lambda elements: (
                0 if on_disk else ask(step_facts.state_bytes, spec.optimizer, spec.device, elements)
            ),
            update_bytes=lambda elements: ask(step_facts.update_bytes, spec.optimizer, spec.device, elements),
        )
        engine = engine_of(plan.sharing.engine)

        def sized(plan: Plan) -> Memory:
            steps = (steps_of if complete else largest_step)(traces, run, plan, batches)
            return memory.estimate(steps, device, engine, division, batches=batches, complete=complete)

        if not (complete and spec.kernels.compiled and plan.device == "cuda"):
            return sized(plan)
        # no run on a GPU was compared: what is generated may not be what runs
        return replace(sized(plan), at_most_bytes=sized(plan.with_compiled(False)).process_bytes)

    return estimate


def _is_by_length(traces: Traces, run: RunConfig, plan: Plan) -> bool:
    """Whether memory grows with the square of the lengths of joined sequences."""
    plan = replace(plan, activations=Activations())
    kind = replace(resized(StepSpec.of(run, plan), 0), supervised_share=0.0)
    return kind.joined and traces.architecture.ask(step_facts.depends_on_lengths, kind)


def largest_step(traces: Traces, run: RunConfig, plan: Plan, batches: RunBatches) -> list[SizedStep]:
    """One step with no lower peak than any micro-batch of a plan, in few traces for all plans of a run."""
    evaluated = next(iter(heaviest(batches.evaluation)), None)
    if batches.train and _is_by_length(traces, run, plan):
        widest = replace(max(batches.train, key=lambda micro: micro.squares), first=False)
        spec = StepSpec.of(run, plan, widest, evaluated)
    else:
        spec = StepSpec.of(run, plan, None, evaluated).without_lengths()
        spec = replace(spec, eval_share=None, fits=batches.most_fits)
    spec = spec.uncompiled  # which takes more; to generate code takes seconds
    held = with_held(traces.step(spec), spec, plan, batches, None, evaluated)
    return [SizedStep(held, first=with_births(traces, spec))]


def with_births(traces: Traces, spec: StepSpec) -> Callable[[], Step] | None:
    """As `SizedStep.first`: those of adapters are small."""
    if spec.mode != "full" or not spec.accumulates or spec.kernels.compiled:
        return None
    return lambda: traces.step(replace(spec, accumulates=False))


def steps_of(traces: Traces, run: RunConfig, plan: Plan, batches: RunBatches) -> list[SizedStep]:
    """Steps of a plan, of which one has the highest peak of each phase."""
    by_length = _is_by_length(traces, run, plan)
    train = heaviest(batches.train, by_length=by_length)
    evaluation = heaviest(batches.evaluation, by_length=by_length)
    later = anywhere([micro for micro in train if not micro.first] or train, plan)

    def step(micro: MicroBatch | None, evaluated: MicroBatch | None) -> SizedStep:
        spec = StepSpec.of(run, plan, micro, evaluated)
        spec = spec if by_length else spec.without_lengths()
        held = with_held(traces.step(spec), spec, plan, batches, micro, evaluated)
        return SizedStep(held, micro, evaluated, with_births(traces, spec))

    most = next(iter(later), None), next(iter(evaluation), None)
    pairs = [(micro or most[0], other or most[1]) for micro, other in zip_longest(later, evaluation)]
    steps: list[SizedStep] = []
    for micro, other in pairs or [most]:
        known = [each.micro for each in steps if micro and each.micro and each.micro.covers(micro)]
        if micro and known and other is most[1]:  # beside that, what this one holds needs no trace
            bound = replace(known[0], held=micro.held, held_units=micro.held_units)
            if not _exceeds(step(bound, other), steps):
                continue
        steps.append(step(micro, other))
    for micro in train if not all(each.first for each in train) else ():
        # of the first ones of their steps, few have higher peaks even with the gradients of others
        if micro.first and _exceeds(step(replace(micro, first=False, last=False), most[1]), steps):
            steps.append(step(micro, most[1]))
    return steps


def _exceeds(sized: SizedStep, others: Iterable[SizedStep]) -> bool:
    """Whether some phase of the step has a higher peak than in all others."""
    highest: dict[str, int] = {}
    for other in others:
        for phase, peak in other.step.on_device().peaks().items():
            highest[phase] = max(highest.get(phase, 0), peak.bytes)
    return any(peak.bytes > highest[phase] for phase, peak in sized.step.on_device().peaks().items())


def work_of_plans(
    config: AnyArchitecture, batches_of: BatchesOf = lambda plan: RunBatches(), threads: int = 1
) -> Callable[[RunConfig, Plan, float], Work]:
    """A function that gives what a micro-batch of a plan computes and moves at a number of tokens.

    `batches_of`, and the threads of a CPU, are those of the `estimator`, whose traces are reused.
    """
    traces = shared_traces(config, threads)

    def work_of(run: RunConfig, plan: Plan, tokens: float) -> Work:
        batches = batches_of(plan)
        evaluated = next(iter(heaviest(batches.evaluation)), None)
        spec = StepSpec.of(run, plan, None, evaluated)
        spec = replace(spec, eval_share=None, eval_fits=(), fits=batches.most_fits)
        if not spec.activations.apart:
            return traces.work(spec, tokens).at(tokens)
        extremes = (replace(spec, activations=way) for way in (Activations(), RECOMPUTED))
        kept, recomputed = (traces.work(each, tokens).at(tokens) for each in extremes)
        return mixed(kept, recomputed, spec.activations.apart)

    return work_of
