"""A job on random tokenized rows, and its numbers: what the tests of the invariants start from."""

import shutil
from dataclasses import replace
from pathlib import Path

from datasets import Dataset

from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.batching import Share
from sft_play.data.prepare import PreparedData
from sft_play.data.stats import SPLITS
from sft_play.job import Job
from sft_play.launch.ranks import SINGLE_PROCESS, RankEnvironment
from sft_play.machine.gpus import detect
from sft_play.manifest import files_in, hash_files, read_manifest, write_manifest
from sft_play.model.load import load_data, load_model_config, load_tokenizer
from sft_play.parts import IGNORED
from sft_play.plan import Device
from sft_play.planning.candidates.drafts import draft_plans
from sft_play.planning.candidates.tiles import may_tile, with_tiles
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.search.choice import choose_plan
from sft_play.runlog import open_run, read_metrics
from sft_play.vision.looks import look_of
from tests.conftest import VOCABULARY, token_rows
from tests.plans import plan_with

SEQ = 64
NEW_TOKENS = ("<tool>", "w1 w2")


def make_job(
    model: Path,
    output: Path,
    name: str,
    *,
    mode: str = "lora",
    dtype: str = "auto",
    dropout: float = 0.0,
    lora: dict | None = None,
    new_tokens: tuple[str, ...] = (),
    rows=None,
    val=None,
    world_size: int = 1,
    machines: int = 1,
    engine: str = "auto",
    offload: str = "auto",
    nvme_path: str | None = None,
    evaluated: int | str = "auto",
    output_dtype: str = "auto",
    defers_exchange: bool = False,
    reshard_after_forward: bool = True,
    kept_layers: int = 0,
    sequence_parallel_size: int = 1,
    ranks: RankEnvironment = SINGLE_PROCESS,
    vision: str = "frozen",
    data: str | None = None,
    **train,
) -> Job:
    """A job of a few steps, on the rows of a file if `data` names one; `train` overrides the train section.

    No probe: it would take most of the time.
    """
    settings = {
        "probe": False,
        "logging_steps": 1,
        "effective_batch_size": 16,
        "max_steps": 5,
        "learning_rate": 5e-3,
        "report_to": [],
        **train,
    }
    config = RunConfig.model_validate(
        {
            "model": {"name": str(model), "new_tokens": new_tokens, "dtype": dtype},
            "data": {"train_path": "generated"},
            "tuning": {"mode": mode, "vision": vision, "lora": {"dropout": dropout, **(lora or {})}},
            "train": settings,
            "parallel": {
                "engine": engine,
                "offload": offload,
                "nvme_path": nvme_path,
                "sequence_parallel_size": sequence_parallel_size,
            },
            "eval": {"batch_size": evaluated},
            "output": {"name": name, "dir": str(output), "dtype": output_dtype},
        }
    )
    prepared = PreparedData(
        train=Dataset.from_list(rows or token_rows(100)),
        val=Dataset.from_list(val or token_rows(21, seed=1)),
        test=None,
        max_seq_len=SEQ,
        stats=dict.fromkeys(SPLITS),  # nobody counted these rows
        cache_path=output,
    )
    if rows is None:  # in epochs of 112 rows
        prepared = replace(prepared, shares=(Share(60), Share(40, 1.3)))
    if data:
        settings = {"data.train_path": data, "data.val_fraction": 0}
        prepared = load_data(config.changed(settings), trained=True).rows
    architecture = load_model_config(config.model)
    facts = DataFacts.of(prepared, config, look_of(architecture))
    padding_free, width = config.train.padding_free is not False, architecture.get_text_config().hidden_size
    drafts = draft_plans(
        config,
        device=Device(kind="cpu", name="CPU", bf16=True),
        world_size=world_size,
        machines=machines,
        rows=facts.rows,
        max_seq_len=SEQ,
        attention="varlen_sdpa",
        padding_free=padding_free,
        largest=lambda *cut: facts.largest_micro_batch(*cut, width, padding_free),
    )
    drafts = with_tiles(config.train, drafts) if may_tile(config, SEQ) else drafts
    plan, _ = choose_plan(config, drafts, None, None)
    plan = plan_with(plan, defers_exchange=defers_exchange, kept_layers=kept_layers)
    plan = plan_with(plan, reshard_after_forward=reshard_after_forward)
    return Job(
        ResolvedConfig(config, {}, Path("test")),
        open_run(str(output), name, ranks.rank),
        architecture,
        load_tokenizer(config.model),
        prepared,
        detect(),
        plan,
        ranks,
    )


def seal(folder: Path) -> None:
    """Writes the manifest of a folder anew, as if its files had always been as they are now."""
    write_manifest(folder, read_manifest(folder), hash_files(folder, files_in(folder)))


def losses(job: Job) -> tuple[list[float], list[float]]:
    """Training loss of each step, and the evaluation losses."""
    records = read_metrics(job.run)
    return [r["train/loss"] for r in records if "train/loss" in r], [
        r["eval/loss"] for r in records if "eval/loss" in r
    ]


def new_token_rows(count: int, seed: int = 0) -> list[dict]:
    """Rows as of `token_rows`, in which NEW_TOKENS of the tiny model stand, with loss and without."""
    rows = []
    for number, row in enumerate(token_rows(count, seed, longest=SEQ - 4)):
        new, prompt = VOCABULARY + number % len(NEW_TOKENS), row["labels"].count(IGNORED)
        ids = [new, *row["input_ids"], new]
        rows.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:], "length": len(ids)})
    return rows


def tied_copy(model: Path, folder: Path) -> Path:
    """The model with the weights of its embedding as its output head."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, folder)
    tied = AutoModelForCausalLM.from_pretrained(model, tie_word_embeddings=True)
    # transformers leaves them apart where a file has both and they differ
    tied.get_output_embeddings().weight = tied.get_input_embeddings().weight
    tied.save_pretrained(folder)
    return folder
