import resource
import signal

import pytest
from transformers.utils import chat_template_utils

from sft_play.data.chat import make_chat
from sft_play.data.template import check_template, render, split_markers, split_warning, use_template
from sft_play.data.tokens import encode
from sft_play.errors import ConfigError, DataError
from sft_play.rows.formats import Conversation

ROW = Conversation(({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}), source="f:1")


def problem(tokenizer):
    with pytest.raises(ConfigError) as error:
        check_template(tokenizer, ROW, "mine.jinja")
    assert str(error.value).startswith("data.chat_template: mine.jinja cannot be used: ")
    return str(error.value)


def test_auto_is_the_tokenizers_own_template_and_plain_without_one(make_tokenizer):
    own = make_tokenizer("{{ messages[0].content }}")
    assert use_template(own, "auto") == "the tokenizer's own"
    assert own.chat_template == "{{ messages[0].content }}"
    without = make_tokenizer()
    assert use_template(without, "auto") == "the shipped plain.jinja"
    assert render(without, ROW, ROW.messages) == "### User:\nq\n\n### Assistant:\na<|endoftext|>\n\n"
    assert use_template(without, "auto") == "the tokenizer's own"  # calling it again changes nothing


def test_a_template_file_replaces_the_tokenizers_own(make_tokenizer, tmp_path):
    (tmp_path / "mine.jinja").write_text("[{{ messages[0].content }}]")
    tokenizer = make_tokenizer("other")
    assert use_template(tokenizer, str(tmp_path / "mine.jinja")).endswith("mine.jinja")
    assert render(tokenizer, ROW, ROW.messages) == "[q]"


def test_rendering_does_not_copy_jinjas_globals_from_a_chain_map(make_tokenizer, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }} {{ namespace(n=loop.index).n }}{% endfor %}")
    tokenizer = make_tokenizer("other")
    use_template(tokenizer, str(file))
    messages = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "two"})

    assert render(tokenizer, Conversation(messages), messages) == "one 1two 2"
    # fails if transformers keeps it elsewhere: then preparing is slower than measured
    assert type(chat_template_utils._compile_jinja_template(tokenizer.chat_template).globals) is dict


def test_a_missing_or_unreadable_template_file_is_a_config_error(make_tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="allowed: auto, chatml, plain, or the path"):
        use_template(make_tokenizer(), "chat-ml")
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        use_template(make_tokenizer(), str(tmp_path / "bad.jinja"))
    (tmp_path / "big.jinja").write_bytes(b" " * 1_000_001)
    with pytest.raises(ConfigError, match="the limit is 1000000"):
        use_template(make_tokenizer(), str(tmp_path / "big.jinja"))


def test_chatml_is_refused_where_the_tokenizer_does_not_know_its_tokens(make_tokenizer):
    from tokenizers import Tokenizer, models

    tokenizer = make_tokenizer(raw=Tokenizer(models.WordLevel({"<|endoftext|>": 0})))
    hint = (
        r'needs the tokens <\|im_start\|> and <\|im_end\|>.* model.new_tokens=\["<\|im_start\|>", "<\|im_end'
    )
    with pytest.raises(ConfigError, match=hint):
        use_template(tokenizer, "chatml")
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    assert use_template(tokenizer, "chatml") == "the shipped chatml.jinja"


def test_markers_that_the_tokenizer_splits_are_found_and_named_with_the_setting(make_tokenizer):
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|turn|>\n</s>{% endfor %}"
    tokenizer = make_tokenizer(turns)
    assert split_markers(tokenizer) == ["<|turn|>"]  # the others are tokens
    assert split_warning(["<|turn|>", "<x>"]).endswith('set model.new_tokens=["<|turn|>", "<x>"]')
    tokenizer.add_tokens(["<|turn|>"])
    assert split_markers(tokenizer) == []
    assert split_markers(make_tokenizer("{{ raise_exception('no') }}")) == []


def test_a_conversation_the_template_refuses_is_an_error_with_its_row(make_tokenizer):
    tokenizer = make_tokenizer("{{ raise_exception('no') }}")
    check_template(tokenizer, ROW, "mine.jinja")  # it may like other rows
    with pytest.raises(
        DataError,
        match=r"f:1: the chat template cannot render this conversation \(roles: user, assistant\): no",
    ):
        render(tokenizer, ROW, ROW.messages)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", "syntax error on line 1"),
        ("{# nothing #}  ", "renders f:1 as an empty string"),
        ("{{ messages.__class__.__mro__ }}", "violates the sandbox"),
        ("{{ messages.append(1) }}", "violates the sandbox"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "violates the sandbox"),
        ("{{ 'a' * 3000000000 }}", "uses more than 512 MiB of memory"),
        ("{{ 'a' * 70000000 }}", "writes more than 67,108,864 characters"),
        (
            "{% for i in [1] %}" * 30 + "x" + "{% endfor %}" * 30,
            "cannot be compiled: too many statically nested blocks",
        ),
    ],
)
def test_a_broken_or_hostile_template_is_found_in_a_child_process(make_tokenizer, template, said):
    assert said in problem(make_tokenizer(template))


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [LOOPS, "{% set x = 9**9 %}{{ x**x }}"], ids=["loops", "one operation"])
def test_a_template_that_does_not_end_is_stopped(make_tokenizer, monkeypatch, template):
    monkeypatch.setattr("sft_play.data.limits.ROW_SECONDS", 0.5)
    assert "ran for more than 0.5 s" in problem(make_tokenizer(template))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("bomb", "said"),
    [
        (LOOPS, "it ran for more than 0.5 s on one row"),
        ("{{ 'a' * 3000000000 }}", "it uses more than 512 MiB of memory on one row"),
        (
            "{% for i in range(9) %}{{ 'a' * 9999999 }}{% endfor %}",
            "it writes more than 67,108,864 characters",
        ),
    ],
    ids=["time", "memory", "text"],
)
@pytest.mark.parametrize("tags", [False, True])
def test_a_bomb_that_waits_for_a_later_row_is_stopped_and_the_row_is_named(
    make_tokenizer, monkeypatch, bomb, said, tags
):
    monkeypatch.setattr("sft_play.data.limits.ROW_SECONDS", 0.5)
    answer = "{% generation %}{{ m.content }}{% endgeneration %}" if tags else "{{ m.content }}"
    body = f"{{% for m in messages %}}{answer}<|endoftext|>{{% endfor %}}"
    trigger = f"{{% if messages[0].content == 'now' %}}{bomb}{{% endif %}}"
    chat = make_chat(make_tokenizer(trigger + body), "assistant")
    later = Conversation(({"role": "user", "content": "now"}, ROW.messages[1]), source="f:2")
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    with pytest.raises(DataError) as error:
        encode(chat, [ROW, later])
    assert str(error.value).startswith("f:2: the chat template cannot render") and said in str(error.value)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
