"""Memory and work of any plan of a run, derived from a few traces for the search.

Steps are traced at a few micro-batch sizes of each kind (checkpointing, accumulation, sequence length, tuning
mode); all other sizes follow exactly.
"""

from collections.abc import Callable

from sft_play.config.schema import RunConfig
from sft_play.engines.base import Division
from sft_play.engines.registry import engine_of
from sft_play.plan import Estimator, Memory, Plan
from sft_play.sizing import memory, questions
from sft_play.sizing.architecture import AnyArchitecture
from sft_play.sizing.step import StepSpec
from sft_play.sizing.traces import shared_traces
from sft_play.work import Work


def estimator(
    config: AnyArchitecture,
    device: memory.DeviceBudget,
    eval_shape: Callable[[Plan], tuple[int, int] | None] = lambda plan: None,
) -> Estimator:
    """A function that predicts the memory of a plan; for QLoRA, it raises what `require_packable` does.

    Args:
        config: the architecture.
        device: the budget of each process.
        eval_shape: rows and row tokens of a plan's largest evaluation batch; None: as its micro-batch.
    """
    traces = shared_traces(config)
    ask = traces.architecture.ask

    def estimate(run: RunConfig, plan: Plan, *, complete: bool = False) -> Memory:
        if run.tuning.mode == "qlora":
            ask(questions.packable)
        spec = StepSpec.of(run, plan, eval_shape(plan))
        division = Division(
            world_size=plan.world_size,
            accumulates=plan.gradient_accumulation_steps > 1,
            element_bytes=spec.trained_element_bytes,
            state_bytes=lambda elements: ask(questions.state_bytes, spec.optimizer, spec.device, elements),
        )
        engine = engine_of(plan.engine)
        return memory.estimate(traces.step(spec), device, engine, division, complete=complete)

    return estimate


def work_of_plans(
    config: AnyArchitecture,
    eval_shape: Callable[[Plan], tuple[int, int] | None] = lambda plan: None,
) -> Callable[[RunConfig, Plan, float], Work]:
    """A function that gives what a micro-batch of a plan computes and moves at a number of tokens.

    Args:
        config: the architecture.
        eval_shape: as in `estimator`, whose traces are reused.
    """
    traces = shared_traces(config)

    def work_of(run: RunConfig, plan: Plan, tokens: float) -> Work:
        return traces.work(StepSpec.of(run, plan, eval_shape(plan))).at(tokens)

    return work_of
