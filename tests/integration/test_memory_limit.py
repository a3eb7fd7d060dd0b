"""A real limit on the memory of a process, set while it trains."""

import resource
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sft_play.runlog import RunDir, read_json, read_metrics
from tests.conftest import VOCABULARY
from tests.integration.cli import finish, start, write_rows

pytestmark = [pytest.mark.integration, pytest.mark.faults]
ROWS, WORDS, HIDDEN = 64, 1100, 128  # a tensor of all tokens exceeds 32 MiB, so glibc gives it back at once
CONFIG = """\
model: {{name: {folder}/model, max_seq_len: 2048}}
data: {{train_path: {folder}/train.jsonl, val_path: null, val_fraction: 0, test_path: null}}
tuning: {{mode: full}}
train:
  max_steps: 5
  effective_batch_size: {rows}
  batch_size: {rows}
  gradient_checkpointing: false
  logging_steps: 1
  probe: false
  report_to: []
eval: {{generate: false}}
output: {{dir: {folder}/runs}}
"""


@pytest.fixture
def config(tiny_model, tmp_path) -> Path:
    """A run whose activations take hundreds of megabytes, and its weights almost nothing."""
    architecture = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=2048, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(architecture).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    turns = [
        [{"role": "user", "content": f"w{row}"}, {"role": "assistant", "content": f"w{row + 1} " * WORDS}]
        for row in range(ROWS)
    ]
    write_rows(tmp_path / "train.jsonl", [{"messages": messages} for messages in turns])
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(folder=tmp_path, rows=ROWS))
    return file


def data_bytes(pid: int) -> int:
    """What RLIMIT_DATA limits: the private memory that a process may write to."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmData" in line]
    return 1024 * int(line.split()[1])


def extremes(run: RunDir, pid: int, step: int) -> tuple[int, int]:
    """The least and the most that a process has in the step after this one."""
    seen: list[int] = []
    deadline = time.monotonic() + 300
    while (done := len(read_metrics(run))) <= step and time.monotonic() < deadline:
        if done == step:
            seen.append(data_bytes(pid))
        time.sleep(0.002)
    return min(seen), max(seen)


def losses(run: RunDir) -> list[float]:
    return [record["train/loss"] for record in read_metrics(run)]


def test_a_run_whose_memory_is_limited_meanwhile_goes_on_in_smaller_micro_batches(config, tmp_path):
    clean, limited = RunDir(tmp_path / "runs" / "clean"), RunDir(tmp_path / "runs" / "limited")
    done = finish(start("train", "--config", config, "output.name=clean"), 300)
    assert done.code == 0, done.err
    process = start("train", "--config", config, "output.name=limited")
    least, most = extremes(limited, process.pid, 1)
    assert most - least > 500 << 20
    limit = least + 3 * (most - least) // 4  # enough for half of the activations, not for all
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    done = finish(process, 300)
    assert done.code == 0, done.err
    summary = read_json(limited.summary)
    assert "continuing from the" in summary["out_of_memory"][0]
    assert summary["effective_batch_size"] == ROWS and summary["micro_batch_size"] < ROWS
    assert losses(limited) == pytest.approx(losses(clean), rel=1e-5)
