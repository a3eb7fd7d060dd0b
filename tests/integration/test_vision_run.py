"""A run on rows with images gives what a plain loop of transformers gives, which decodes and resizes for itself."""

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText

from sft_play.machine.gpus import detect
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.sizing.facts.architecture import Architecture
from sft_play.train.run import train
from sft_play.train.session import prepare_session
from sft_play.train.settle import settle_plan
from sft_play.units import KIB
from sft_play.vision.looks import look_of
from sft_play.vision.types import pictures_of
from tests.jobs import losses, make_job
from tests.pictures import save
from tests.vision_models import MODEL_TYPES, model_folder

pytestmark = pytest.mark.usefixtures("one_thread")
# Adam turns gradients of nearly zero into whole steps: at 1e-3 a processor's rounding shows in the third loss
ROWS, STEPS, RATE = 8, 3, 1e-4


def image_rows(folder):
    """Questions about no, one or two pictures of odd sizes, of which the last half of the rows has none."""
    rng, lines = random.Random(3), []
    for row in range(ROWS):
        count = rng.randint(1, 2) if row < ROWS // 2 else 0
        sizes = [(rng.randint(20, 150), rng.randint(20, 150)) for _ in range(count)]
        names = [save(folder / f"{row}-{at}.png", *size, seed=row + at).name for at, size in enumerate(sizes)]
        turns = [
            ("user", "<image>" * count + f"what is {row}?"),
            ("assistant", f"it is {'x' * rng.randint(1, 20)}"),
        ]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages, "images": names}))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines))
    return path


def plain_losses(base, data, kind):
    """The loss of each step of a plain loop over all rows, with the plain model and image processor."""
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    processor = getattr(transformers, data.recipe.processor).from_pretrained(base)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=RATE, weight_decay=0.0)
    rows = list(data.train)
    count, found = sum(label != -100 for row in rows for label in row["labels"]), []
    for _ in range(STEPS):
        total = 0.0
        for row in rows:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            images, seen = [Image.open(one.path).convert("RGB") for one in pictures_of(row["pictures"])], {}
            if images:
                seen = dict(processor(images=[images], return_tensors="pt"))
                name = {"smolvlm": "", "gemma": "token_type_ids"}.get(kind, "mm_token_type_ids")
                seen |= {name: (ids == data.recipe.image_token_id).int()} if name else {}
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **seen).logits
            loss = cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


THOROUGH = [pytest.param(kind, marks=pytest.mark.thorough) for kind in ("qwen", "gemma")]


@pytest.mark.parametrize("kind", ["smolvlm", "qwen35", *THOROUGH])
def test_a_run_with_images_learns_as_a_plain_loop_does(kind, tmp_path):
    base, data = model_folder(kind, tmp_path / "model"), str(image_rows(tmp_path / "data"))
    job = make_job(
        base, tmp_path / "runs", "run", mode="full", vision="full", data=data, batch_size=4, padding_free=kind != "qwen35",
        effective_batch_size=ROWS, max_steps=STEPS, learning_rate=RATE, lr_schedule="constant", warmup_ratio=0.0,
    )  # fmt: skip
    assert len(job.data.train) == ROWS and job.plan.batch.accumulation == 2
    train(job)
    expected = plain_losses(base, job.data, kind)
    assert losses(job)[0] == pytest.approx(expected, rel=2e-5)
    assert expected[-1] < expected[0] - 0.1


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("smolvlm", "qlora"), *(pytest.param(kind, "lora", marks=pytest.mark.thorough) for kind in MODEL_TYPES)],
)
def test_the_probe_of_a_run_with_images_measures_what_was_predicted(kind, mode, tmp_path):
    base, data = model_folder(kind, tmp_path / "model"), str(image_rows(tmp_path / "data"))
    job = make_job(base, tmp_path / "runs", "run", mode=mode, data=data, probe=True)
    facts = DataFacts.of(job.data, job.config, look_of(job.architecture))
    request = Request(job.config, Architecture.of(job.architecture), facts, detect(), 1)
    _, result = settle_plan(prepare_session(replace(job, plan=fastest_plan(request))))
    for phase in ("forward", "backward", "optimizer"):
        assert result.phases[phase] == pytest.approx(result.expected[phase], abs=16 * KIB), phase


WHOLE = dict(
    mode="full",
    vision="full",
    batch_size=2,
    effective_batch_size=4,
    max_steps=12,
    save_steps=2,
    learning_rate=RATE,
)


def train_until_killed(base, folder, data):
    """Trains until a checkpoint is there, and ends without a word."""
    job = make_job(base, folder, "killed", data=data, **WHOLE)

    def kill():
        while not (job.run.checkpoints / "checkpoint-4").exists():
            time.sleep(1e-3)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    torch.set_num_threads(1)
    train(job)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["smolvlm", pytest.param("gemma", marks=pytest.mark.slow)])
def test_a_killed_run_with_images_goes_on_bit_for_bit(kind, tmp_path):
    base, data = model_folder(kind, tmp_path / "model"), str(image_rows(tmp_path / "data"))
    whole = make_job(base, tmp_path, "whole", data=data, **WHOLE)
    train(whole)
    process = multiprocessing.get_context("spawn").Process(
        target=train_until_killed, args=(base, tmp_path, data)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    job = make_job(base, tmp_path, "killed", data=data, resume="auto", **WHOLE)
    train(job)
    assert losses(job) == losses(whole)
    found, expected = (load_file(each.run.model / "model.safetensors") for each in (job, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
