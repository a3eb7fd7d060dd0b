"""A run on images is followed by all that follows one on texts: answers, evaluation, merging, inference."""

import base64
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console

from sft_play.commands.chat import chat
from sft_play.commands.evaluate import before_after, evaluate_run
from sft_play.commands.infer import infer_batch
from sft_play.commands.merge import merge, merge_test
from sft_play.errors import DataError
from sft_play.model.load import load_data
from sft_play.report.run_page import THUMBNAIL
from sft_play.ui.console import set_console
from tests.pictures import save
from tests.unit.finished_run import random_run, write_rows
from tests.vision_models import model_folder

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = [(30, 50), (70, 64), (64, 40), (90, 20)]


THOROUGH = [pytest.param(kind, marks=pytest.mark.thorough) for kind in ("qwen", "qwen35", "gemma")]


@pytest.fixture(scope="module", params=["smolvlm", *THOROUGH])
def finished(request, tmp_path_factory):
    """A run whose adapter changes every layer, merged; its rows ask about a picture, or about none."""
    folder = tmp_path_factory.mktemp(request.param)
    for at, size in enumerate(SIZES):
        save(folder / f"{at}.png", *size, seed=at)
    rows = [
        {
            "messages": [
                {"role": "user", "content": "<image>" * (at < len(SIZES)) + f"what is {at}?"},
                {"role": "assistant", "content": f"it is {at}"},
            ],
            "images": [f"{at}.png"] if at < len(SIZES) else [],
        }
        for at in range(len(SIZES) + 2)
    ]
    path = str(write_rows(folder / "rows.jsonl", rows))
    base = model_folder(request.param, folder / "model")
    config, run = random_run(base, folder, train_path=path, val_path=path)
    config = config.changed({"eval.max_new_tokens": 5})
    merge(config, run)
    return run, config, folder


def test_answers_before_and_after_are_compared_and_have_small_copies_of_their_pictures(finished):
    run, config, _ = finished
    loaded = load_data(config, progress=False)
    found = before_after(config, run, loaded.rows, loaded.tokenizer)
    assert found.scores["before"]["answered_rows"] == found.scores["after"]["answered_rows"] == len(SIZES) + 2
    assert found.scores["after"]["exact_match"] is not None
    assert [one["prompt"] for one in found.samples][:2] == ["<image>what is 0?", "<image>what is 1?"]
    (shown,) = found.samples[1]["images"]
    assert THUMBNAIL.fullmatch(shown) and len(shown) < 4096
    small = Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2])))
    assert (small.format, small.size) == ("JPEG", SIZES[1][::-1])


def test_evaluation_scores_the_merged_model_as_the_adapter(finished):
    run, config, folder = finished
    losses = {name: one["loss"] for name, one in evaluate_run(config, run)["models"].items()}
    assert losses.keys() == {"base", "adapter", "merged"}
    assert losses["merged"] == pytest.approx(losses["adapter"], rel=1e-4) != losses["base"]
    lines = run.evaluation("val").with_suffix(".jsonl").read_text().splitlines()
    (asked,) = json.loads(lines[1])["messages"]
    assert asked["content"] == "<image>what is 1?" and asked["images"] == [str(folder / "1.png")]
    assert merge_test(config, run)["passed"]


def test_prompts_have_images_in_each_form_in_which_rows_have_them(finished, tmp_path):
    run, config, folder = finished
    picture = (folder / "1.png").read_bytes()
    save(tmp_path / "1.png", *SIZES[1], seed=1)
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    text = {"type": "text", "text": "what is 1?"}
    prompts = [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "1.png"}, text]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]}]},
        {"messages": [{"role": "user", "content": "<image>what is 1?"}], "images": ["1.png"]},
        {"question": "what is 1?", "image": "1.png", "answer": "it is 1"},
    ]
    out = tmp_path / "out.jsonl"
    infer_batch(config, run, write_rows(tmp_path / "in.jsonl", prompts), out)
    answers = {json.loads(line)["generated"] for line in out.read_text().splitlines()}
    table = pa.table({"question": ["what is 1?"], "image": [{"bytes": picture, "path": None}]})
    pq.write_table(table, tmp_path / "in.parquet")
    for _ in range(2):  # the second time, nothing is left to answer
        infer_batch(config, run, tmp_path / "in.parquet", tmp_path / "table.jsonl")
    written = json.loads((tmp_path / "table.jsonl").read_text())
    assert written["image"]["bytes"] == url.replace("image/png", "image")
    assert answers == {written["generated"]} != {""}


def test_an_image_is_shown_in_a_chat_before_the_next_message(finished, tmp_path, monkeypatch):
    run, config, folder = finished
    asked = write_rows(folder / "one.jsonl", [{"question": "what is 1?", "image": "1.png"}])
    infer_batch(config, run, asked, tmp_path / "out.jsonl")
    answer = json.loads((tmp_path / "out.jsonl").read_text())["generated"]
    lines = iter([f"/image {folder}/no.png", f"/image {folder}/1.png", "what is 1?", "/quit"])
    monkeypatch.setenv("SFT_PLAY_VERBOSE", "1")
    screen = Console(file=io.StringIO(), width=300, highlight=False)
    set_console(screen)
    try:
        chat(config, run, read=lambda _: next(lines))
    finally:
        set_console(None)
    said = screen.file.getvalue()
    assert "/image FILE: " in said and "cannot be used: No such file" in said
    assert f"added; 1 before your next message\n{answer}" in said and "to try" not in said


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("../1.png", "is not in"),
        ("no.png", "No such file"),
        ("http://127.0.0.1/a.png", "data.allow_urls=true"),
    ],
)
def test_files_of_prompts_are_under_the_rules_of_rows(finished, tmp_path, image, words):
    run, config, _ = finished
    save(tmp_path / "1.png", 30, 30)
    (tmp_path / "in").mkdir()
    asked = write_rows(tmp_path / "in" / "in.jsonl", [{"question": "what?", "image": image}])
    with pytest.raises(DataError, match=rf"in.jsonl:1: image '{image}' cannot be used: .*{words}"):
        infer_batch(config, run, asked, tmp_path / "out.jsonl")
