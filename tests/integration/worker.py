"""A rank of the tests: trains several jobs in one process group, so that the launch is paid for once.

accelerate launch ... worker.py <specs.json>     each spec: the arguments of jobs.make_job, and what else is
asked for
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from sft_play.machine.process import die_with_parent, importing_libraries

if __name__ == "__main__":
    die_with_parent()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script finds its own folder alone

with importing_libraries():  # as a rank does
    import torch

    from sft_play.job import Job
    from sft_play.launch.ranks import RankEnvironment, finish_rank
    from sft_play.model.adapters import decomposition
    from sft_play.planning.planner import fastest_plan
    from sft_play.planning.request import Request
    from sft_play.planning.rows.facts import DataFacts
    from sft_play.sizing.facts.architecture import Architecture
    from sft_play.train import session
    from sft_play.train.ranks import process_group
    from sft_play.train.run import train
    from sft_play.train.session import prepare_session
    from sft_play.train.settle import settle_plan
    from sft_play.ui.console import quiet_libraries
    from sft_play.vision.looks import look_of
    from tests.integration.loading import load
    from tests.integration.remains import remains_of_probes
    from tests.jobs import make_job

COMPILER = "torch._inductor.compile_fx"


def job_of(spec: dict[str, Any], ranks: RankEnvironment) -> Job:
    where = Path(spec["model"]), Path(spec["output"]), spec["name"]
    return make_job(*where, world_size=ranks.world_size, ranks=ranks, **spec["settings"])


def look(job: Job) -> dict[str, Any]:
    """The rows of each micro-batch that this rank would learn from, how DDP is set up, and what is copied."""
    trainer = prepare_session(job).trainer
    ddp = trainer.accelerator.prepare(trainer.model)
    kept = (
        "find_unused_parameters",
        "broadcast_buffers",
        "gradient_as_bucket_view",
        "static_graph",
        "bucket_bytes_cap",
    )
    batches = list(trainer.get_train_dataloader())
    first = batches[0]["input_ids"]
    return {
        "copies": trainer._prepare_input(first).data_ptr() != first.data_ptr(),
        "device": str(trainer.accelerator.device),
        "rows": [
            [row.tolist() for row in batch["input_ids"][0].split(batch["sequence_lengths"])]
            for batch in batches
        ],
        "ddp": {name: getattr(ddp, name) for name in kept},
    }


def probed(job: Job) -> dict[str, Any]:
    """The bytes of each phase that a probe of the main rank's plan measured, and those that were predicted."""
    facts = DataFacts.of(job.data, job.config, look_of(job.architecture))
    architecture, processes = Architecture.of(job.architecture), job.ranks.world_size
    plans = [fastest_plan(Request(job.config, architecture, facts, job.machine, processes))]
    torch.distributed.broadcast_object_list(plans)
    _, result = settle_plan(prepare_session(replace(job, plan=plans[0])))
    return {"measured": result.phases, "predicted": result.expected}


@contextmanager
def other_signs() -> Iterator[None]:
    """In the block, this rank finds the singular vectors of weights with the other sign."""
    decompose = decomposition._decompose

    def negative(name: str, layer: Any, init: str) -> None:
        decompose(name, layer, init)
        for part in (layer.lora_A, layer.lora_B):
            part["default"].weight.data.neg_()

    decomposition._decompose = negative
    try:
        yield
    finally:
        decomposition._decompose = decompose


@contextmanager
def boundaries_lost() -> Iterator[None]:
    """In the block, attention over divided tokens takes all joined rows for one."""
    divided = session.sequence_parallel_micro_batches

    def losing(collate: Any, *others: Any) -> Any:
        def as_one(rows: Any) -> Any:
            batch = collate(rows)
            return batch | {"sequence_lengths": [sum(batch["sequence_lengths"])]}

        return divided(as_one, *others)

    session.sequence_parallel_micro_batches = losing
    try:
        yield
    finally:
        session.sequence_parallel_micro_batches = divided


def main(path: Path) -> int:
    assert COMPILER not in sys.modules, "a rank imports PyTorch's compiler, for which it has no use"
    specs = json.loads(path.read_text())
    ranks = RankEnvironment.read()
    rank = ranks.rank
    jobs = [job_of(spec, ranks) for spec in specs]
    log = path.with_name(f"{path.stem}.{rank}.log")
    with quiet_libraries(log, silent=not ranks.is_main), process_group(jobs[0]):
        for job, spec in zip(jobs, specs, strict=True):
            changed = boundaries_lost() if spec.get("loses_boundaries") else nullcontext()
            with changed, other_signs() if spec.get("other_signs_on") == rank else nullcontext():
                if spec.get("only_look"):
                    (job.run.path / f"seen.{rank}.json").write_text(json.dumps(look(job)))
                elif spec.get("only_probe"):
                    (job.run.path / f"remains.{rank}.json").write_text(json.dumps(remains_of_probes(job)))
                elif spec.get("only_plan"):
                    (job.run.path / f"probed.{rank}.json").write_text(json.dumps(probed(job)))
                elif "load_as" in spec:
                    load(job, spec["load_as"])
                else:
                    train(job)
    return finish_rank(ranks, 0)


def as_rank(environment: dict[str, str], path: Path) -> None:
    """The same in a process that was forked, with what a launcher would have set; what it prints is in a file."""
    die_with_parent()
    with path.with_name(f"{path.stem}.{environment['RANK']}.out").open("w") as said:
        for number in (1, 2):
            os.dup2(said.fileno(), number)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.exit(main(path))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
