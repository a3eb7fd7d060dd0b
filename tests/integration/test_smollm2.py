"""A real checkpoint, from a package index: what is learned, how, and what becomes of it after training."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_play.builtin import demo
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.model.load import load_data
from sft_play.parts import IGNORED
from sft_play.runlog import RunDir, read_metrics
from tests.conftest import REPOSITORY
from tests.integration.cli import sft
from tests.rounding import assert_within, step_terms, summed

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CONFIG = REPOSITORY / "configs" / "smollm2.yaml"
STEPS = 3
SETTINGS = [
    "data.limit=2",
    "data.val_path=null",
    "data.val_fraction=0",
    "data.test_path=null",
    "train.effective_batch_size=2",
    f"train.max_steps={STEPS}",
    "train.lr_schedule=constant",
    "train.warmup_ratio=0",
    "train.logging_steps=1",
    "train.eval_steps=null",
    "train.probe=false",
    "eval.generate=false",
]


@pytest.fixture(scope="module")
def model():
    """The folder of SmolLM2."""
    pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
    try:
        return demo.smollm2()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def rows(model):
    """The two rows of training, tokenized."""
    return load_data(demo.materialise(load_config(CONFIG, SETTINGS)).config).rows.train


def test_the_reply_and_its_end_are_learned_and_nothing_else(model, rows):
    tokenizer = AutoTokenizer.from_pretrained(model)
    letters = [
        row["messages"] for row in map(json.loads, demo.reply_rows("train").read_text().splitlines()[:2])
    ]
    system = load_config(CONFIG, []).config.data.system_prompt
    for (user, assistant), row in zip(letters, rows, strict=True):
        before = (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user['content']}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        learned = [token for token in row["labels"] if token != IGNORED]
        assert tokenizer.decode(learned) == f"{assistant['content']}<|im_end|>"
        assert tokenizer.decode(row["input_ids"]).startswith(before + assistant["content"])


def test_the_curve_is_that_of_a_plain_loop(model, rows, tmp_path):
    rate = 1e-5
    done = sft("train", "--config", CONFIG, *SETTINGS, "tuning.mode=full", f"train.learning_rate={rate}", f"output.dir={tmp_path}")  # fmt: skip
    assert done.code == 0, done.err
    records = read_metrics(RunDir(tmp_path / "smollm2"))
    found = [record["train/loss"] for record in records if "train/loss" in record]

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=rate, weight_decay=0.0)
    learned = sum(label != IGNORED for row in rows for label in row["labels"])
    expected = []
    for _ in range(STEPS):
        losses = []
        for row in rows:
            logits = plain(torch.tensor([row["input_ids"]])).logits[0, :-1]
            labels = torch.tensor(row["labels"][1:])
            losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / learned)
            losses[-1].backward()
        expected.append(sum(losses).item())
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert expected[-1] < expected[0]
    allowed = summed(step_terms(plain, tokens=sum(len(row["input_ids"]) for row in rows)))
    for one, other in zip(found, expected, strict=True):
        assert_within(abs(one - other) / other, allowed)


def test_the_adapter_is_merged_exported_and_read_again(model, tmp_path):
    where = [f"output.dir={tmp_path}"]
    assert sft("train", "--config", CONFIG, *SETTINGS, *where).code == 0
    for command in ("merge", "merge-test", "export"):
        done = sft(command, "--config", CONFIG, *where)
        assert done.code == 0, done.err
    run = RunDir(tmp_path / "smollm2")
    (file,) = (run.path / "gguf").glob("*.gguf")
    again = tmp_path / "again"
    again.mkdir()
    from sft_play.builtin.converted import make_smollm2

    make_smollm2(again, file)
    merged, read, base = (load_file(folder / "model.safetensors") for folder in (run.merged, again, model))
    assert merged.keys() == read.keys() and all(torch.equal(merged[name], read[name]) for name in merged)
    assert any(not torch.equal(merged[name], base[name]) for name in merged)
    text = "<|im_start|>user\nOrder 12345, don't forget: 7 lamps for Zoë.<|im_end|>\n"
    one, two = (AutoTokenizer.from_pretrained(folder) for folder in (again, model))
    assert one(text)["input_ids"] == two(text)["input_ids"]
