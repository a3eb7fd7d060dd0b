"""Answers about pictures, and scores of rows with them, are those of plain transformers with its image processor."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from torch.nn.functional import log_softmax
from transformers import AutoModelForImageTextToText

from sft_play.commands.evaluate import score_rows
from sft_play.commands.merge import row_logits
from sft_play.config.schema import RunConfig
from sft_play.errors import DataError
from sft_play.model.build import load_for_inference
from sft_play.model.generation import answer_batches, generate
from sft_play.model.load import load_data
from sft_play.vision.prompts import Pictures
from sft_play.vision.types import pictures_of
from tests.pictures import save
from tests.unit.finished_run import write_rows
from tests.vision_models import model_folder

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 6
COUNTS = (2, 0, 1, 3, 0, 1)  # of pictures in each row


def rows_of(folder):
    rng = random.Random(7)
    for at, count in enumerate(COUNTS):
        sizes = [(rng.randint(20, 150), rng.randint(20, 150)) for _ in range(count)]
        names = [
            save(folder / f"{at}-{one}.png", *size, seed=9 * at + one).name for one, size in enumerate(sizes)
        ]
        question = "<image>" * count + f"what is {'x' * at}?"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": f"it is {at}"}]
        yield {"messages": turns, "images": names}


@pytest.fixture(
    scope="module", params=["smolvlm", "gemma", "qwen35", pytest.param("qwen", marks=pytest.mark.thorough)]
)
def prepared(request, tmp_path_factory):
    """A model, its rows as they are prepared, their pictures, and the model and processor of transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    base = model_folder(request.param, folder / "model")
    path = write_rows(folder / "rows.jsonl", list(rows_of(folder)))
    data = {"train_path": str(path), "val_fraction": 0}
    config = RunConfig.model_validate({"model": {"name": str(base)}, "data": data})
    loaded = load_data(config, progress=False)
    plain = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()
    processor = getattr(transformers, loaded.rows.recipe.processor).from_pretrained(base)
    return loaded, load_for_inference(config, None), plain, processor


def pictures_in(data):
    return Pictures.in_rows(data.recipe, data.train, data.cache_path)


def by_the_processor(loaded, processor, row):
    """What a plain model takes of a row, whose files are opened anew."""
    images = [Image.open(one.path).convert("RGB") for one in pictures_of(row["pictures"])]
    ids = torch.tensor([row["input_ids"]])
    given = dict(processor(images=[images], return_tensors="pt")) if images else {}
    given.pop("num_crops", None)  # of Gemma's, which its model does not take
    if images and loaded.architecture.model_type != "smolvlm":
        name = "token_type_ids" if loaded.architecture.model_type == "gemma3" else "mm_token_type_ids"
        given[name] = (ids == loaded.rows.recipe.image_token_id).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}


def test_answers_are_those_that_plain_transformers_gives_one_by_one(prepared):
    loaded, model, plain, processor = prepared
    rows, limits = list(loaded.rows.train), dict(max_new_tokens=NEW, do_sample=False)
    expected = []
    for row in rows:
        given = by_the_processor(loaded, processor, row)
        out = plain.generate(**given, **limits, pad_token_id=loaded.tokenizer.pad_token_id)
        expected.append(out[0, given["input_ids"].shape[1] :].tolist())
    prompts, pictures = [row["input_ids"] for row in rows], pictures_in(loaded.rows)
    found = generate(model, loaded.tokenizer, prompts, max_new_tokens=NEW, pictures=pictures)
    assert [one[: len(wanted)] for one, wanted in zip(found, expected, strict=True)] == expected
    assert len({tuple(one) for one in expected}) > 3

    how = dict(max_new_tokens=NEW, batch_size=2, pictures=pictures)
    answers = {
        row: answer.text
        for batch, made in answer_batches(model, loaded.tokenizer, prompts, **how)
        for row, answer in zip(batch, made, strict=True)
    }
    texts = [loaded.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in expected]
    assert [answers[row] for row in range(len(rows))] == texts


def test_scores_are_those_of_plain_transformers_and_another_picture_gives_others(prepared):
    loaded, model, plain, processor = prepared
    total = count = 0
    for row in loaded.rows.train:
        with torch.no_grad():
            logits = plain(**by_the_processor(loaded, processor, row)).logits[0].double()
        labels = torch.tensor(row["labels"])
        learned = (labels != -100).nonzero()[:, 0]
        total -= log_softmax(logits, -1)[learned - 1, labels[learned]].sum().item()
        count += len(learned)
    pictures = pictures_in(loaded.rows)
    scored = score_rows(model, loaded.rows.train, 0, batch_size=3, pictures=pictures)
    assert (scored.tokens, scored.loss) == (count, pytest.approx(total / count, rel=1e-5))

    row = loaded.rows.train[3]
    same = row_logits(model, [row["input_ids"]], pictures.of([3]))
    with torch.no_grad():
        wanted = plain(**by_the_processor(loaded, processor, row)).logits[0, -128:]
    assert torch.allclose(same, wanted, atol=1e-4)
    first, *others = pictures.of_rows[3]
    other = save(Path(first.path).with_name("other.png"), first.height, first.width, seed=99)
    swapped = [replace(first, path=str(other), size=other.stat().st_size), *others]
    changed = row_logits(model, [row["input_ids"]], replace(pictures, of_rows=[swapped]))
    assert (changed - same).abs().max() > 1e-2


def test_a_file_that_has_changed_is_named(prepared):
    loaded, model, *_ = prepared
    pictures = pictures_in(loaded.rows).of([2])
    path = Path(pictures.of_rows[0][0].path)
    content = path.read_bytes()
    path.unlink()
    try:
        with pytest.raises(DataError, match=f"{path.name} cannot be used"):
            generate(model, loaded.tokenizer, [[5]], max_new_tokens=1, pictures=pictures)
    finally:
        path.write_bytes(content)
