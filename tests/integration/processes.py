"""Jobs on several launched processes, and curves that must be the same."""

import json
import multiprocessing
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from sft_play.launch.accelerate import launch_command, launch_environment, run_launcher
from sft_play.launch.nodes import LOOPBACK, free_port, interface_towards
from sft_play.runlog import RunDir, read_metrics
from tests.jobs import SEQ
from tests.rounding import assert_same_values, summed

# Relative. The sums that another number of processes orders otherwise are those over the tokens of a step, of the
# loss and of each gradient; a padded step has 12 rows of up to 60 tokens, a packed one 12 of 64. Largest
# differences seen in 20 curves: loss 1.7e-7, evaluation 4e-8, gradient norm 1.2e-7. Without one of Adam's two
# moments, or with a wrong count of steps, they are 2e-5 or more.
NEAR = summed(12 * SEQ)
CLOSE = {
    "train/loss": NEAR,
    "eval/loss": NEAR,
    "eval/token_accuracy": 1e-6,  # a quotient of counts
    "train/grad_norm": NEAR,
    "train/learning_rate": 0,
}


LIMIT_S = 500
# A process that has imported all that a rank needs, which takes longer than what most tests do in one; torch and
# its threads have done nothing in it.
_imported = multiprocessing.get_context("forkserver")
_imported.set_forkserver_preload(["tests.integration.worker"])


def launch_jobs(
    folder: Path, engine: str, processes: int, specs: list[dict[str, Any]], *, forked: bool = False
) -> None:
    """Trains jobs one after the other, all in one launch.

    Args:
        folder: for their runs and for logs.
        engine: "ddp" or "deepspeed_z2".
        processes: their number.
        specs: as worker.py takes them, without the folder and the engine.
        forked: not by `accelerate launch`, but from a process that has imported everything.
    """
    for spec in specs:
        spec["output"] = str(folder)
        spec["settings"] = {"engine": engine, **spec["settings"]}
    file = folder / f"{engine}-{processes}.json"
    file.write_text(json.dumps(specs))
    (_fork if forked else _launch)(file, engine, processes)


def _launch(file: Path, engine: str, processes: int) -> None:
    command = launch_command(
        [str(Path(__file__).with_name("worker.py")), str(file)],
        engine=engine,
        device="cpu",
        processes=processes,
        cores=1,
    )
    result = run_launcher(command, RunDir(file.parent), timeout_s=LIMIT_S)
    log = file.with_name(f"{file.stem}.0.log")
    assert result.code == 0, f"{result.message}\n{log.read_text()[-3000:] if log.exists() else ''}"


def _fork(file: Path, engine: str, processes: int) -> None:
    from tests.integration.worker import as_rank

    values = launch_environment("cpu", processes, interface_towards(LOOPBACK))
    values |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    values |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    started = {}
    for rank in range(processes):
        own = values | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = _imported.Process(target=as_rank, args=(own, file))
        process.start()
        started[process.sentinel] = process
    deadline, waiting = time.monotonic() + LIMIT_S, dict(started)
    while waiting and (ended := wait(waiting, max(0, deadline - time.monotonic()))):
        if any(waiting.pop(each).exitcode for each in ended):
            break
    for process in waiting.values():  # after a failure, or too late
        process.kill()
    for rank, process in enumerate(started.values()):
        process.join()
        said = file.with_name(f"{file.stem}.{rank}.out").read_text()
        assert process.exitcode == 0, f"rank {rank}: {process.exitcode}\n{said[-3000:]}"


def assert_same_curve(run: Path, reference: Path, close: dict[str, float], after: int = 0) -> None:
    """Every value of these keys is that of another run, from step `after` on.

    Args:
        run: its folder.
        reference: folder of the other run.
        close: relative tolerance by key.
        after: the step.
    """
    for key, tolerance in close.items():
        ours, theirs = (
            {r["step"]: r[key] for r in read_metrics(RunDir(one)) if key in r and r["step"] > after}
            for one in (run, reference)
        )
        assert theirs and ours.keys() == theirs.keys()
        assert_same_values(ours.values(), theirs.values(), tolerance)
