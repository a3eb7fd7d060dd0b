"""`make eval-lm`: published benchmarks, or tasks from a folder, through lm-eval (EleutherAI)."""

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sft_play.commands.merge import merged_folder
from sft_play.commands.models import BASE, MERGED, trained_name
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFitError, SftPlayError
from sft_play.extras import install_command
from sft_play.machine.host import detect_host
from sft_play.model.build import load_for_inference
from sft_play.model.generation import load_chat_tokenizer, say_stops
from sft_play.model.load import position_limit
from sft_play.model.weights.finished import finished_weights, release_memory
from sft_play.report.layout import ending
from sft_play.report.record import planned_batch, tree_of
from sft_play.report.table import on_screen
from sft_play.report.tables import harness_table
from sft_play.runlog import RunDir, read_json
from sft_play.spelling import make, var
from sft_play.ui.console import console, quiet_libraries
from sft_play.ui.progress import LOADING, progress_bar, spinner
from sft_play.units import counted
from sft_play.upstream.accelerate import is_out_of_memory
from sft_play.upstream.huggingface_hub import limit_network

BOOTSTRAPS = 1000  # for standard errors that have no formula
REASON_CHARACTERS = 300  # of a library's error
LOGIT_BYTES = 12  # for a token and an entry of the vocabulary: logits, their log_softmax, and room to spare
LARGEST_SHARE = 0.5  # of the free memory for them; activations, keys and values need the rest


@dataclass(frozen=True)
class Options:
    """What was typed."""

    tasks: tuple[str, ...]
    part: str = "result"
    folder: Path | None = None  # of task definitions, beside those of lm-eval
    limit: int | None = None  # rows of each task; default: all
    shots: int | None = None  # examples in the prompt; default: as the task says
    chat: bool = False  # put prompts into the chat template of the run


def evaluate_tasks(config: RunConfig, run: RunDir, options: Options) -> dict[str, object]:
    """Runs lm-eval on a finished run; prints a table, and adds the scores to eval-lm.json.

    Returns:
        The name of the model, seconds, and task -> metrics and rows.

    Raises:
        ConfigError: lm-eval or a task is missing, or cannot be run.
        CheckpointError: the run has no complete weights, or the merged model is not that of the run.
        DoesNotFitError: memory runs out.
    """
    _require_sound(options)
    weights, name = _weights(config, run, options.part)
    with quiet_libraries(run.log):
        limit_network()
        with spinner("loading lm-eval and the rows of its tasks"), _explaining(options, run):
            tasks = _load_tasks(options)
        tokenizer = load_chat_tokenizer(config)
        with spinner(LOADING):
            model: Any = load_for_inference(config, weights)
        say_stops(model, tokenizer)
        began = time.perf_counter()
        harness = _harness(config, run, model, tokenizer, chat=options.chat)
        with _explaining(options, run):
            found = _run(harness, tasks, config, options)
        seconds = time.perf_counter() - began
        del model, harness
        release_memory()
    scores = _scores(found, options)
    models = tree_of(read_json(run.harness).get("models"))
    models[name] = {**tree_of(models.get(name)), **scores}
    models = {name: models[name] for name in (BASE, trained_name(config), MERGED) if name in models}
    run.write_json(run.harness, {"lm_eval": version("lm_eval"), "models": models})
    console().print(on_screen(harness_table(models, scores)), "", ending({"numbers": run.harness}, []))
    return {"model": name, "seconds": round(seconds, 3), "tasks": scores}


def _require_sound(options: Options) -> None:
    """Checks what was typed, and that lm-eval is installed."""
    if not options.tasks:
        raise ConfigError(
            f"{var(TASKS='')} names no task; separate several with commas: {var(TASKS='hellaswag,arc_easy')}"
        )
    if options.folder and not options.folder.is_dir():
        raise ConfigError(
            f"{var(IN=options.folder)} is not a folder; expected one with task definitions (*.yaml)"
        )
    if find_spec("lm_eval") is None:
        raise ConfigError(
            f"{make('eval-lm')} needs lm-eval (not installed); run `{install_command('lm-eval')}`"
        )


def _weights(config: RunConfig, run: RunDir, part: str) -> tuple[Path | None, str]:
    """What to load (None: the base alone), and the name of that model."""
    weights = finished_weights(config, run)
    if part == BASE:
        return None, BASE
    if part == MERGED:
        return merged_folder(config, run, weights), MERGED
    return weights, trained_name(config)


def _manager(options: Options) -> Any:
    """lm-eval's index of tasks; without its own thousands if the folder has all that are asked."""
    from lm_eval.tasks import TaskManager

    folder = str(options.folder) if options.folder else None
    if folder:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(options.tasks) <= set(manager.all_tasks):
            return manager
    return TaskManager(include_path=folder)


def _load_tasks(options: Options) -> Any:
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    found = _manager(options).load(list(options.tasks))
    for task in found["tasks"].values():
        usual = task.get_config("num_fewshot")
        if usual is None or (options.shots is not None and usual != 0):  # 0 is the task's own decision
            task.set_config(key="num_fewshot", value=options.shots or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return found


def _run(harness: object, tasks: object, config: RunConfig, options: Options) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate
    from transformers import set_seed

    set_seed(config.train.seed)  # for tasks that sample answers
    return evaluate(
        lm=harness,
        task_dict=tasks,
        limit=options.limit,
        bootstrap_iters=BOOTSTRAPS,
        log_samples=False,
        system_instruction=config.data.system_prompt if options.chat else None,
        apply_chat_template=options.chat,
        fewshot_as_multiturn=options.chat,
    )


@contextmanager
def _explaining(options: Options, run: RunDir) -> Iterator[None]:
    """Names the tasks and the log in whatever lm-eval, a task or a data set raises within."""
    try:
        yield
    except SftPlayError:
        raise
    except Exception as error:
        with run.log.open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:REASON_CHARACTERS]}"
        names = ",".join(options.tasks)
        if is_out_of_memory(error):
            raise DoesNotFitError(
                f"out of memory in {var(TASKS=names)}: {reason}\nSet eval.batch_size=1, or free memory"
            ) from error
        raise ConfigError(
            f"{var(TASKS=names)}: lm-eval {version('lm_eval')} cannot run it: {reason}\n"
            f"The traceback is in {run.log}. {var(IN='<folder>')} adds tasks of your own to those that "
            f"`{Path(sys.executable).parent}/lm-eval ls tasks` lists"
        ) from error


def _scores(found: dict[str, Any], options: Options) -> dict[str, dict[str, object]]:
    """Task with its settings -> metrics (value, standard error), number of rows, version of the task."""
    scores = {}
    for task, values in found["results"].items():
        counts, shots = found["n-samples"].get(task, {}), found["n-shot"].get(task)
        settings = [f"{shots}-shot"] if shots else []
        settings += ["chat"] if options.chat else []
        settings += [f"limit {options.limit}"] if options.limit else []
        rows = counts.get("effective", values.get("sample_len", 0))  # groups have no counts
        metrics = _metrics(values)
        if metrics:
            label = f"{task} ({', '.join(settings)})" if settings else task
            scores[label] = {"metrics": metrics, "rows": rows, "version": found["versions"].get(task)}
    return scores


def _metrics(values: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Metric -> value and standard error, from keys like "acc,none" and "acc_stderr,none"."""
    metrics = {}
    for key, value in values.items():
        name, _, of_filter = key.partition(",")
        if of_filter and isinstance(value, int | float) and not name.endswith("_stderr"):
            found = {"value": value, "stderr": values.get(f"{name}_stderr,{of_filter}")}
            metric = name if of_filter == "none" else f"{name} ({of_filter})"
            metrics[metric] = {k: float(v) for k, v in found.items() if isinstance(v, int | float)}
    return metrics


def fitting_tokens(vocabulary: int) -> int:
    """The most tokens whose logits fit into memory now; lm-eval asks for those of all tokens of a batch."""
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else detect_host().ram_free_bytes or 0
    return max(1, int(LARGEST_SHARE * free) // (LOGIT_BYTES * vocabulary))


def batch_tokens(run: RunDir, fitting: int) -> int:
    """The most tokens of a batch: those of a micro-batch of the plan, at most `fitting`."""
    planned = planned_batch(run)
    if planned is None:
        return fitting
    size, length, packed = planned
    return min(size if packed else size * length, fitting)


def _harness(config: RunConfig, run: RunDir, model: Any, tokenizer: Any, *, chat: bool) -> Any:
    """The model as lm-eval takes it, with batches of our size and a progress bar.

    In a `chat`, the template writes all special tokens, and the tokenizer adds none, as in training.
    """
    from lm_eval.models.huggingface import HFLM

    fitting = fitting_tokens(model.get_output_embeddings().weight.shape[0])
    tokens = batch_tokens(run, fitting)
    longest = min(position_limit(model.config) or fitting, fitting)

    class Harness(HFLM):
        """Sizes each batch by its longest row, which comes first, instead of trying what fits."""

        batch_rows, next_batch = 1, 0

        def _batch_scheduler(self, pos: int, n_reordered_requests: Sequence[Any]) -> int:
            # called for each row in turn
            if pos in (0, self.next_batch):
                _, context, answer = n_reordered_requests[pos]
                self.batch_rows = max(1, tokens // min(len(context) + len(answer), longest))
                self.next_batch = pos + self.batch_rows
            return self.batch_rows

        def _detect_batch_size(self, requests: object = None, pos: int = 0) -> int:
            return max(1, tokens // longest)

        def loglikelihood(self, requests: object, disable_tqdm: bool = False) -> Any:
            return with_bar("scoring", requests, super().loglikelihood)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            with spinner(f"scoring {counted(len(requests), 'text')}"):
                return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def generate_until(self, requests: object, disable_tqdm: bool = False) -> Any:
            self.batch_size_per_gpu = config.eval.rows_answered_together
            return with_bar("answering", requests, super().generate_until)

    def with_bar(what: str, requests: Any, work: Callable[..., Any]) -> Any:
        with progress_bar(what, len(requests)) as done:
            harness.set_cache_hook(SimpleNamespace(add_partial=lambda *_: done(1)))
            return work(requests, disable_tqdm=True)

    size = config.eval.batch_size
    added = False if chat else None  # None: as the tokenizer does
    harness = Harness(
        pretrained=model, tokenizer=tokenizer, batch_size=size, max_length=longest, add_bos_token=added
    )
    return harness
