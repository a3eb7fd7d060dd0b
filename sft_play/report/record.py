"""What a run directory holds, read for a report: whatever is there, also of a run that failed half way."""

import json
import math
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sft_play.config.resolved import Setting, read_resolved
from sft_play.errors import CheckpointError
from sft_play.files import open_regular
from sft_play.report.tables import METRICS, said_of, with_perplexity
from sft_play.runlog import LONGEST_METRICS, RunDir, held_since, read_json, read_metrics
from sft_play.spelling import make
from sft_play.units import MIB

SPLITS = ("val", "test")
SHOWN_ANSWERS = 5
LONGEST_ANSWER = 16 * MIB  # bytes of a line
RECENT = 5  # records whose mean says how long the next steps take
Tree = dict[str, Any]
# JSON that is sound, but not what we wrote
OTHER_FORM = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


# The files whose values stand on every page of a run -> where `RunRecord` has them.
FIELDS = {
    "summary.json": "summary",
    "plan.json": "plan",
    "metrics.jsonl": "metrics",
    "environment.json": "environment",
    "data.json": "data",
    "config.resolved.yaml": "settings",
}


@dataclass(frozen=True)
class RunRecord:
    """The files of one run; empty where a file is missing or damaged."""

    name: str
    settings: dict[str, Setting] = field(default_factory=dict)
    plan: Tree = field(default_factory=dict)
    scaling: list[Tree] = field(default_factory=list)  # the plan for other numbers of processes
    data: Tree = field(default_factory=dict)
    environment: Tree = field(default_factory=dict)
    summary: Tree = field(default_factory=dict)
    metrics: list[Tree] = field(default_factory=list)  # in the order of the steps
    evaluations: dict[str, Tree] = field(default_factory=dict)  # split -> what `make eval` found
    harness: Tree = field(default_factory=dict)  # model -> task -> what `make eval-lm` found
    answers: dict[str, list[Tree]] = field(default_factory=dict)  # split -> the first answers of `make eval`
    damaged: tuple[str, ...] = ()  # names of files that cannot be read
    activity: str = ""  # as in `activity_of`, when it was read

    def without(self, *names: str) -> "RunRecord":
        """The run as it would be if these files, of those in FIELDS, were damaged."""
        empty = {FIELDS[name]: type(getattr(self, FIELDS[name]))() for name in names}
        return replace(self, **empty, damaged=(*self.damaged, *names))

    def value(self, name: str) -> Any:
        """The value of a setting; None if it is unknown."""
        setting = self.settings.get(name)
        return setting.value if setting else None

    @property
    def chosen(self) -> Tree:
        """The choices of the plan; empty without a plan."""
        return tree_of(self.plan.get("plan"))

    @property
    def predicted_peak_bytes(self) -> Any:
        """The memory that the run was to need at most, from its end or else from its plan."""
        planned = tree_of(self.plan.get("memory")).get("peak_bytes")
        return self.summary.get("predicted_peak_bytes") or planned

    @property
    def memory_origin(self) -> str:
        """What `predicted_peak_bytes` is called."""
        planned = tree_of(self.plan.get("memory")).get("origin")
        return said_of(self.summary.get("predicted_memory_origin") or planned)

    def scores(self, when: str) -> Tree:
        """The scores "before" or "after" training, with their perplexity; empty if there are none."""
        return with_perplexity(_sound(tree_of(self.summary.get("eval")).get(when)))

    @property
    def last_step(self) -> int:
        """The last step of a run that has ended, or of the metrics; 0 if there is none."""
        done = self.summary.get("optimizer_steps")  # may be more than was logged
        ended = [done] if isinstance(done, int) and not self.activity else []
        return max((*ended, *(record["step"] for record in self.metrics)), default=0)

    @property
    def total_steps(self) -> int | None:
        """The steps that are planned; None if that is unknown."""
        total = self.chosen.get("total_steps")
        return total if isinstance(total, int) and total > 0 else None

    def latest(self, key: str, count: int = 1) -> float | None:
        """The mean of the last values of a number in the metrics; None if there is none."""
        values = [record.get(key) for record in self.metrics]
        numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
        return statistics.fmean(numbers[-count:]) if numbers else None

    @property
    def seconds_left(self) -> float | None:
        """What the steps ahead will take, without evaluations; None if that is unknown."""
        seconds = self.latest("speed/step_seconds", RECENT) or self.chosen.get("step_seconds")
        if self.total_steps is None or not isinstance(seconds, int | float):
            return None
        return max(0, self.total_steps - self.last_step) * seconds


def activity_of(run: RunDir) -> str:
    """What another process of this machine does in a run: "starting", "running" or "ending"; "" if none does.

    A run starts when its process has locked it and the plan is not written yet: all files may be those of an
    earlier run. It ends when its summary is written, and answers may be missing.
    """
    since = held_since(run)
    if since is None:
        return ""
    planned, summarised = (_written(path) for path in (run.plan, run.summary))
    if planned < since:
        return "starting"
    return "ending" if summarised > planned else "running"


def _written(path: Path) -> float:
    """When a file was written; 0 if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def read_run(path: Path) -> RunRecord:
    """Reads a run directory; CheckpointError if it does not exist, or is not that of a run."""
    run = RunDir(path)
    known = (run.config, run.plan, run.metrics, run.summary, run.log)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist{other_runs(path.parent)}")
    if not any(file.exists() for file in known):
        raise CheckpointError(f"{path} is not the directory of a run{other_runs(path.parent)}")
    evaluations = {split: run.evaluation(split) for split in SPLITS}
    files = (run.plan, run.scaling, run.data, run.environment, run.summary, run.harness)
    trees = {file: read_json(file) for file in (*files, *evaluations.values())}
    settings = read_resolved(run.config)
    damaged = [file for file, tree in trees.items() if not tree and file.exists()]
    damaged += [run.config] if run.config.exists() and not settings else []
    damaged += [run.metrics] if run.metrics.exists() and not _can_be_read(run.metrics) else []
    answers = {split: _first_answers(file.with_suffix(".jsonl")) for split, file in evaluations.items()}
    return RunRecord(
        name=path.resolve().name,
        settings=settings,
        plan=trees[run.plan],
        scaling=trees[run.scaling].get("scaling") or [],
        data=trees[run.data],
        environment=trees[run.environment],
        summary=trees[run.summary],
        metrics=_steps(run),
        evaluations={split: trees[file] for split, file in evaluations.items() if trees[file]},
        harness=tree_of(trees[run.harness].get("models")),
        answers=answers,
        damaged=tuple(file.name for file in damaged),
        activity=activity_of(run),
    )


def find_run(name: str | None, folder: Path) -> Path:
    """The directory of a run: a name within `folder`, or a path; without a name, the latest run.

    Raises CheckpointError if there are no runs.
    """
    if name:
        return Path(name) if "/" in name else folder / name
    if runs := runs_in(folder):
        return runs[0]
    raise CheckpointError(f"there are no runs in {folder}; run `{make('train')}` first")


def runs_in(folder: Path) -> list[Path]:
    """The runs of a folder, the latest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if RunDir(path).plan.is_file()]
    return sorted(found, key=lambda path: _written(RunDir(path).plan), reverse=True)


def tree_of(value: object) -> Tree:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _sound(scores: object) -> Tree:
    """The scores without those that are no numbers."""
    return {
        key: value
        for key, value in tree_of(scores).items()
        if key not in METRICS or isinstance(value, int | float)
    }


def planned_batch(run: RunDir) -> tuple[int, int, bool] | None:
    """Micro-batch, longest row in tokens and whether rows are packed, by a run's plan; None without one."""
    plan = tree_of(read_json(run.plan).get("plan"))
    size, length = plan.get("micro_batch_size"), plan.get("max_seq_len")
    if type(size) is not int or type(length) is not int or size < 1 or length < 1:
        return None
    return size, length, bool(plan.get("packing"))


def scores_of_models(evaluation: Tree) -> dict[str, Tree]:
    """Model -> its scores, of what `make eval` found; {} from earlier versions, which had one model."""
    return {name: _sound(scores) for name, scores in tree_of(evaluation.get("models")).items()}


def other_runs(folder: Path) -> str:
    """The end of a message that a run is not there: which ones are."""
    names = [path.name for path in runs_in(folder)[:5]]
    return f"; the latest runs beside it: {', '.join(names)}" if names else f"; run `{make('train')}` first"


def _steps(run: RunDir) -> list[Tree]:
    """The metrics in the order of their steps; records without a step that can be one are left out."""
    try:
        records = read_metrics(run)
    except (TypeError, RecursionError):
        return []
    numbered = [record for record in records if type(step := record.get("step")) is int and 0 <= step < 2**53]
    return sorted(numbered, key=lambda record: record["step"])


def _can_be_read(metrics: Path) -> bool:
    own_file = metrics.is_file() and not metrics.is_symlink()
    return own_file and metrics.stat().st_size <= LONGEST_METRICS


def _first_answers(path: Path) -> list[Tree]:
    """The first records of a file with one answer a line; it may be long."""
    try:
        with open_regular(path) as file:
            lines = [file.readline(LONGEST_ANSWER) for _ in range(SHOWN_ANSWERS)]
        found = [json.loads(line.decode(errors="replace")) for line in lines if line]
    except (OSError, ValueError, RecursionError):
        return []
    return [answer for answer in found if isinstance(answer, dict)]
