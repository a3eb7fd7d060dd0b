import io
import json
import os
import re
import signal
import time

import pytest
from rich.console import Console

from sft_play.commands import chat as chat_module
from sft_play.commands import infer
from sft_play.commands.chat import Dialogue, chat, fit_history, run_chat_command
from sft_play.commands.infer import answered_rows, infer_batch, prompt_of, read_prompts
from sft_play.errors import CheckpointError, ConfigError, DataError, StorageError
from sft_play.rows.formats import FORMATS
from sft_play.rows.json_files import Row
from sft_play.runlog import RunDir, update_summary
from sft_play.ui.console import set_console
from tests.conftest import file_size_limit
from tests.unit.finished_run import make_config, question_rows, train_by_heart, write_rows


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    return train_by_heart(make_config(tiny_model, tmp_path_factory.mktemp("infer")))


@pytest.fixture
def screen(monkeypatch):
    """What a person sees, also while libraries are kept quiet."""
    monkeypatch.setenv("SFT_PLAY_VERBOSE", "1")
    console = Console(file=io.StringIO(), width=120, highlight=False)
    set_console(console)
    yield console.file
    set_console(None)


def typed(*lines):
    """A person who types these lines and then closes the input; an exception in place of a line is raised."""
    remaining = iter(lines)

    def read(prompt):
        line = next(remaining, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read


# --- the prompts of a file


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, ["user:hi"]),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}, ["user:hi"]),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]}, ["user:hi"]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, ["user:hi"]),
        ({"prompt": "hi"}, ["user:hi"]),
        ({"prompt": [{"role": "system", "content": "go"}, {"role": "user", "content": "hi"}]}, ["system:go", "user:hi"]),
        ({"question": "hi", "answer": "the reference", "system": "be brief"}, ["system:be brief", "user:hi"]),
        ({"question": "hi", "answer": None}, ["user:hi"]),
        ({"instruction": "add", "input": "1 2"}, ["user:add\n\n1 2"]),
        ({"user": "hi"}, ["user:hi"]),
    ],
)  # fmt: skip
def test_a_prompt_is_found_in_every_format_and_an_answer_at_its_end_left_out(data, expected):
    messages = prompt_of(Row(data, "f", 1)).messages
    assert [f"{message['role']}:{message['content']}" for message in messages] == expected


@pytest.mark.parametrize(
    "known", [known for known in FORMATS.values() if known.prompt], ids=lambda known: known.title
)
def test_the_question_of_each_format_is_asked_with_and_without_its_answer(known):
    whole = prompt_of(Row(known.example, "f", 1))
    asked = {key: value for key, value in known.example.items() if key != known.answer}
    assert prompt_of(Row(asked, "f", 1)) == whole and whole.messages[-1]["role"] == "user"


def test_earlier_answers_of_a_conversation_stay_in_the_prompt():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = Row({"messages": [{"role": role, "content": content} for role, content in turns]}, "f", 1)
    assert [message["content"] for message in prompt_of(row).messages] == ["a", "b", "c"]


def test_the_system_prompt_of_the_config_is_put_in_front():
    assert prompt_of(Row({"question": "hi"}, "f", 1), "be brief").messages[0] == {
        "role": "system",
        "content": "be brief",
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"foo": 1}, "f:7: no prompt among the keys foo; expected one of messages, conversations"),
        ({"question": " "}, "f:7: question is an empty string"),
        ({"messages": []}, "f:7: messages is an empty list"),
        ({"messages": "hi"}, "f:7: messages is 'hi'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "f:7: "),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"f:7: messages\[0\].role is 'robot'"),
        ({"question": "hi", "generated": "x"}, "f:7: the row already has a key 'generated'"),
    ],
)
def test_a_row_without_a_prompt_is_refused_with_file_and_line(data, message):
    with pytest.raises(DataError, match=message):
        prompt_of(Row(data, "f", 7))


def test_a_file_that_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(DataError, match="none.jsonl does not exist"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"expected \.jsonl"):
        read_prompts(write_rows(tmp_path / "rows.txt", []))
    with pytest.raises(DataError, match="has no rows"):
        read_prompts(write_rows(tmp_path / "rows.jsonl", []))


# --- answering a file


def test_every_row_is_answered_in_order_with_its_own_keys_kept(finished, tmp_path, screen):
    rows = question_rows()
    source = write_rows(tmp_path / "in.jsonl", rows)
    result = infer_batch(finished.config, finished.run, source, tmp_path / "out.jsonl")
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{key: record[key] for key in ("question", "answer")} for record in written] == rows
    assert [record["row"] for record in written] == list(range(1, len(rows) + 1))
    assert [record["generated"] for record in written] == [row["answer"] for row in rows]
    assert (result["rows"], result["answered"], result["unfinished_answers"]) == (len(rows), len(rows), 0)
    assert (
        f"answered {len(rows)} rows\n" in screen.getvalue()
        and str(tmp_path / "out.jsonl") in screen.getvalue()
    )


def test_after_an_interruption_only_the_missing_rows_are_answered(finished, tmp_path, screen, monkeypatch):
    rows = question_rows()
    source, output, whole = (
        write_rows(tmp_path / "in.jsonl", rows),
        tmp_path / "out.jsonl",
        tmp_path / "whole.jsonl",
    )
    infer_batch(finished.config, finished.run, source, whole)
    real, asked = infer.answer_batches, []

    def stops_after_two_batches(model, tokenizer, prompts, **settings):
        for count, batch in enumerate(real(model, tokenizer, prompts, **settings)):
            if count == 2:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(infer, "answer_batches", stops_after_two_batches)
    with pytest.raises(KeyboardInterrupt):
        infer_batch(finished.config, finished.run, source, output)
    assert len(output.read_text().splitlines()) == 16
    with output.open("a") as file:
        file.write('{"question": "half a li')

    def counts(model, tokenizer, prompts, **settings):
        asked.extend(prompts)
        yield from real(model, tokenizer, prompts, **settings)

    monkeypatch.setattr(infer, "answer_batches", counts)
    infer_batch(finished.config, finished.run, source, output)
    assert len(asked) == len(rows) - 16
    assert output.read_text() == whole.read_text()
    asked.clear()
    assert infer_batch(finished.config, finished.run, source, output)["answered"] == 0
    assert not asked
    assert output.read_text() == whole.read_text()


def test_a_write_that_fails_is_told_to_the_person_and_not_to_the_log(finished, tmp_path, capfd):
    source = write_rows(tmp_path / "in.jsonl", [{"question": "w1 " * 400} for _ in range(15)])
    with file_size_limit(12_000), pytest.raises(StorageError, match="cannot write OUT=.*File too large"):
        infer_batch(finished.config, finished.run, source, tmp_path / "out.jsonl")
    print("after the error")  # the screen is the person's again
    assert "after the error" in capfd.readouterr().out


def test_a_wrong_row_is_reported_before_anything_is_answered(finished, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [*question_rows()[:3], {"question": None}])
    with pytest.raises(DataError, match=r"in\.jsonl:4: question is missing or null"):
        infer_batch(finished.config, finished.run, source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_answers_to_other_rows_or_of_earlier_weights_are_not_mixed_in(finished, tmp_path):
    rows = [Row(data, "in", line) for line, data in enumerate(question_rows(), 1)]
    output = tmp_path / "out.jsonl"
    line = json.dumps({**rows[1].data, "generated": "x", "row": 2}) + "\n"
    output.write_text(line)
    assert answered_rows(output, rows, finished.run.adapter) == {1: line}
    os.utime(output, (1, 1))
    with pytest.raises(ConfigError, match="is older than .*so its answers are from another model"):
        answered_rows(output, rows, finished.run.adapter)
    output.write_text(json.dumps({**rows[1].data, "generated": "x", "row": 1}) + "\n")
    with pytest.raises(ConfigError, match="line 1 is not an answer to a row of this input"):
        answered_rows(output, rows, finished.run.adapter)
    output.write_bytes(b"\xff precious notes\n")
    with pytest.raises(ConfigError, match="line 1 is not an answer"):
        answered_rows(output, rows, finished.run.adapter)
    with pytest.raises(ConfigError, match="is not a file"):
        answered_rows(tmp_path, rows, finished.run.adapter)
    output.write_text("precious notes in one line")
    with pytest.raises(ConfigError, match="line 1 is not an answer.* or add FORCE=1"):
        answered_rows(output, rows, finished.run.adapter)
    assert answered_rows(output, rows, finished.run.adapter, force=True) == {}
    for cut in (3, len(json.dumps(rows[1].data)) + 5):
        output.write_text(line[:cut])
        assert answered_rows(output, rows, finished.run.adapter) == {}


def test_without_finished_weights_the_next_command_is_named(tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path)
    run = RunDir(tmp_path / "runs" / "lora")
    with pytest.raises(CheckpointError, match="there is no run .*`make train`"):
        infer_batch(config, run, tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    run.path.mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match=r"has no finished adapter: .*adapter_config\.json is missing\n.*make resume"
    ):
        chat(config, run)


# --- chat


def test_commands_of_the_chat():
    state = Dialogue(turns=[{"role": "user", "content": "hi"}])
    assert "unknown" not in str(run_chat_command(state, "/reset"))
    assert state.messages == []
    run_chat_command(state, "/system be brief")
    assert state.messages == [{"role": "system", "content": "be brief"}]
    run_chat_command(state, "/system")
    assert state.messages == []
    assert "unknown command /nonsense" in str(run_chat_command(state, "/nonsense"))
    assert run_chat_command(state, "/quit") is None


def render(messages):
    return [0] * sum(len(message["content"]) for message in messages)


def conversation(*lengths):
    roles = ("user", "assistant")
    return Dialogue(
        turns=[{"role": roles[i % 2], "content": "x" * length} for i, length in enumerate(lengths)]
    )


def test_the_oldest_turns_are_forgotten_when_the_answer_would_not_fit():
    state = conversation(40, 40, 10, 10, 20)
    ids, room, forgotten = fit_history(state, render, limit=100, max_new_tokens=50)
    assert (len(ids), room, forgotten) == (40, 50, 2)
    assert [len(turn["content"]) for turn in state.turns] == [10, 10, 20]


def test_the_last_question_stays_with_the_room_that_there_is():
    ids, room, forgotten = fit_history(conversation(10, 10, 90), render, limit=100, max_new_tokens=50)
    assert (len(ids), room, forgotten) == (90, 10, 2)
    assert fit_history(conversation(10, 10, 90), render, limit=None, max_new_tokens=50)[1:] == (50, 0)


def test_a_chat_answers_remembers_and_ends(finished, screen):
    row = question_rows()[0]
    chat(finished.config, finished.run, read=typed(row["question"], "", "/reset", "/quit", "never read"))
    text = screen.getvalue()
    assert f"\n{row['answer']}" in text
    assert "started a new conversation" in text


def test_a_chat_says_what_to_try(finished, screen):
    prompts = ["the first", "has\ntwo lines", "x" * 301, "the second", "the third"]
    before = finished.run.summary.read_text() if finished.run.summary.exists() else "{}"
    update_summary(finished.run, samples=[{"prompt": prompt} for prompt in prompts])
    try:
        chat(finished.config, finished.run, read=typed("/quit"))
    finally:
        finished.run.summary.write_text(before)
    assert "Held-out rows to try:\n  the first\n  the second\n" in screen.getvalue()


def test_a_row_that_was_held_out_is_answered_without_what_was_said_before(finished, screen):
    one, other = question_rows()[:2]
    before = finished.run.summary.read_text() if finished.run.summary.exists() else "{}"
    update_summary(finished.run, samples=[{"prompt": row["question"]} for row in (one, other)])
    try:
        chat(finished.config, finished.run, read=typed(one["question"], other["question"], "/quit"))
    finally:
        finished.run.summary.write_text(before)
    text = screen.getvalue()
    assert f"\n{one['answer']}\n" in text and f"\n{other['answer']}\n" in text


def test_the_demo_says_which_words_it_does_not_know(finished, screen, tmp_path):
    model, data = (tmp_path / "builtin" / f"demo-{kind}-{'0' * 24}" for kind in ("model", "data"))
    model.parent.mkdir()
    model.symlink_to(finished.config.model.name)
    data.mkdir()
    config = finished.config.changed({"model.name": str(model), "data.train_path": str(data / "train.jsonl")})
    letter = "I need two red lamps for Lena in Lima on Monday."
    for each in (finished.config, config):
        chat(each, finished.run, read=typed(letter, "/quit"))
    assert screen.getvalue().count("the demo was not trained on these words: Lena, Lima. Expect others") == 1
    chat(config, finished.run, read=typed(" ".join(f"x{number}" for number in range(11)), "/quit"))
    assert "these words: x0, x1, x2, x3, x4, x5, x6, x7 and 3 more. Expect" in screen.getvalue()
    rows = write_rows(tmp_path / "in.jsonl", [{"question": "Lena wants a sofa"}, {"question": "red lamps"}])
    infer_batch(config, finished.run, rows, tmp_path / "out.jsonl")
    assert "the demo was not trained on these words: Lena, wants, sofa. Expect" in screen.getvalue()


def test_a_model_of_text_alone_is_shown_no_image(finished, screen):
    chat(finished.config, finished.run, read=typed("/image a.png", "/quit"))
    text = " ".join(screen.getvalue().split())
    assert "not added: '" in text and "learns from text alone; models that learn from images" in text
    assert "/image FILE" not in text


def test_what_is_not_utf_8_is_not_sent(finished, screen):
    chat(finished.config, finished.run, read=typed("w1 \udcff", "/quit"))
    assert "not sent: this is not valid UTF-8" in screen.getvalue()


def test_control_tokens_that_are_refused_are_not_sent(finished, screen, tmp_path):
    data = finished.config.data.model_copy(update={"control_tokens": "refuse"})
    config = finished.config.model_copy(update={"data": data})
    chat(config, finished.run, read=typed("w1 <eos>", question_rows()[1]["question"], "/quit"))
    assert "not sent: the chat: a text has the control token '<eos>'" in " ".join(screen.getvalue().split())
    rows = write_rows(
        tmp_path / "rows.jsonl", [*question_rows()[:1], {"question": "w1 <pad>", "answer": "w2"}]
    )
    with pytest.raises(DataError, match=r"rows.jsonl:2: a text has the control token '<pad>'"):
        infer_batch(config, finished.run, rows, tmp_path / "out.jsonl")


def test_ctrl_c_stops_the_answer_and_not_the_program(finished, screen, monkeypatch):
    row = next(row for row in question_rows() if len(row["answer"].split()) == 3)
    first, rest = row["answer"].split(maxsplit=1)
    real = chat_module._printer

    def interrupted_at_the_second_word(tokenizer, pieces, stops):
        printer = real(tokenizer, pieces, stops)
        put, calls = printer.put, []

        def counting_put(value):
            calls.append(value)
            if len(calls) == 4:  # the prompt and two words have come
                signal.raise_signal(signal.SIGINT)
                time.sleep(1)  # the main thread takes the signal; a busy machine may keep it waiting
            put(value)

        printer.put = counting_put
        monkeypatch.setattr(chat_module, "_printer", real)
        return printer

    monkeypatch.setattr(chat_module, "_printer", interrupted_at_the_second_word)
    chat(
        finished.config,
        finished.run,
        read=typed(row["question"], KeyboardInterrupt(), "/reset", row["question"]),
    )
    text = screen.getvalue()
    stopped, going_on = text.split("(stopped)")
    assert first in stopped
    assert row["answer"] not in stopped
    assert "use /quit or Ctrl-D to end the chat" in going_on
    assert row["answer"] in going_on


def test_a_question_that_is_too_long_is_not_sent(finished, screen):
    chat(finished.config, finished.run, read=typed("w1 " * 600, question_rows()[1]["question"]))
    text = screen.getvalue()
    assert "message too long: the prompt has 602 tokens, the model supports 512; not sent" in text
    assert question_rows()[1]["answer"] in text


def test_tools_that_a_chat_offers_are_in_its_prompts(finished, screen, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "weather"}]')
    config = finished.config.changed({"data.chat_template": "plain"})
    chat(config, finished.run, read=typed("w1 " * 600, f"/tools {tools}", "w1 " * 600))
    without, offered = map(int, re.findall(r"the prompt has (\d+) tokens", screen.getvalue()))
    assert offered > without


@pytest.mark.parametrize("samples", [3, "text", {"prompt": "x"}, [3, {"prompt": 4}, None, "x"]])
def test_samples_of_another_form_are_nothing_to_try(tmp_path, samples):
    RunDir(tmp_path).summary.write_text(json.dumps({"samples": samples}))
    assert chat_module._prompts_to_try(RunDir(tmp_path)) == []
