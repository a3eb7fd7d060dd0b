"""Jobs on several launched processes, and curves that must be the same."""

import json
from pathlib import Path
from typing import Any

from sft_play.launch.accelerate import launch_command, run_launcher
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


def launch_jobs(folder: Path, engine: str, processes: int, specs: list[dict[str, Any]]) -> None:
    """Trains jobs one after the other, all in one launch.

    Args:
        folder: for their runs and for logs.
        engine: "ddp" or "deepspeed_z2".
        processes: their number.
        specs: as worker.py takes them, without the folder and the engine.
    """
    for spec in specs:
        spec["output"] = str(folder)
        spec["settings"] = {"engine": engine, **spec["settings"]}
    file = folder / f"{engine}-{processes}.json"
    file.write_text(json.dumps(specs))
    command = launch_command(
        [str(Path(__file__).with_name("worker.py")), str(file)],
        engine=engine,
        device="cpu",
        processes=processes,
        cores=1,
    )
    result = run_launcher(command, RunDir(folder), timeout_s=500)
    log = file.with_name(f"{file.stem}.0.log")
    assert result.code == 0, f"{result.message}\n{log.read_text()[-3000:] if log.exists() else ''}"


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
