"""What the Python API returns: plans, runs, scores and answers, as objects that a notebook can show."""

import html
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from sft_play.choices.metrics import METRICS
from sft_play.config.load import load_config
from sft_play.runlog import RunDir, read_json, read_metrics
from sft_play.ui.screen import Screen

IN_A_NOTEBOOK = '<pre style="font-family: monospace; line-height: 1.2; white-space: pre">{code}</pre>'
WIDTH = 110  # characters of a plan in a notebook


@dataclass(frozen=True, repr=False)
class Planned:
    """A plan for one machine, or those for each of the common GPUs; a notebook shows it as a table."""

    tree: dict[str, Any]  # what `sft-play plan --json` prints; bytes are integers
    shown: RenderableType  # the same for a console of rich

    @property
    def plan(self) -> dict[str, Any]:
        """micro_batch_size, gradient_accumulation_steps, tokens_per_second and so on; {} of several GPUs."""
        return self.tree.get("plan", {})

    @property
    def memory(self) -> dict[str, Any]:
        """budget_bytes, peak_bytes and what they are made of; {} of several GPUs."""
        return self.tree.get("memory", {})

    @property
    def command(self) -> str:
        """What trains by this plan; "" of several GPUs."""
        return self.tree.get("command", "")

    def __str__(self) -> str:
        return self._recorded().export_text()

    __repr__ = __str__  # what a console shows; the tree has hundreds of numbers

    def _repr_html_(self) -> str:
        return self._recorded().export_html(inline_styles=True, code_format=IN_A_NOTEBOOK)

    def _recorded(self) -> Screen:
        screen = Screen(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)
        screen.print(self.shown)
        return screen


@dataclass(frozen=True)
class Scores:
    """How a model did on held-out rows; what is not known is None."""

    loss: float | None
    """Mean over supervised tokens, in nats."""
    token_accuracy: float | None
    """Share of supervised tokens, 0 to 1, that the model would have chosen."""
    answers: int
    """How many answers were generated; `metrics` are over them."""
    metrics: dict[str, float | None]
    """By name, those of eval.metrics."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Scores":
        """The scores of a model in summary.json or eval.<split>.json."""
        metrics = {name: found[name] for name in METRICS if name in found} | found.get("own_metrics", {})
        answers = found.get("answered_rows", 0)
        return cls(found.get("loss"), found.get("token_accuracy"), answers, metrics)


@dataclass(frozen=True)
class Answers:
    """The answers to one question."""

    prompt: str
    """The question, with what was said before it in short."""
    reference: str
    """The answer of the row."""
    texts: dict[str, str]
    """By "before" and "after", or by the name of the model."""
    right: dict[str, bool | None]
    """Whether each is right; None where no metric says so."""


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found."""

    models: dict[str, Scores]
    """By name: "base", "adapter" (after full fine-tuning "result"), and "merged" if it was merged."""
    answers: list[Answers] = field(repr=False)
    """All answers, as they were generated."""
    tree: dict[str, Any] = field(repr=False)
    """What `sft-play eval --json` prints."""


def answers_of(prompt: str, record: Mapping[str, Any], names: Mapping[str, str]) -> Answers:
    """A record of answers; `names` are those of the models, and under which keys it has them."""
    right = record.get("right") or {}
    texts = {name: record[key] for name, key in names.items()}
    return Answers(prompt, record["reference"], texts, {name: right.get(key) for name, key in names.items()})


@dataclass(frozen=True)
class Run:
    """A run directory; a notebook shows its report. What is not there is empty."""

    path: Path  # of the folder

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json: status, train_loss, eval before and after, tokens_per_second and so on."""
        return read_json(RunDir(self.path).summary)

    @property
    def status(self) -> str:
        """How it ended: "done", "interrupted", "failed" and so on; "" before its end."""
        return self.summary.get("status", "")

    @property
    def before(self) -> Scores:
        """The scores of held-out rows before training."""
        return self._scores("before")

    @property
    def after(self) -> Scores:
        """Those of the weights that were saved."""
        return self._scores("after")

    def _scores(self, when: str) -> Scores:
        return Scores.of((self.summary.get("eval") or {}).get(when) or {})

    @property
    def samples(self) -> list[Answers]:
        """The first `eval.samples` answers before and after training, without reasoning."""
        names, found = {"before": "before", "after": "after"}, self.summary.get("samples") or []
        return [answers_of(each["prompt"], each, names) for each in found]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """metrics.jsonl: one object a logging step, e.g. for `pandas.DataFrame(run.metrics)`."""
        return read_metrics(RunDir(self.path))

    @property
    def weights(self) -> Path:
        """The folder of the adapter or the model, for `from_pretrained`; CheckpointError if there is none."""
        from sft_play.model.weights.finished import finished_weights

        run = RunDir(self.path)
        return finished_weights(load_config(run.config).config, run)

    def _repr_html_(self) -> str:
        from sft_play.report.html import render
        from sft_play.report.run_page import run_page
        from sft_play.report.sound import read_sound

        page = html.escape(render(run_page(read_sound(self.path))))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 600px; border: 0"></iframe>'
