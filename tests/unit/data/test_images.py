"""Rows with images: found, counted, prepared once, refused in a sentence, and shown."""

import base64
import json
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from sft_play.config.schema import RunConfig
from sft_play.data.prepare import prepare
from sft_play.data.show import print_samples, process, table
from sft_play.errors import DataError
from sft_play.model.load import load_data
from sft_play.parts import IGNORED
from sft_play.rows.images import MARK
from sft_play.ui.console import console
from sft_play.vision import gallery
from sft_play.vision.decoding import pixels
from sft_play.vision.expansion import pictures_in
from sft_play.vision.types import pictures_of
from tests.pictures import drawn, encoded, recipe_of, save, save_folder, tokenizer_of

pytestmark = pytest.mark.usefixtures("cache")
ANSWER = {"role": "assistant", "content": "It is a cat."}


@pytest.fixture
def prepared(write_rows):
    """`prepared(rows, kind="qwen", ...)`: the rows, prepared for a small model of this kind."""

    def run(rows, kind="qwen", max_seq_len="auto", recipe=None, path=None, max_pixels=None, **data):
        tokenizer = tokenizer_of(kind)
        data = {"train_path": str(path or write_rows(rows)), "val_fraction": 0, **data}
        config = {"model": {"name": "small", "max_seq_len": max_seq_len}, "data": data}
        recipe = recipe or recipe_of(kind, tokenizer, max_pixels)
        return prepare(RunConfig.model_validate(config), tokenizer, recipe=recipe, progress=False)

    return run


def asked(*images, text="What is it?"):
    parts = [{"type": "image", "image": image} for image in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}, ANSWER]}


def data_url(content):
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def problem(prepared, row, **data):
    """What is said of a row that is not valid, the second of two."""
    with pytest.raises(DataError) as caught:
        prepared([asked(text="What?"), row], **data)
    (line,) = [line for line in str(caught.value).splitlines() if "rows.jsonl:2" in line]
    return line.partition("rows.jsonl:2: ")[2]


def test_rows_have_image_tokens_and_pictures_and_are_counted(prepared, tmp_path):
    save(tmp_path / "a.png", 50, 90)
    save(tmp_path / "b" / "c.jpg", 300, 90)
    data = prepared([asked("a.png"), asked(text="What?"), asked("b/c.jpg", "a.png")])
    rows = [pictures_of(row["pictures"]) for row in data.train]
    assert list(map(len, rows)) == [1, 0, 2]
    token, fits = data.recipe.image_token_id, [one.fit for found in rows for one in found]
    for row, found in zip(data.train, rows, strict=True):
        ids, labels = np.array(row["input_ids"]), np.array(row["labels"])
        assert row["length"] == len(ids)
        assert (ids == token).sum() == sum(one.fit.tokens for one in found)
        assert (labels[ids == token] == IGNORED).all()
        assert all(len(pixels(one, data.recipe, data.cache_path)) == one.fit.units for one in found)
    first, second = pictures_of(data.train[2]["pictures"])
    assert (first.height, first.width, second.height, second.width) == (300, 90, 50, 90)
    assert (
        first.path == str(tmp_path / "b" / "c.jpg")
        and first.size == (tmp_path / "b" / "c.jpg").stat().st_size
    )
    stats = data.stats["train"]
    assert (stats["pictures"], stats["picture_units"], stats["picture_tokens"]) == (
        3,
        sum(fit.units for fit in fits),
        sum(fit.tokens for fit in fits),
    )
    assert data.stats["images"]["processor"] == "Qwen2VLImageProcessorPil"
    assert data.stats["images"]["backend"].startswith("Pillow ")


@pytest.mark.parametrize("kind", ["qwen", "smolvlm", "gemma"])
def test_a_second_time_nothing_is_read_but_the_cache(prepared, tmp_path, kind, monkeypatch):
    save(tmp_path / "a.png", 50, 90)
    first = prepared([asked("a.png")], kind)
    monkeypatch.setattr(gallery, "size_of", lambda content: pytest.fail("read again"))
    again = prepared([asked("a.png")], kind)
    assert (again.cache_path, again.recipe) == (first.cache_path, first.recipe)


def test_what_pictures_depend_on_is_in_the_key_of_the_cache(prepared, tmp_path):
    path = save(tmp_path / "a.png", 50, 90)
    rows = [asked("a.png")]
    found = [prepared(rows), prepared(rows, max_pixels=64**2), prepared(rows, allow_urls=True)]
    (tmp_path / "other").mkdir()
    path.rename(tmp_path / "other" / "a.png")
    (tmp_path / "rows.jsonl").rename(tmp_path / "other" / "rows.jsonl")
    found.append(prepared(rows, path=tmp_path / "other" / "rows.jsonl"))
    assert len({one.cache_path for one in found}) == 4
    assert pictures_of(found[1].train[0]["pictures"])[0].fit.tokens < 50 * 90 / 64
    moved = pictures_of(found[3].train[0]["pictures"])[0]
    assert len(pixels(moved, found[3].recipe, found[3].cache_path)) == moved.fit.units


def test_prepared_conversations_keep_their_pictures(prepared, tmp_path):
    save(tmp_path / "a.png", 50, 90)
    data = prepared([asked("a.png", text=f"What? {n}") for n in range(20)], val_fraction=0.5)
    row = next(data.conversations("val"))
    assert row.messages[0]["content"].startswith(MARK)
    assert pictures_in(row.messages)[0].path == str(tmp_path / "a.png")


# -- where pictures are ------------------------------------------------------------------------------------


def test_a_data_url_is_kept_once_in_the_prepared_folder(prepared):
    content = encoded(drawn(50, 90))
    data = prepared([asked(data_url(content)), asked(data_url(content), text="And?")])
    one, other = (pictures_of(row["pictures"])[0] for row in data.train)
    assert one == other and (data.cache_path / one.path).read_bytes() == content
    assert len(list((data.cache_path / gallery.FOLDER).rglob("*"))) == 2  # a folder and a file in it
    assert len(pixels(one, data.recipe, data.cache_path)) == one.fit.units


def test_pictures_in_columns_of_parquet_are_read(prepared, tmp_path):
    contents = [encoded(drawn(50, 90, seed), "JPEG") for seed in range(3)]
    features = datasets.Features(
        {
            "question": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
        }
    )
    rows = {"question": ["<image> and <image>?", "q"], "answer": ["a", "b"]}
    pictures = [
        [{"bytes": one, "path": None} for one in contents[:2]],
        [{"bytes": contents[2], "path": None}],
    ]
    made = datasets.Dataset.from_dict({**rows, "images": pictures}, features)
    made.to_parquet(tmp_path / "rows.parquet")
    data = prepared(None, path=tmp_path / "rows.parquet")
    found = [pictures_of(row["pictures"]) for row in data.train]
    assert [[(data.cache_path / one.path).read_bytes() for one in row] for row in found] == [
        contents[:2],
        contents[2:],
    ]


def test_parts_of_parquet_whose_other_keys_are_null_are_read(prepared, tmp_path):
    content = encoded(drawn(50, 90))
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "It is a cat."}]}
    row = {
        "messages": [{"role": "user", "content": parts}, answer],
        "images": [{"bytes": content, "path": "a.png"}],
    }
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    data = prepared(None, path=tmp_path / "rows.parquet")
    assert [len(row["pictures"]) for row in data.train] == [1]


def test_paths_are_relative_to_the_file_of_the_row_and_files_of_a_folder_share_it(prepared, tmp_path):
    save(tmp_path / "all" / "images" / "a.png", 50, 90)
    rows = tmp_path / "all" / "rows" / "train.jsonl"
    rows.parent.mkdir()
    rows.write_text(json.dumps(asked("../images/a.png")) + "\n")
    assert prepared(None, path=tmp_path / "all").stats["train"]["pictures"] == 1
    with pytest.raises(
        DataError, match=r"it is not in .*rows; files elsewhere are allowed .* data\.image_folder"
    ):
        prepared(None, path=rows)
    rows.write_text(json.dumps(asked("a.png")) + "\n")
    folder = str(tmp_path / "all" / "images")
    assert prepared(None, path=rows, image_folder=folder).stats["train"]["pictures"] == 1


def test_rows_that_moved_to_another_folder_have_the_pictures_there(prepared, tmp_path):
    for place, height in (("one", 50), ("two", 70)):
        save(tmp_path / "all" / place / "a.png", height, 90)
    rows = tmp_path / "all" / "one" / "rows.jsonl"
    rows.write_text(json.dumps(asked("a.png")) + "\n")
    prepared(None, path=tmp_path / "all")
    rows.rename(tmp_path / "all" / "two" / "rows.jsonl")
    (picture,) = pictures_of(prepared(None, path=tmp_path / "all").train[0]["pictures"])
    assert (picture.path, picture.height) == (str(tmp_path / "all" / "two" / "a.png"), 70)


def test_a_link_does_not_lead_out_of_the_folder(prepared, tmp_path):
    secret = save(tmp_path.parent / f"{tmp_path.name}-secret.png", 50, 90)
    (tmp_path / "a.png").symlink_to(secret)
    for name in ("a.png", str(secret), f"file://{secret}", f"../{secret.name}"):
        assert "it is not in" in problem(prepared, asked(name))
    assert prepared([asked(str(secret))], image_folder="/").stats["train"]["pictures"] == 1
    absolute = save(tmp_path / "b.png", 50, 90)
    assert prepared([asked(str(absolute))]).stats["train"]["pictures"] == 1


@contextmanager
def server(answer):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        def log_message(self, *args):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


CONTENT = encoded(drawn(50, 90))


def serve(handler):
    if handler.path == "/away":
        handler.send_response(302)
        handler.send_header("Location", "ftp://127.0.0.1/a.png")
        handler.end_headers()
        return
    handler.send_response(404 if handler.path == "/none" else 200)
    handler.end_headers()
    try:
        for _ in range(400 if handler.path == "/large" else 1):
            handler.wfile.write(CONTENT if handler.path != "/large" else bytes(1 << 17))
    except OSError:
        pass  # the reader has had enough


def test_urls_are_downloaded_once_where_that_is_allowed(prepared):
    with server(serve) as url:
        said = problem(prepared, asked(f"{url}/a.png"))
        assert "it would be downloaded; to allow that, set data.allow_urls=true" in said
        data = prepared([asked(f"{url}/a.png")], allow_urls=True)
    (picture,) = pictures_of(data.train[0]["pictures"])
    assert (data.cache_path / picture.path).read_bytes() == CONTENT
    assert prepared([asked(f"{url}/a.png")], allow_urls=True).cache_path == data.cache_path


def test_what_is_wrong_with_a_url_is_said(prepared, monkeypatch):
    with server(serve) as url:
        assert "404" in problem(prepared, asked(f"{url}/none"), allow_urls=True)
        assert "unknown url type: ftp" in problem(prepared, asked(f"{url}/away"), allow_urls=True)
        assert "it is larger than 32.00 MiB" in problem(prepared, asked(f"{url}/large"), allow_urls=True)
        monkeypatch.setattr("sft_play.rows.images.URL_SECONDS", 0.0001)
        assert "cannot be used" in problem(prepared, asked(f"{url}/a.png"), allow_urls=True)
    assert "refused" in problem(prepared, asked(f"{url}/a.png"), allow_urls=True)


# -- what is refused ---------------------------------------------------------------------------------------


def test_a_row_whose_picture_is_wrong_is_named_with_it(prepared, tmp_path):
    (tmp_path / "a.png").write_bytes(b"nothing")
    cut = encoded(drawn(90, 90), "JPEG")
    (tmp_path / "b.jpg").write_bytes(cut[: len(cut) // 2])
    save(tmp_path / "long.png", 2, 500)
    assert problem(prepared, asked("a.png")).startswith("image 'a.png' cannot be used: it is no picture")
    assert "image 'b.jpg' cannot be used: it is damaged" in problem(prepared, asked("b.jpg"))
    assert "image 'none.png' cannot be used: No such file" in problem(prepared, asked("none.png"))
    assert "more than 200 times the other" in problem(prepared, asked("long.png"))
    assert "its data: URL is damaged" in problem(prepared, asked("data:image/png;base64"))
    assert "it is no picture that can be read" in problem(prepared, asked("data:image/png;base64,!"))
    assert "it is no picture" in problem(prepared, asked(data_url(b"x" * 1000)))
    assert "U+FDD2" in problem(prepared, asked(data_url(CONTENT), text=f"What is {MARK}?"))


def test_wrong_pictures_are_left_out_where_bad_rows_are(prepared, tmp_path):
    (tmp_path / "a.png").write_bytes(b"nothing")
    data = prepared([asked(text="What?"), asked("a.png")], bad_rows="drop")
    assert data.stats["train"]["dropped"] == {"not valid": 1}
    assert "pictures" not in data.train.column_names


def test_what_is_noted_of_rows_is_counted_once_beside_one_that_is_not_valid(prepared, tmp_path):
    save(tmp_path / "a.png", 50, 90)
    thought = {**ANSWER, "reasoning_content": "A cat."}
    good = {"messages": [asked("a.png")["messages"][0], thought]}
    bad = asked("a.png", text="<image> <image>")
    warnings = prepared([good, bad], kind="smolvlm", bad_rows="drop").stats["warnings"]
    assert any("1 conversation with reasoning that" in warning for warning in warnings)


def test_models_of_text_alone_refuse_the_row_and_say_which_models_read_images(prepared):
    said = problem(
        prepared, asked(data_url(CONTENT)), recipe="'toy' (llama) learns from text alone; models that ..."
    )
    assert said == "the row has images, and 'toy' (llama) learns from text alone; models that ..."


# -- rows that are too long --------------------------------------------------------------------------------


@pytest.mark.parametrize("overlong", ["drop", "split"])
def test_a_row_that_does_not_fit_is_dropped_with_its_pictures(prepared, tmp_path, overlong):
    save(tmp_path / "a.png", 300, 300)
    data = prepared([asked("a.png"), asked(text="What?")], max_seq_len=300, overlong=overlong)
    assert data.stats["train"]["dropped"] == {"longer than 300 tokens": 1}
    assert data.stats["train"]["pictures"] == 0


def test_a_row_that_does_not_fit_is_an_error_where_that_is_asked(prepared, tmp_path):
    save(tmp_path / "a.png", 300, 300)
    with pytest.raises(DataError, match="rows.jsonl:1: the row is longer than 300 tokens"):
        prepared([asked("a.png")], max_seq_len=300, overlong="error")


def test_exchanges_are_split_with_their_pictures(prepared, tmp_path):
    for name in "ab":
        save(tmp_path / f"{name}.png", 300, 300, ord(name))
    both = {"messages": [*asked("a.png")["messages"], *asked("b.png")["messages"]]}
    whole = prepared([both])
    assert [len(row["pictures"]) for row in whole.train] == [2]
    limit = len(whole.train[0]["input_ids"]) - 10
    split = prepared([both], max_seq_len=limit, overlong="split")
    found = [pictures_of(row["pictures"]) for row in split.train]
    assert [[one.path[-5:] for one in row] for row in found] == [["a.png"], ["b.png"]]


def test_a_truncated_row_ends_before_a_picture_that_does_not_fit(prepared, tmp_path):
    for name in "ab":
        save(tmp_path / f"{name}.png", 300, 300, ord(name))
    both = {"messages": [*asked("a.png")["messages"], *asked("b.png")["messages"]]}
    limit = len(prepared([both]).train[0]["input_ids"]) - 100
    data = prepared([both], max_seq_len=limit, overlong="truncate")
    (row,) = data.train
    (picture,) = pictures_of(row["pictures"])
    assert row["input_ids"].count(data.recipe.image_token_id) == picture.fit.tokens
    assert len(row["input_ids"]) < limit and data.stats["train"]["truncated"] == 1


# -- commands ----------------------------------------------------------------------------------------------


def test_show_says_sizes_and_tokens_and_writes_each_run_of_tokens_once(prepared, tmp_path, capsys):
    save(tmp_path / "a.png", 50, 90)
    data = prepared([asked("a.png"), asked(text="What?")])
    print_samples(data, tokenizer_of("qwen"), 2)
    shown = capsys.readouterr().out
    tokens = pictures_of(data.train[0]["pictures"])[0].fit.tokens
    assert f"image 1: 90 x 50 pixels, resized to 88 x 48: {tokens} tokens (a.png)" in " ".join(shown.split())
    assert shown.count("<|image_pad|>") == 1
    console().print(table(data))
    assert re.search(rf"^ *tokens of images +{tokens} *$", capsys.readouterr().out, re.MULTILINE)
    console().print(table(prepared([asked(text="What?")])))
    assert "images" not in capsys.readouterr().out


def test_process_writes_rows_that_can_be_prepared(prepared, tmp_path):
    save(tmp_path / "a.png", 50, 90)
    prepared([asked("a.png", data_url(CONTENT))])
    config = RunConfig.model_validate(
        {"model": {"name": "small"}, "data": {"train_path": str(tmp_path / "rows.jsonl")}}
    )
    out = tmp_path / "processed.jsonl"
    process(config, out)
    assert prepared(None, path=out).stats["train"]["pictures"] == 2


@pytest.mark.parametrize("kind", ["qwen", "smolvlm", "gemma"])
def test_rows_with_images_are_prepared_for_a_checkpoint(kind, tmp_path, write_rows):
    save(tmp_path / "a.png", 50, 90)
    folder = save_folder(kind, tmp_path / "model")
    config = RunConfig.model_validate(
        {
            "model": {"name": str(folder)},
            "data": {"train_path": str(write_rows([asked("a.png")])), "val_fraction": 0},
        }
    )
    loaded = load_data(config, progress=False)
    assert loaded.rows.recipe == recipe_of(kind) and loaded.rows.stats["train"]["pictures"] == 1
