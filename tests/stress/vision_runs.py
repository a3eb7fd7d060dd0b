"""Images: the memory of random runs on two processes, by phase.

    python -m tests.stress.vision_runs             # 60 runs; writes benchmarks/results/vision_runs_cpu.json
    python -m tests.stress.vision_runs --runs 6 --seed 7
    python -m tests.stress.vision_runs --engines deepspeed_z3 --runs 12 --out benchmarks/results/vision_zero3_cpu.json

Four small models, methods, engines and rows with and without pictures of odd sizes are drawn from a seed. As in
benchmarks/random_runs.py, a run's own trainer goes through its micro-batches twice, and in the second pass the
bytes that PyTorch's allocator holds are counted in all threads of each process. The highest process counts.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.heap_meter import built_meter, loaded_meter, wait_for_gloo
from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.random_cases import ENOUGH
from benchmarks.random_results import figures
from benchmarks.random_runs import launched, measure
from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import RunConfig
from sft_play.job import Job
from sft_play.launch.ranks import RankEnvironment
from sft_play.machine.gpus import detect
from sft_play.model.load import load_data, load_model_config, load_tokenizer
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.runlog import open_run
from sft_play.sizing.facts.architecture import Architecture
from sft_play.timeline import PHASES
from sft_play.train.ranks import from_main
from sft_play.ui.console import quiet_libraries
from sft_play.vision.looks import look_of
from tests.pictures import odd_sizes, save
from tests.stress.vision import WAYS
from tests.vision_models import MODEL_TYPES, model_folder

ENGINES = ("ddp", "fsdp2", "deepspeed_z2")
MODULE = "tests.stress.vision_runs"


def drawn(number: int, seed: int, engines: Sequence[str]) -> dict[str, Any]:
    """The settings of a run; engines take turns."""
    rng = random.Random(f"{seed}/{number}")
    kind, engine = rng.choice(sorted(MODEL_TYPES)), engines[number % len(engines)]
    ways = [way for way in WAYS if engine != "deepspeed_z2" or way[0] != "qlora"]
    (mode, vision), accumulation = rng.choice(ways), rng.choice((1, 2))
    padded = kind == "qwen35" or (kind != "gemma" and rng.random() < 0.3)
    return {
        "number": number,
        "seed": seed,
        "kind": kind,
        "engine": engine,
        "tuning": {"mode": mode, "vision": vision} | ({} if mode == "full" else {"lora": {"r": 4}}),
        "train": {
            "padding_free": False if padded else "auto",
            "effective_batch_size": rng.choice((2, 3)) * 2 * accumulation,
            "grad_accum": accumulation,
            "gradient_checkpointing": rng.random() < 0.5,
            "max_steps": rng.randint(2, 3),
        },
        "eval": {"batch_size": rng.choice((1, 2))},
    }


def written(run: dict[str, Any], folder: Path) -> None:
    """Writes the model and the rows of a run: half of them with one to four pictures."""
    rng = random.Random(f"rows {run['seed']}/{run['number']}")
    model_folder(run["kind"], folder / "model")
    for name, count in (("train", 24), ("val", 4)):
        lines = []
        for row in range(count):
            sizes = odd_sizes(rng.randint(1, 4) if rng.random() < 0.5 else 0, rng.randrange(2**32), 200)
            files = [
                save(folder / f"{name}-{row}-{at}.png", *size, seed=row) for at, size in enumerate(sizes)
            ]
            question = "<image>" * len(files) + f"what is {'y' * rng.randint(1, 40)}?"
            turns = (("user", question), ("assistant", f"it is {'x' * rng.randint(1, 60)}"))
            messages = [{"role": role, "content": content} for role, content in turns]
            lines.append(json.dumps({"messages": messages, "images": [file.name for file in files]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


def job_of(run: dict[str, Any], folder: Path, ranks: RankEnvironment) -> Job:
    """The job with its plan, which holds the prediction."""
    tree = {
        "model": {"name": str(folder / "model")},
        "data": {"train_path": str(folder / "train.jsonl"), "val_path": str(folder / "val.jsonl")},
        "tuning": run["tuning"],
        "train": {"probe": False, "report_to": [], **run["train"]},
        "eval": run["eval"],
        "parallel": {"engine": run["engine"]},
        "output": {"name": "run", "dir": str(folder)},
    }
    config = RunConfig.model_validate(tree)
    data = from_main(lambda: load_data(config, progress=False, trained=True)).rows
    architecture = load_model_config(config.model)
    facts = DataFacts.of(data, config, look_of(architecture))
    request = Request(
        config, Architecture.of(architecture), facts, detect(), ranks.world_size, budget_bytes=ENOUGH
    )
    plan = from_main(lambda: fastest_plan(request))
    tokenizer, opened = load_tokenizer(config.model), open_run(str(folder), "run", ranks.rank)
    return Job(
        ResolvedConfig(config, {}, Path("bench")),
        opened,
        architecture,
        tokenizer,
        data,
        detect(),
        plan,
        ranks,
    )


def work(path: Path) -> None:
    """What each process does: measures the runs in a file, and writes a line for each."""
    warnings.simplefilter("ignore")
    ranks, meter = RankEnvironment.read(), loaded_meter()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=5))
    wait_for_gloo(meter)
    for run in json.loads(path.read_text()):
        folder = path.parent / str(run["number"])
        from_main(lambda run=run, folder=folder: written(run, folder))
        job = job_of(run, folder, ranks)
        with quiet_libraries(path.parent / f"log-{ranks.rank}.txt"):
            own = measure(job, meter, probes=False)
        found: list[Any] = [None] * ranks.world_size
        torch.distributed.all_gather_object(found, own)
        if ranks.is_main and job.plan.memory:
            highest = {name: max(each[name] for each in found) for name in PHASES[1:]}
            predicted = {name: job.plan.memory.phases[name] for name in highest}
            errors = {name: round(predicted[name] / highest[name] - 1, 6) for name in highest}
            error = round(max(predicted.values()) / max(highest.values()) - 1, 6)
            row = run | {"error": error, "errors": errors, "predicted": predicted, "measured": highest}
            with path.with_suffix(".jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            shutil.rmtree(folder)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Runs the benchmark, or is one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--out", type=Path, default=RESULTS / "vision_runs_cpu.json")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    numbers, rows = range(args.first, args.first + args.runs), []
    runs = [drawn(number, args.seed, args.engines) for number in numbers]
    with tempfile.TemporaryDirectory() as name:
        meter = built_meter(Path(name))
        for engine in args.engines:
            path, own = Path(name) / f"{engine}.json", [run for run in runs if run["engine"] == engine]
            if not own:
                continue
            path.write_text(json.dumps(own))
            launched(["-m", MODULE, "--work", str(path)], meter, Path(name), engine, 2)
            rows += [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: row["number"])
    for row in rows:
        print(row["number"], row["kind"], row["engine"], row["tuning"]["mode"], row["tuning"]["vision"], row["error"], row["errors"])  # fmt: skip
    groups = {"all": rows} | {name: [row for row in rows if row["engine"] == name] for name in args.engines}
    record = {
        "what": __doc__.partition("\n")[0],
        "command": f"python -m {MODULE} {' '.join(sys.argv[1:])}".strip(),
        "made_on": made_on(torch.device("cpu")),
        "versions": versions(),
        "seed": args.seed,
        "runs": len(runs),
        "errors": {name: figures([row["error"] for row in group]) for name, group in groups.items() if group},
    }
    write_result(args.out, record, {"rows": rows})
    print(json.dumps(record["errors"], indent=1))


if __name__ == "__main__":
    main()
