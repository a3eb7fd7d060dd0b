"""One run of one contestant: prepared, timed, and evaluated on held-out rows."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, Any

from benchmarks.peers.contestants import HERE, REPOSITORY, Contestant
from benchmarks.peers.environments import ENVIRONMENTS, CannotInstall
from benchmarks.peers.work import PAD_ID, Work

LIMIT_S = 30 * 60  # of one run
SAID = 300  # characters of an error that are kept


class RunFailed(Exception):
    """A contestant did not finish; the message says why."""


def run(contestant: Contestant, work: Work, folder: Path, *, judge: bool, **variables: str) -> dict[str, Any]:
    """Runs a contestant; returns a line of results, also if it failed.

    Args:
        contestant: what runs.
        work: what it does.
        folder: emptied, then for all its files.
        judge: whether to compute the held-out loss of what it trained.
        variables: of the environment of the training, besides those that all contestants get.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    line: dict[str, Any] = {"load_average": [round(load, 2) for load in os.getloadavg()], "problem": None}
    try:
        ENVIRONMENTS[contestant.environment].install()
        return line | _timed(contestant, work, folder, judge=judge, **variables)
    except CannotInstall as error:
        return line | {"problem": f"cannot be installed: {error}"[:SAID]}
    except RunFailed as error:
        return line | {"problem": str(error)[:SAID]}


def _timed(
    contestant: Contestant, work: Work, folder: Path, *, judge: bool, **variables: str
) -> dict[str, Any]:
    script = contestant.prepare(work, folder, contestant.variant)
    _call(contestant, script.before, folder, "before")
    watched = folder / "watched"
    watched.mkdir()
    began = time.monotonic()
    watch = {"PEERS_WATCH": str(watched), "PEERS_PAD_ID": str(PAD_ID)}
    _call(contestant, script.train, folder, "train", **watch, **variables)
    found = figures([json.loads(path.read_text(encoding="utf-8")) for path in watched.glob("*.json")], began)
    found["seconds"] = round(time.monotonic() - began, 2)
    if not judge:
        return found
    try:
        _call(contestant, script.after, folder, "after")
        return found | {"loss": held_out_loss(contestant, work, script.trained, folder)}
    except RunFailed as error:
        return found | {"loss": None, "note": f"held-out loss: {error}"[:SAID]}


def _call(contestant: Contestant, words: tuple[str, ...], folder: Path, name: str, **more: str) -> str:
    """Runs a program of the contestant's environment in its folder; returns the last line of its output."""
    if not words:
        return ""
    environment = ENVIRONMENTS[contestant.environment]
    log = folder / f"{name}.log"
    variables = _variables(environment.calls == (), folder) | more
    with log.open("w", encoding="utf-8") as file:
        try:
            code = _wait([environment.program(words[0]), *words[1:]], folder, variables, file)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"not done after {LIMIT_S} s") from None
        except OSError as error:
            raise RunFailed(str(error)) from None
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if code:
        raise RunFailed(f"exit code {code}: {said[-1] if said else ''}")
    return said[-1] if said else ""


def _wait(words: list[str], folder: Path, variables: dict[str, str], log: IO[str]) -> int:
    """The exit code of a process; if waiting is interrupted, it and its children are killed."""
    with subprocess.Popen(
        words,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _variables(own: bool, folder: Path) -> dict[str, str]:
    """The environment: no network, no caches of earlier runs, no GPU; threads are left to the toolkit."""
    path = [str(HERE / "injected"), *([str(REPOSITORY)] if own else [])]
    return {
        **{
            name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONHOME")
        },
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder / "hugging_face"),
        "HF_HUB_OFFLINE": "1",
        "SFT_PLAY_CACHE": str(folder / "cache"),
    }


def figures(records: list[dict[str, Any]], began: float) -> dict[str, Any]:
    """Speed and padding from the records of the stopwatches.

    The last optimizer is the one that trained; an earlier one is from a probe. The first step warms up, so
    time counts from its end to the end of the last step.

    Raises:
        RunFailed: there were fewer than two steps.
    """
    record = max(records, key=lambda each: each["steps"][-1]["time"], default={"steps": []})
    steps = [step for step in record["steps"] if step["optimizer"] == record["steps"][-1]["optimizer"]]
    if len(steps) < 2:
        raise RunFailed(f"saw {len(steps)} optimizer steps: nothing to time")
    tokens, padding = (sum(step[name] for step in steps[1:]) for name in ("tokens", "padding"))
    seconds = steps[-1]["time"] - steps[0]["time"]
    return {
        "tokens_per_second": round(tokens / seconds, 1),
        "padding_share": round(padding / (tokens + padding), 4),
        "start_up_seconds": round(steps[0]["time"] - began, 2),
        "first_step_seconds": round(steps[0]["time"] - steps[0]["began"], 2),
        "steps": len(steps),
        "timed_tokens": tokens,
        "timed_seconds": round(seconds, 3),
        "step_seconds": [round(b["time"] - a["time"], 3) for a, b in zip(steps, steps[1:], strict=False)],
        "peak_mib": record["peak_kib"] // 1024,
        "threads": record["threads"],
        "torch": record["torch"],
    }


def held_out_loss(contestant: Contestant, work: Work, trained: Path, folder: Path) -> float:
    """The held-out loss, computed in the project's own environment for all contestants."""
    rows = [{"prompt": row.prompt, "completion": row.completion} for row in work.held_out]
    file = folder / "held_out.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    judge = Contestant(contestant.name, "project", contestant.prepare)
    words = ("python", "-m", "benchmarks.peers.evaluate", str(work.model), str(trained), str(file))
    said = _call(judge, words, folder, "judged")
    return round(json.loads(said)["loss"], 4)
