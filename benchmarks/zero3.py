"""Measures each process's memory in steps under ZeRO-3, on this CPU, and compares it with the prediction.

    python -m benchmarks.zero3                     # 20 random cases, each also with offload, on 2 processes
    python -m benchmarks.zero3 --cases 4 --seed 3
    python -m benchmarks.zero3 --again             # predicts what has been measured once more
    python -m benchmarks.zero3 --few-targets --out benchmarks/results/zero3_few_targets.json
    python -m benchmarks.zero3 --sequence --cases 10 --out benchmarks/results/zero3_sequence.json
    python -m benchmarks.zero3 --sequence --processes 4 --out benchmarks/results/zero3_sequence_4.json
    python -m benchmarks.zero3 --on-disk --out benchmarks/results/zero3_on_disk.json

As benchmarks/sharding.py, whose small models and meter these are. DeepSpeed runs five steps; of the last
three, the lowest of the highest numbers of bytes in each phase is compared with the prediction: the trace of
a step that `fully_shard` has divided, and DeepSpeed's buffers. What is higher in another one of them (`late`)
is what gloo's threads had not freed yet: equal steps have equal tensors. With offload to RAM, all of them are
in the memory that is measured: a CPU has no other, so that no copy to a device is seen. With `--on-disk`, all
are cases of offload, and what is in mapped files is not in the memory that is measured.
"""

import argparse
import gc
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.heap_meter import built_meter, loaded_meter, wait_for_gloo
from benchmarks.measurement_log import RESULTS, versions, write_result
from benchmarks.random_models import random_model
from benchmarks.sharded_cases import Case, case_of, divided, draw
from benchmarks.sharding import CPU, SEED, HeapMeter
from benchmarks.steps import step_with
from sft_play.choices.optimizers import make_optimizer, state_bytes
from sft_play.config.schema import TuningConfig
from sft_play.engines.base import Division
from sft_play.engines.deepspeed import configuration
from sft_play.engines.on_disk import StatesOnDisk
from sft_play.engines.registry import engine_of
from sft_play.model.architecture.shape import units_of
from sft_play.model.layers.loss_head import add_loss_head
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace.trace import (
    forward,
    make_batch,
    prepare_for_training,
    trace_step,
    trained_parameters,
)
from sft_play.ui.console import console

WORLD, CASES, STEPS, COUNTED = 2, 20, 5, 3
STAGE, LATE = 3, "late"
SEPARATE = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "smollm3")  # a projection each of q, k, v


def drawn_cases(count: int, seed: int, world: int, *, few_targets: bool, sequence: bool) -> list[Case]:
    """So many cases, of so many processes.

    With `few_targets`, LoRA of architectures that have those modules; with `sequence`, of joined rows whose
    tokens the processes divide.
    """
    cases = (drawn(number, seed, world) for number in itertools.count())
    if sequence:
        return list(itertools.islice(filter(None, (divided(case, world) for case in cases)), count))
    if not few_targets:
        return list(itertools.islice(cases, count))
    separate = (case for case in cases if case.architecture in SEPARATE)
    fitting = (replace(case, mode="lora", few_targets=True) for case in separate)
    return list(itertools.islice(fitting, count))


def drawn(number: int, seed: int, world: int) -> Case:
    """The case of this number, in fp32 or bf16; random weights in 4 bits are left out."""
    case = draw(number, world, seed)
    mode = "lora" if case.mode == "qlora" else case.mode
    dtype = "float32" if number % 2 else "bfloat16"
    return replace(case, mode=mode, dtype=dtype, mixed_precision="no", defers_exchange=False)


def step_of(case: Case, rank: int, offload: bool) -> StepSpec:
    """The step of one process, as `StepSpec.of` has it for this engine."""
    cast = case.dtype != "float32"
    return step_with(case.step(rank), cast_adapters=cast, regathers=True, offload=offload)


def settings(spec: StepSpec, trained: int) -> dict[str, Any]:
    """DeepSpeed's config for a step that trains so many elements."""
    zero = configuration(STAGE)["zero_optimization"]
    zero |= {"reduce_bucket_size": min(trained, zero["reduce_bucket_size"]), "overlap_comm": False}
    if spec.sharing.offloads:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    accumulation = 2 if spec.accumulates else 1
    return {
        "zero_optimization": zero | {"stage3_prefetch_bucket_size": 0},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": distributed.get_world_size() * accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": spec.precision.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def measure(case: Case, meter: Any, offload: bool, folder: str | None = None) -> dict[str, int]:
    """The bytes of this process: the highest of each phase, with its part of the weights.

    With a folder, weights and AdamW's states are in mapped files there.
    """
    import deepspeed

    from sft_play.engines.zero3_parts import partition

    spec, marks = step_of(case, distributed.get_rank(), offload), HeapMeter(meter)
    gc.collect()
    before = meter.meter_live()
    torch.manual_seed(case.number)
    model: Any = random_model(case.config, spec, TuningConfig(mode=case.mode, lora=spec.lora), CPU)
    gc.collect()
    meter.meter_reset()
    cast_to = None if spec.precision.dtype == "float32" else spec.precision.dtype
    partition(units_of(model), "cpu", cast_to, offload=offload, folder=folder)
    add_loss_head(model if spec.mode == "full" else model.get_base_model())
    prepare_for_training(model, spec)
    parameters = trained_parameters(model)
    assert not any(parameter.numel() for parameter in parameters)
    trained = sum(parameter.ds_numel for parameter in parameters)  # type: ignore[attr-defined]
    optimizer = make_optimizer(spec.optimizer, parameters)
    if folder:
        StatesOnDisk(Path(folder)).attach(optimizer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(spec, trained))
    marks.begin("forward")
    load = marks.peaks["load"]
    found: list[dict[str, int]] = []
    for _ in range(STEPS):
        _step(engine, model, spec, marks)
        found.append(marks.peaks)
    engine_of("deepspeed_z3").let_go(engine)
    del model, optimizer, engine, parameters
    gc.collect()
    peaks: dict[str, list[int]] = {name: [each[name] for each in found[-COUNTED:]] for name in found[-1]}
    late = max(map(max, peaks.values())) - max(map(min, peaks.values()))
    lowest = {name: min(each) - before for name, each in peaks.items()}
    return {**lowest, "load": load - before, LATE: late}


def _step(engine: Any, model: Any, spec: StepSpec, marks: HeapMeter) -> None:
    """An optimizer step and an evaluation batch, of which the last micro-batch counts."""
    if spec.accumulates:
        engine.backward(forward(engine, make_batch(spec), spec), scale_wrt_gas=False)
        engine.step()
    marks.begin("forward")
    marks.peaks = {}
    prefetched = make_batch(spec)  # noqa: F841 - by the data loader
    loss = forward(engine, make_batch(spec), spec)
    marks.begin("backward")
    engine.backward(loss, scale_wrt_gas=False)
    del loss
    marks.begin("optimizer")
    engine.step()
    marks.begin("evaluation")
    model.eval()
    with torch.no_grad():
        forward(model, make_batch(spec, evaluation=True), spec)
    model.train()
    marks.begin("forward")


def work(path: Path, out: Path, on_disk: bool) -> None:
    """What each process does: measures the cases in a file and writes the figures of all to another."""
    import deepspeed

    distributed.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    meter, lines = loaded_meter(), []
    wait_for_gloo(meter)
    folder = str(path.parent) if on_disk else None
    for tree, offload in product(json.loads(path.read_text()), (True,) if on_disk else (False, True)):
        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, measure(case_of(tree), meter, offload, folder))
        lines.append({"case": tree, "offload": offload, "measured": found})
    if distributed.get_rank() == 0:
        out.write_text(json.dumps(lines))
    distributed.destroy_process_group()


def predicted(case: Case, offload: bool, on_disk: bool) -> list[dict[str, int]]:
    """The same for each process, from traces."""
    found = []
    for rank in range(case.world):
        spec = step_of(case, rank, offload)
        division = Division(
            world_size=case.world,
            accumulates=case.accumulates,
            device="cpu",
            element_bytes=spec.trained_element_bytes,
            offloads=offload,
            states_on_disk=on_disk,
            state_bytes=lambda elements, spec=spec: (
                0 if on_disk else state_bytes(spec.optimizer, "cpu", elements)
            ),  # type: ignore[misc]
        )
        step = engine_of("deepspeed_z3").transform(trace_step(case.config, spec).step, division)
        found.append({phase: peak.bytes for phase, peak in step.peaks().items()})
    return found


def compare(case: Case, offload: bool, real: list[dict[str, int]], on_disk: bool) -> dict[str, Any]:
    """A row of the result: bytes by process, and the errors of the peaks without loading, and by phase."""
    pairs = list(zip(predicted(case, offload, on_disk), real, strict=True))
    phases = [name for name in real[0] if name != LATE]
    steps = [name for name in phases if name != "load"]
    errors = [max(p[n] for n in steps) / max(m[n] for n in steps) - 1 for p, m in pairs]
    by_phase = {name: max((p[name] / m[name] - 1 for p, m in pairs), key=abs) for name in phases}
    return {
        **asdict(case),
        "offload": offload,
        "measured": real,
        "predicted": [p for p, _ in pairs],
        "error": round(max(errors, key=abs), 6),
        "errors": {name: round(error, 6) for name, error in by_phase.items()},
    }


def summarised(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The errors of some rows."""
    errors = [row["error"] for row in rows]
    return {
        "cases": len(rows),
        "median": statistics.median(errors),
        "lowest": min(errors),
        "highest": max(errors),
        "median_by_phase": {
            name: statistics.median(row["errors"][name] for row in rows) for name in rows[0]["errors"]
        },
    }


def measured_again(path: Path) -> list[dict[str, Any]]:
    """The lines of an earlier result: cases with what was measured."""
    rows = json.loads(path.read_text())["rows"]
    return [{"case": row, "offload": row["offload"], "measured": row["measured"]} for row in rows]


def measured_now(cases: list[Case], on_disk: bool) -> list[dict[str, Any]]:
    """The same of random cases, measured by processes of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), Path(name) / "measured.json"
        (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cases[0].world}"]
        files = ["--work", str(folder / "cases.json"), "--out", str(found), *["--on-disk"] * on_disk]
        environment = {
            "LD_PRELOAD": str(built_meter(folder)),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        subprocess.run(
            [sys.executable, *launch, "-m", "benchmarks.zero3", *files],
            env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": "lo"},
            check=True,
        )
        return json.loads(found.read_text())  # type: ignore[no-any-return]


def main() -> None:
    """Runs the benchmark, or is one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--processes", type=int, default=WORLD)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--again", action="store_true", help="predict what has been measured once more")
    parser.add_argument("--few-targets", action="store_true", help="LoRA beside q_proj and v_proj alone")
    parser.add_argument("--sequence", action="store_true", help="processes divide the tokens too")
    parser.add_argument("--on-disk", action="store_true", help="offload, with weights and states in files")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "zero3.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.work:
        work(options.work, options.out, options.on_disk)
        return
    if options.again:
        options.seed = json.loads(options.out.read_text())["seed"]
        lines = measured_again(options.out)
    else:
        kind = {"few_targets": options.few_targets, "sequence": options.sequence}
        cases = drawn_cases(options.cases, options.seed, options.processes, **kind)
        lines = measured_now(cases, options.on_disk)
    rows = [
        compare(case_of(line["case"]), line["offload"], line["measured"], options.on_disk) for line in lines
    ]
    plain, away = ([row for row in rows if row["offload"] == offload] for offload in (False, True))
    summary = summarised(away) if options.on_disk else {**summarised(plain), "offload": summarised(away)}
    write_result(options.out, {"seed": options.seed, "versions": versions(), **summary}, {"rows": rows})
    console().print(summary)


if __name__ == "__main__":
    main()
