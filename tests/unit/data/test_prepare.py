import gc
import json
import multiprocessing
import os
import random
import signal
from dataclasses import replace
from datetime import date

import numpy as np
import pytest

from sft_play import fingerprints
from sft_play.config.schema import RunConfig
from sft_play.data import prepare as module
from sft_play.data import store, workers
from sft_play.data.chat import make_chat
from sft_play.data.length import length_limit
from sft_play.data.prepare import first_day, prepare
from sft_play.data.spans import Pieces, pieces_of
from sft_play.data.splits import assign
from sft_play.data.template import use_template
from sft_play.data.tokens import prompt_ids
from sft_play.errors import ConfigError, DataError, LaunchError, StorageError
from sft_play.parts import IGNORED
from sft_play.rows.json_files import Row
from tests.conftest import SHARED

pytestmark = pytest.mark.usefixtures("cache")
GSM8K = SHARED / "data" / "gsm8k" / "train.jsonl"


REWRITING = (  # each answer is rendered differently once another turn follows
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ('!' if loop.last and m.role == 'assistant' else '') }}"
    "{{ m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant!' }}{% endif %}"
)


def rows(count, seed=0, words=12):
    rng = random.Random(seed)
    vocabulary = ["What", "is", "two", "plus", "three", "five", "four", "Hello", "there", "friend", "brief"]
    text = lambda: " ".join(rng.choices(vocabulary, k=rng.randint(1, words)))  # noqa: E731
    return [{"question": f"{i} {text()}", "answer": f"{text()} {i}"} for i in range(count)]


def texts(dataset, tokenizer):
    return [tokenizer.decode(ids) for ids in dataset["input_ids"]]


def test_rows_have_ids_labels_and_length_and_answers_are_learned(run, make_tokenizer):
    data = run([{"question": "What?", "answer": "Four."}] + rows(19))
    assert data.train.column_names == ["input_ids", "labels", "length"]
    for row in data.train:
        assert row["length"] == len(row["input_ids"]) == len(row["labels"])
        assert row["labels"][0] == IGNORED
    assert data.max_seq_len == max(max(data.train["length"]), max(data.val["length"]))
    assert data.test is None
    assert data.stats["test"] is None
    assert len(data.train) == data.stats["train"]["rows"] == 19
    assert len(data.val) == data.stats["val"]["rows"] == 1
    assert json.loads(json.dumps(data.stats)) == data.stats


def test_the_counts_are_those_of_the_rows(run):
    data = run(rows(40), test_fraction=0.25)
    for split, dataset in (("train", data.train), ("val", data.val), ("test", data.test)):
        stats = data.stats[split]
        assert stats["rows"] == len(dataset)
        assert stats["tokens"] == sum(dataset["length"])
        assert stats["supervised_tokens"] == sum(
            label != IGNORED for labels in dataset["labels"] for label in labels
        )
        assert stats["lengths"]["max"] == max(dataset["length"])
        assert sorted(dataset["length"])[len(dataset) // 2] == pytest.approx(stats["lengths"]["p50"], abs=3)
        assert sum(stats["histogram"]["rows"]) + stats["histogram"]["longer"] == len(dataset)
    assert data.stats["largest_token_id"] == max(max(ids) for ids in data.train["input_ids"])


def test_fractions_split_disjointly_and_by_the_seed(run, make_tokenizer):
    data = run(rows(100), val_fraction=0.1, test_fraction=0.2)
    parts = [set(texts(part, make_tokenizer())) for part in (data.train, data.val, data.test)]
    assert [len(part) for part in parts] == [70, 10, 20]
    assert len(set.union(*parts)) == 100
    again, other = (
        run(rows(100), val_fraction=0.1, test_fraction=0.2),
        run(rows(100), val_fraction=0.1, test_fraction=0.2, seed=1),
    )
    assert again.cache_path == data.cache_path
    assert set(texts(other.val, make_tokenizer())) != parts[1]


def test_equal_conversations_are_never_split_apart():
    digests = np.arange(200, dtype=np.uint64) % 20
    homes = assign([digests, digests[:40]], {"val": 0.25, "test": 0.1}, seed=0)
    counts = {split: [int(mask.sum()) for mask in masks] for split, masks in homes.items()}
    assert counts == {"train": [130, 26], "val": [50, 10], "test": [20, 4]}
    for mask, other in homes.values():
        assert (mask == np.tile(mask[:20], 10)).all() and (other == mask[:40]).all()


def test_files_of_their_own_are_used_whole_and_held_out_rows_come_from_the_rest(run, write_rows):
    data = run(rows(20), val_path=str(write_rows(rows(7, seed=1), "val.jsonl")), test_fraction=0.5)
    assert (len(data.train), len(data.val), len(data.test)) == (10, 7, 10)


def test_conversations_for_generation_come_back_from_the_cache(run, write_rows):
    data = run(
        rows(20),
        val_path=str(write_rows([{"text": "once"}], "val.jsonl")),
        test_fraction=0.2,
        system_prompt="Be brief.",
    )
    asked = list(data.conversations("test"))
    assert len(asked) == len(data.test) == 4
    assert [message["role"] for message in asked[0].messages] == ["system", "user", "assistant"]
    assert asked[0].source.endswith(f"rows.jsonl:{int(asked[0].messages[1]['content'].split()[0]) + 1}")
    assert list(data.conversations("val")) == []


def test_the_second_time_nothing_is_tokenized(run, monkeypatch):
    first = run(rows(20))
    monkeypatch.setattr(module, "encode_all", lambda *args: pytest.fail("tokenized again"))
    second = run(rows(20))
    assert second.stats == first.stats
    assert list(second.train["labels"]) == list(first.train["labels"])


@pytest.mark.parametrize(
    "change",
    [
        {"supervise": "all"},
        {"system_prompt": "x"},
        {"dedup": True},
        {"limit": 19},
        {"max_seq_len": 500},
        {"chat_template": "chatml"},
        {"seed": 1},
        {"val_fraction": 0.5},
        {"overlong": "truncate"},
    ],
)
def test_what_changes_the_rows_changes_the_cache(run, change):
    assert run(rows(20), **change).cache_path != run(rows(20)).cache_path


def test_other_code_or_another_version_of_a_library_tokenizes_anew(run, monkeypatch, tmp_path):
    seen, real = {run(rows(20)).cache_path}, fingerprints._version
    monkeypatch.setattr(fingerprints, "_version", lambda name: "99" if name == "tokenizers" else real(name))
    seen.add(run(rows(20)).cache_path)
    data, read, images = module.SOURCES
    for other in ((tmp_path, read, images), (data, tmp_path, images), (data, read, tmp_path)):
        monkeypatch.setattr(module, "SOURCES", other)
        seen.add(run(rows(20)).cache_path)
    assert len(seen) == 5


def test_what_does_not_change_the_rows_finds_the_cache(run, write_rows, make_tokenizer):
    first = run(rows(20), val_fraction=0.0)
    padded = make_tokenizer()
    padded(
        ["a b c"], padding="max_length", max_length=100, truncation=True
    )  # leaves its mark on the tokenizer
    assert (
        run(rows(20), val_fraction=0.0, seed=5, num_workers=2, tokenizer=padded).cache_path
        == first.cache_path
    )


def test_a_cut_cache_is_made_anew(run):
    first = run(rows(20))
    ids = list(first.train["input_ids"])
    (first.cache_path / "train.arrow").write_bytes(b"")
    (first.cache_path.parent / f"{first.cache_path.name}.tmp-1").mkdir()  # left by a process that was killed
    assert list(run(rows(20)).train["input_ids"]) == ids
    assert sorted(path.suffix for path in first.cache_path.parent.iterdir()) == ["", ".lock"]


def test_a_cache_with_a_flipped_bit_is_noticed_and_made_anew(run, capsys):
    first = run(rows(20))
    ids, stats = list(first.train["input_ids"]), {**first.stats, "seconds": 0}
    files = [path for path in first.cache_path.iterdir() if path.stat().st_size]
    assert len(files) > 3
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        again = run(rows(20))
        assert list(again.train["input_ids"]) == ids and {**again.stats, "seconds": 0} == stats, file.name
        assert "is damaged" in " ".join(capsys.readouterr().out.split())
    assert again.digests() == first.digests() != run(rows(20, seed=1)).digests()


def test_several_processes_give_the_rows_of_one_in_the_same_order(run):
    many = rows(1000)
    one, two = run(many, num_workers=1), run([*many, {"question": "q", "answer": ""}], num_workers=2)
    assert list(two.train["labels"]) == list(one.train["labels"])
    assert two.cache_path != one.cache_path


def test_many_rows_are_tokenized_without_offsets_to_the_same_tokens(run, monkeypatch, tmp_path):
    few, made = run(rows(40), val_fraction=0.0), []
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr(module, "SMALL_BYTES", 0)
    monkeypatch.setattr(module, "pieces_of", lambda tokenizer: made.append(pieces_of(tokenizer)) or made[-1])
    assert run(rows(40), val_fraction=0.0).train[:] == few.train[:]
    assert len(made) == 1 and isinstance(made[0], Pieces)


def test_an_error_in_a_worker_names_the_first_wrong_row(run):
    bad = rows(1000)
    bad[300] = {"question": "q", "answer": None}
    bad[900] = {"question": None, "answer": "a"}
    with pytest.raises(DataError, match=r"rows.jsonl:301: answer is missing or null"):
        run(bad, num_workers=2)


def test_a_killed_worker_is_an_error_and_not_a_hang(run, monkeypatch):
    monkeypatch.setattr(workers, "encode_chunk", lambda job, rows: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(LaunchError, match="data.num_workers=1"):
        run(rows(1000, words=400), num_workers=2)  # more than a pipe holds


def _prepare_and_report(config, tokenizer, queue):
    calls = []
    original = module.encode_all
    module.encode_all = lambda *args: calls.append(1) or original(*args)
    queue.put((len(prepare(config, tokenizer, progress=False).train), len(calls)))


def test_processes_that_prepare_at_once_do_the_work_once(write_rows, make_tokenizer):
    config = RunConfig.model_validate(
        {"model": {"name": "toy"}, "data": {"train_path": str(write_rows(rows(500)))}}
    )
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=_prepare_and_report, args=(config, make_tokenizer(), queue)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert [rows for rows, _ in results] == [475] * 4
    assert sum(calls for _, calls in results) == 1


def _task(tokenizer):
    use_template(tokenizer, "plain")
    return workers.EncodingTask(make_chat(tokenizer, "assistant"), "question_answer", None, "drop")


def test_rows_are_read_only_a_little_ahead_of_the_workers(make_tokenizer):
    read = []

    def source():
        for number, data in enumerate(rows(20 * workers.CHUNK_ROWS)):
            read.append(number)
            yield Row(data, "f", number)

    chunks = workers.encode_all(_task(make_tokenizer()), source(), 2)
    first = next(chunks)
    assert len(first.digests) == workers.CHUNK_ROWS
    assert len(read) <= 6 * workers.CHUNK_ROWS
    chunks.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_libraries_that_the_garbage_collector_leaves_alone_stay_so(make_tokenizer, processes):
    """Else each full collection of what follows in this process looks at all of them."""
    raw = [Row(data, "f", number) for number, data in enumerate(rows(3))]
    gc.freeze()
    before = gc.get_freeze_count()
    assert list(workers.encode_all(_task(make_tokenizer()), raw, processes))
    assert gc.get_freeze_count() > before / 2


def test_dropped_rows_are_counted_with_their_reason(run):
    mixed = [*rows(30), {"question": "q", "answer": " "}, {"question": "long " * 200, "answer": "a"}]
    data = run(mixed, max_seq_len=150, val_fraction=0.0)
    assert data.stats["train"]["dropped"] == {"blank assistant turn": 1, "longer than 150 tokens": 1}
    assert (data.stats["train"]["read"], data.stats["train"]["rows"], data.max_seq_len) == (32, 30, 150)


def test_overlong_rows_are_cut_or_refused_as_the_config_says(run):
    mixed = [
        *rows(30),
        {"question": "What?", "answer": "two " * 300},
        {"question": "long " * 300, "answer": "a"},
    ]
    data = run(mixed, max_seq_len=150, val_fraction=0.0, overlong="truncate")
    assert data.stats["train"]["truncated"] == 1
    assert data.stats["train"]["dropped"] == {"no answer left after truncation": 1}
    assert data.train[30]["length"] == 150
    with pytest.raises(DataError, match=r"rows.jsonl:31, 32: the row is longer than 150 tokens"):
        run(mixed, max_seq_len=150, overlong="error")


def test_dedup_drops_later_copies_over_all_chunks(run):
    twice = rows(300) * 2
    assert run(twice, val_fraction=0.0).stats["train"]["rows"] == 600
    stats = run(twice, dedup=True, val_fraction=0.0).stats["train"]
    assert (stats["rows"], stats["dropped"]) == (300, {"duplicate": 300})


@pytest.mark.parametrize(
    ("train", "settings", "said"),
    [
        (
            [{"messages": [{"role": "user", "content": "q"}]}] * 3,
            {},
            r"none of the 3 rows is usable \(no assistant turn: 3\)",
        ),
        (
            rows(40),
            {"max_seq_len": 4},
            "longer than 4 tokens: 40.*\nIncrease model.max_seq_len.*truncate or split",
        ),
        (rows(40), {"max_seq_len": 4, "overlong": "truncate"}, "no answer left after truncation: 40"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], {}, "no answer to train on: 1"),
        ([{"text": " "}], {}, "blank text: 1"),
        ("\n\n", {}, "has no rows"),
    ],
)
def test_zero_supervised_tokens_are_an_error_that_says_why(run, train, settings, said):
    with pytest.raises(DataError, match=f"(?s){said}") as error:
        run(train, **settings)
    assert error.value.exit_code == 3


def test_an_unusable_validation_file_is_an_error_too(run, write_rows):
    with pytest.raises(DataError, match=r"data.val_path: 0 supervised tokens"):
        run(rows(20), val_path=str(write_rows([{"question": "q", "answer": ""}], "val.jsonl")))


def test_odd_data_is_warned_of(run, write_rows):
    same = rows(20)
    warnings = run(same * 2, val_path=str(write_rows(same, "val.jsonl")), limit=30).stats["warnings"]
    assert "only 30 training rows: the model will overfit" in warnings
    assert "20 of 20 val conversations are also in the training data" in warnings
    assert "10 of 30 training conversations are duplicates; set data.dedup=true to drop them" in warnings
    (one,) = run(rows(1), val_fraction=0).stats["warnings"]
    assert one.startswith("only 1 training row:")
    assert run(rows(1)).val is None
    half = [*rows(40), *[{"question": "q", "answer": ""}] * 40]
    assert "40 of 80 rows of data.train_path were dropped" in run(half, val_fraction=0.0).stats["warnings"]
    assert run(rows(100)).stats["warnings"] == []


@pytest.mark.parametrize(
    ("count", "fractions", "held"),
    [
        (9, {"val_fraction": 0.2}, (7, 2, 0)),
        (9, {"val_fraction": 0.5, "test_fraction": 0.4}, (1, 4, 4)),
        (10, {"val_fraction": 0.01}, (9, 1, 0)),
        (2, {"val_fraction": 0.4, "test_fraction": 0.4}, (1, 1, 0)),
        (1, {"val_fraction": 0.9}, (1, 0, 0)),
        (9, {"val_fraction": 0.05}, (9, 0, 0)),
    ],
)
def test_a_share_of_few_rows_is_held_out_or_it_is_said_that_none_is(run, count, fractions, held):
    data = run(rows(count), **fractions)
    assert tuple(len(part) if part else 0 for part in (data.train, data.val, data.test)) == held
    said = [text.partition(",")[0] for text in data.stats["warnings"] if "are held out" in text]
    names = {"val_fraction": ("validation", held[1]), "test_fraction": ("test", held[2])}
    empty = [names[name][0] for name in fractions if not names[name][1]]
    assert said == [f"data.train_path: no {name} rows are held out" for name in empty]


def test_documents_that_are_too_few_to_hold_one_out_are_told_the_share_that_does(run):
    texts = [{"text": f"document {number}"} for number in range(6)]
    (said,) = [text for text in run(texts, task="cpt").stats["warnings"] if "held out" in text]
    assert "since 6 texts are too few for data.val_fraction=0.05; set data.val_fraction=0.17 for one" in said
    assert run(texts, task="cpt", val_fraction=0.17).stats["val"]["conversations"] == 1


def test_copies_of_one_row_that_are_too_few_to_hold_one_out_are_said_to_be_copies(run):
    (said,) = [text for text in run(rows(1) * 30).stats["warnings"] if "held out" in text]
    assert "since 1 distinct row is too few for data.val_fraction=0.05; set data.val_path" in said


def test_the_shares_of_sources_are_warned_of_one_by_one(run, write_rows):
    few = str(write_rows(rows(3, seed=1), "few.jsonl"))
    many = str(write_rows(rows(40), "many.jsonl"))
    data = run([], train_path=None, sources=[{"path": few}, {"path": many}])
    (said,) = [text for text in data.stats["warnings"] if "held out" in text]
    assert said.startswith("data.sources[0]: no validation rows are held out") and len(data.val) == 2


DATED = (
    "{{ strftime_now('%d %b %Y %H:%M') }}"
    "{% for m in messages %}{{ m.role + ' ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def test_a_template_that_writes_the_date_writes_one_day_and_says_so(run, make_tokenizer):
    tokenizer = make_tokenizer(DATED)
    first, later = (run(rows(20), tokenizer=tokenizer, day=date(2026, 11, day)) for day in (28, 29))
    assert first.cache_path != later.cache_path
    assert all(text.startswith("28 Nov 2026 00:00") for text in texts(first.train, tokenizer))
    assert all(text.startswith("29 Nov 2026 00:00") for text in texts(later.train, tokenizer))
    assert first.stats["rendered_as_of"] == "2026-11-28"
    assert any("rows are rendered as of 28 Nov 2026" in text for text in first.stats["warnings"])
    again = run(rows(20), tokenizer=tokenizer, day=date(2026, 11, 28))
    assert again.cache_path == first.cache_path
    (asked, *_) = again.conversations("val")
    prompt = prompt_ids(make_chat(tokenizer, "assistant"), replace(asked, messages=asked.messages[:1]))
    assert tokenizer.decode(prompt).startswith("28 Nov 2026")


def test_the_day_does_not_matter_to_templates_that_write_none(run):
    first, later = (run(rows(20), day=date(2026, 11, day)) for day in (28, 29))
    assert first.cache_path == later.cache_path
    assert "rendered_as_of" not in first.stats
    raw = [run([{"text": "one two"}] * 20, task="cpt", day=date(2026, 11, day)) for day in (28, 29)]
    assert raw[0].cache_path == raw[1].cache_path


def test_the_first_day_of_a_run_is_that_of_its_data(tmp_path):
    assert first_day(None) is None and first_day(tmp_path) is None
    (tmp_path / "data.json").write_text('{"rendered_as_of": "2026-11-28"}')
    assert first_day(tmp_path) == date(2026, 11, 28)
    for damaged in ('{"rendered_as_of": 5}', '{"rendered_as_of": "yesterday"}', "{"):
        (tmp_path / "data.json").write_text(damaged)
        assert first_day(tmp_path) is None


def test_a_warning_about_rows_that_are_too_long_says_how_to_keep_them(run):
    long, short = rows(20, seed=1, words=12), rows(60, words=3)
    long = [{**row, "answer": row["answer"] * 60} for row in long]
    (said,) = run([*short, *long], max_seq_len=128, val_fraction=0.0).stats["warnings"]
    assert said.startswith("20 of 80 rows of data.train_path were dropped; 20 longer than 128 tokens: ")
    assert "data.overlong=split keeps all of each in several rows, truncate its beginning" in said
    documents = [{"text": " ".join(row.values())} for row in (*short, *long)]
    (said,) = run(documents, max_seq_len=128, val_fraction=0.0).stats["warnings"]
    assert "data.task=cpt joins and cuts documents, " in said


def test_split_markers_are_warned_of_and_new_tokens_make_another_cache(run, make_tokenizer):
    turns = "{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}"
    split = run(rows(100), tokenizer=make_tokenizer(turns))
    (warning,) = split.stats["warnings"]
    assert warning.startswith("the tokenizer splits <|turn|> of the chat template into several tokens")
    tokenizer = make_tokenizer(turns)
    tokenizer.add_tokens(["<|turn|>"])
    whole = run(rows(100), tokenizer=tokenizer)
    assert whole.stats["warnings"] == [] and whole.cache_path != split.cache_path
    assert whole.stats["train"]["tokens"] < split.stats["train"]["tokens"]


def test_a_template_that_rewrites_turns_is_said_to_multiply_rows(run, make_tokenizer):
    turns = [{"role": role, "content": "What?"} for role in ("user", "assistant", "user", "assistant")]
    train = [{"messages": [*turns, {"role": "user", "content": str(i)}, turns[1]]} for i in range(40)]
    data = run(train, tokenizer=make_tokenizer(REWRITING), val_fraction=0.0)
    assert (data.stats["train"]["conversations"], data.stats["train"]["rows"]) == (40, 120)
    assert any("40 conversations became 120 rows" in warning for warning in data.stats["warnings"])


def test_a_conversation_of_several_rows_is_dropped_once_and_if_some_are_kept_in_part(run, make_tokenizer):
    ask = lambda *words: [  # noqa: E731
        {"role": role, "content": word * 20} for word in words for role in ("user", "assistant")
    ]
    train = [{"messages": ask(*words)} for words in (["a"], ["a", "b", "c"], ["what " * 20, "b", "c"])]
    for overlong, reason in (
        ("drop", "longer than 100 tokens"),
        ("truncate", "no answer left after truncation"),
    ):
        settings = {"tokenizer": make_tokenizer(REWRITING), "overlong": overlong, "val_fraction": 0.0}
        stats = run(train, max_seq_len=100, **settings).stats["train"]
        assert stats["dropped"] == {reason: 1, f"{reason}, in part": 1}
        assert (stats["read"], stats["conversations"]) == (3, 2)


def test_a_tokenizer_that_knows_none_of_the_text_is_a_config_error(run, make_tokenizer):
    from tokenizers import Tokenizer, models, pre_tokenizers

    raw = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "<pad>": 1, "<unk>": 2}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ConfigError, match="knows none of the text"):
        run(rows(20), tokenizer=make_tokenizer(raw=raw, unk_token="<unk>"))


def test_the_length_limit_is_the_configs_then_the_models_then_the_tokenizers(make_tokenizer):
    def limit(asked, model_limit, **special):
        config = RunConfig.model_validate(
            {"model": {"name": "m", "max_seq_len": asked}, "data": {"train_path": "x"}}
        )
        return length_limit(config.model, make_tokenizer(**special), model_limit)

    assert limit(100, 200) == 100
    assert limit("auto", 200, model_max_length=50) == 200
    assert limit("auto", None, model_max_length=50) == 50
    assert limit("auto", None) is None
    with pytest.raises(ConfigError, match=r"model.max_seq_len=300 exceeds the 200 positions"):
        limit(300, 200)
    assert limit(2**20, None) == 2**20
    with pytest.raises(ConfigError, match=r"=10000000 exceeds the 1,048,576 positions allowed for .*, which"):
        limit(10_000_000, None)


def test_a_cache_that_cannot_be_written_is_a_storage_error(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="SFT_PLAY_CACHE"):
        run(rows(20))


def test_a_row_of_megabytes_is_dropped_without_taking_the_others_along(run):
    huge = [
        *rows(40),
        {"question": "What?", "answer": "friend " * 2_000_000},
        {"text": "x", "question": "y" * 10**7, "answer": "z"},
    ]
    started = sum(os.times()[:4])
    stats = run(huge, max_seq_len=150, val_fraction=0.0).stats["train"]
    assert (stats["rows"], stats["dropped"]) == (40, {"longer than 150 tokens": 2})
    cut = run(huge, max_seq_len=150, val_fraction=0.0, overlong="truncate")
    assert (
        sum(os.times()[:4]) - started < 20
    )  # of CPU time, workers too; to tokenize them whole takes minutes
    assert cut.train[40]["length"] == 150
    short = run(
        [*rows(40), {"question": "What?", "answer": "friend " * 200}],
        max_seq_len=150,
        val_fraction=0.0,
        overlong="truncate",
    )
    assert cut.train[40] == short.train[40]


def test_workers_are_as_many_as_asked_or_as_the_data_is_worth():
    assert workers.worker_count(3, 0) == 3
    assert workers.worker_count("auto", 1000) == 1
    assert 1 <= workers.worker_count("auto", 1 << 30) <= workers.MAX_WORKERS


def test_a_content_key_depends_on_every_part():
    assert (
        store.content_key({"a": 1, "b": 2})
        == store.content_key({"b": 2, "a": 1})
        != store.content_key({"a": 1, "b": 3})
    )


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"{GSM8K} is not here")
def test_real_rows_learn_each_answer_letter_by_letter(run, make_tokenizer):
    data = run(GSM8K.read_bytes(), limit=300, val_fraction=0.0)
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()[:300]]
    learned = [[label for label in labels if label != IGNORED] for labels in data.train["labels"]]
    assert [make_tokenizer().decode(ids) for ids in learned] == [
        answer + "<|endoftext|>" for answer in answers
    ]
