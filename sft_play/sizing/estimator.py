"""Memory and time of any plan of a run, from few recorded steps: what the search asks.

A step is recorded symbolically for up to three micro-batches of each kind (checkpointing, accumulation, sequence length, tuning
mode); all others follow exactly. Answers are kept on disk by content, so that the second time nothing is recorded.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import AutoModelForCausalLM

from sft_play.config.schema import RunConfig
from sft_play.launch.accelerate import DEEPSPEED_CONFIG
from sft_play.launch.deepspeed import read_deepspeed_config
from sft_play.runlog import cache_dir
from sft_play.sizing import memory
from sft_play.sizing.planner import Memory, Plan
from sft_play.sizing.recordings import shared_recordings
from sft_play.sizing.search import Clock, Estimator
from sft_play.sizing.step import StepSpec
from sft_play.sizing.throughput import Speed, Workload, exchange, seconds_per_step

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WORKLOADS: dict[str, Workload | None] = {}  # of this process: the skeleton of a large model takes a while

RULES = 4  # raise when the same question must get another answer


def estimator(
    config: "PretrainedConfig",
    device: memory.DeviceBudget,
    supervised_share: float,
    eval_row_tokens: int | None = None,
    cache: Path | None = None,
) -> Estimator:
    """The function that tells the memory of a plan.

    Args:
        config: the architecture.
        device: of each process.
        supervised_share: of the tokens of the worst row; a GPU's loss head works on these alone.
        eval_row_tokens: of the longest row that is evaluated; default the plan's max_seq_len.
        cache: folder of earlier answers; default the project's cache folder.
    """
    recordings = shared_recordings(config)
    folder = cache or cache_dir() / "sizing"

    def estimate(run: RunConfig, plan: Plan) -> Memory:
        spec = StepSpec.of(run, plan, supervised_share, eval_row_tokens)
        engine = memory.Engine(
            name=plan.engine,
            world_size=plan.world_size,
            accumulates=plan.gradient_accumulation_steps > 1,
            buckets=zero_buckets(),
        )
        file = folder / f"{_key(config, spec, device, engine)}.json"
        if file.is_file():
            return Memory(**json.loads(file.read_text(encoding="utf-8")))
        answer = memory.estimate(recordings.step(spec), device, engine, element_bytes=spec.trained_element_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(answer)), encoding="utf-8")
        return answer

    return estimate


def zero_buckets() -> memory.ZeroBuckets:
    """ZeRO-2's buckets as the shipped DeepSpeed config has them."""
    zero = read_deepspeed_config(DEEPSPEED_CONFIG)["zero_optimization"]
    return memory.ZeroBuckets(elements=int(zero["reduce_bucket_size"]), overlap=bool(zero.get("overlap_comm")))


def _key(config: "PretrainedConfig", *parts: object) -> str:
    words = [config.to_json_string(use_diff=False), *map(repr, parts), torch.__version__, transformers.__version__, str(RULES)]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]


def workload(config: "PretrainedConfig", run: RunConfig, plan: Plan) -> Workload:
    """Sizes of the model for the roofline, from its skeleton on the meta device; experts that a token skips are left out."""
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings().weight.numel()
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    body = max(linear - head, parameters - head - model.get_input_embeddings().weight.numel())
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    active = body * getattr(text, "num_experts_per_tok", 1) / experts if experts else body
    quantised = linear - head if run.tuning.mode == "qlora" else 0
    element = 4 if plan.dtype == "float32" and plan.mixed_precision == "no" else 2
    sides = [sum(module.weight.shape) for module in model.modules() if isinstance(module, torch.nn.Linear)]
    adapter = run.tuning.lora.r * (sum(sides) - sum(model.get_output_embeddings().weight.shape))
    return Workload(
        matmul_parameters=int(active) + head,
        trained_parameters=parameters if run.tuning.mode == "full" else adapter,
        weight_bytes=quantised // 2 + (parameters - quantised) * element,
        quantised_parameters=quantised,
        layers=text.num_hidden_layers,
        attention_width=text.hidden_size,
    )


def known_workload(config: "PretrainedConfig", run: RunConfig, plan: Plan) -> Workload | None:
    """The workload, looked up once a process; None for an architecture that does not show its parts."""
    key = _key(config, run.tuning, plan.dtype, plan.mixed_precision)
    if key not in _WORKLOADS:
        try:
            _WORKLOADS[key] = workload(config, run, plan)
        except (AttributeError, TypeError, ValueError):  # any library's code runs here
            _WORKLOADS[key] = None
    return _WORKLOADS[key]


def exchanged_bytes(work: Workload, run: RunConfig, plan: Plan) -> int:
    """What each process sends to others in an optimizer step of the plan."""
    element = StepSpec.of(run, plan).trained_element_bytes
    return exchange(plan.engine, plan.world_size, work.trained_parameters, element, plan.gradient_accumulation_steps)


def clock(config: "PretrainedConfig", speed: Speed, mean_row_tokens: float) -> Clock:
    """The function that tells the seconds of an optimizer step of a plan.

    Args:
        config: the architecture.
        speed: of one device.
        mean_row_tokens: of the rows that are trained on; a packed row is full.
    """

    def seconds(run: RunConfig, plan: Plan) -> float | None:
        work = known_workload(config, run, plan)
        if work is None:
            return None
        row = plan.max_seq_len if plan.packing else mean_row_tokens
        return seconds_per_step(
            work,
            speed,
            tokens=round(plan.rows_per_micro_batch * row),
            sequence=round(mean_row_tokens),
            accumulation=plan.gradient_accumulation_steps,
            checkpointing=plan.gradient_checkpointing,
            exchanged_bytes=exchanged_bytes(work, run, plan),
        )

    return seconds
