"""A job on random tokenised rows, and its numbers: what the tests of the invariants start from."""

from pathlib import Path

from datasets import Dataset

from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.packing import pack
from sft_play.data.prepare import PreparedData
from sft_play.job import Job
from sft_play.model import load_tokenizer
from sft_play.runlog import open_run, read_metrics
from sft_play.sizing.planner import Device, draft_plans
from sft_play.sizing.search import choose_plan
from tests.conftest import token_rows

SEQ = 64


def make_job(
    model: Path,
    output: Path,
    name: str,
    *,
    mode: str = "lora",
    rows=None,
    val=None,
    world_size: int = 1,
    engine: str = "auto",
    **train,
) -> Job:
    """A job of a few steps; `train` are settings of the config's train section. Without a probe, which would take longest."""
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
            "model": {"name": str(model)},
            "data": {"train_path": "generated"},
            "tuning": {"mode": mode},
            "train": settings,
            "parallel": {"engine": engine},
            "output": {"name": name, "dir": str(output)},
        }
    )
    data = PreparedData(
        train=Dataset.from_list(rows or token_rows(100)),
        val=Dataset.from_list(val or token_rows(21, seed=1)),
        test=None,
        max_seq_len=SEQ,
        stats={},
        cache_path=output,
    )
    lengths = data.train["length"]
    drafts = draft_plans(
        config,
        device=Device(kind="cpu", name="CPU", bf16=True),
        world_size=world_size,
        rows=len(pack(lengths, SEQ)) if config.train.packing else len(lengths),
        max_seq_len=SEQ,
        attention="varlen_sdpa",
    )
    plan = choose_plan(config, drafts, None, None)
    return Job(ResolvedConfig(config, {}, Path("test")), open_run(str(output), name), load_tokenizer(config.model), data, plan)


def losses(job: Job) -> tuple[list[float], list[float]]:
    """Training loss of each step, and the evaluation losses."""
    records = read_metrics(job.run)
    return [r["train/loss"] for r in records if "train/loss" in r], [r["eval/loss"] for r in records if "eval/loss" in r]
