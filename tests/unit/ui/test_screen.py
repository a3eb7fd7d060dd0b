"""The console breaks lines between words alone, and writes no escape codes where nobody wants them."""

import io
import shlex
import subprocess

import pytest
from rich.table import Table
from rich.text import Text

from sft_play.report.layout import ending, header, make_command
from sft_play.report.table import Bar
from sft_play.ui.console import set_console
from sft_play.ui.progress import spinner
from sft_play.ui.screen import CONTROL, NamedValues, Screen, Words, visible, whole_words

PATH = "/home/a/folder/whose/name/is/longer/than/a/line/of/forty/cells"


def shown(renderable, width=40, **settings) -> list[str]:
    screen = Screen(file=io.StringIO(), width=width, **settings)
    screen.print(renderable)
    return screen.file.getvalue().splitlines()


def test_a_path_that_is_longer_than_a_line_stands_alone_and_whole():
    lines = shown(f"  an earlier run of this name was moved to {PATH} just now")
    assert lines == ["  an earlier run of this name was moved", "  to", PATH, "  just now"]


@pytest.mark.parametrize("width", [20, 40, 79, 80])
def test_no_other_line_is_longer_than_the_screen_and_no_word_is_lost(width):
    text = f"one, two [three] {PATH} " + "four-five six " * 20
    lines = [line.plain for line in whole_words(Text(text), width, hang=4)]
    assert " ".join(lines).split() == text.split()
    assert all(len(line) <= width or line == PATH for line in lines)


def test_wide_characters_count_as_two_cells():
    assert [line.plain for line in whole_words(Text("漢字漢字 漢字漢字"), 10)] == ["漢字漢字", "漢字漢字"]


def test_lines_of_a_text_and_its_blank_lines_stay():
    assert shown(Words("one\n\n  two three", hang=2), width=9) == ["one", "", "  two", "    three"]


def test_values_go_on_below_their_start_and_a_long_path_goes_below_its_name():
    lines = shown(NamedValues([("memory", "predicted 1 GiB, measured 2 GiB, and more"), ("log", PATH)]))
    assert lines == ["memory      predicted 1 GiB, measured 2", "            GiB, and more", "log", PATH]


def test_brackets_and_colons_in_a_text_are_not_markup():
    assert shown(NamedValues([("log", "runs/a[bold]/log.txt")])) == ["log         runs/a[bold]/log.txt"]
    for text in ("[conceal]a[/]", "b[/]", "[link=file:///c]d[/link]", ":warning:"):
        assert shown(text, force_terminal=True) == [text]


# sets the title, clears the screen, hides what follows; the same by a single character; overwrites the line
HOSTILE = [
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[H",
    "\x1b[8mhidden",
    "\x9b2J",
    "\x9d0;title\x9c",
    "a\r\b\x7f\x1b[1Gb",
]


def in_a_table(text: str) -> Table:
    table = Table()
    table.add_row(text)
    return table


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("make", [str, Text, Words, in_a_table, lambda text: NamedValues([(text, text)])])
def test_what_a_terminal_would_obey_in_a_text_is_shown(text, make):
    said = "\n".join(shown(make(text), width=200, force_terminal=True, color_system=None))
    assert not CONTROL.search(said.replace("\n", "")) and "\\x" in said


def test_a_live_line_and_a_streamed_answer_obey_nothing_either(monkeypatch):
    screen = Screen(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    screen.print("\x1b[2J", end="", soft_wrap=True)
    set_console(screen)
    with spinner("loading \x1b[2J"):
        pass
    set_console(None)
    assert "\x1b[2J" not in screen.file.getvalue() and screen.file.getvalue().count(r"\x1") > 1


def test_our_own_tabs_breaks_and_colours_stay():
    assert visible("a\tb\nc é 漢 \u200d") == "a\tb\nc é 漢 \u200d"
    screen = Screen(file=io.StringIO(), force_terminal=True, color_system="standard")
    screen.print("a\x1b[0mb", style="yellow")
    assert screen.file.getvalue() == "\x1b[33ma\\x1b[0mb\x1b[0m\n"


@pytest.mark.parametrize("name", ["mine", "my run", "$(touch x)", "it's", 'a "b" c'])
def test_a_command_means_the_same_to_a_shell_where_it_is_broken(name):
    overrides = ["eval.limit=2", "train.learning_rate=1e-4", f"output.name={name}"]
    command = make_command("infer", f"{PATH}.yaml", overrides)
    lines = shown(ending({}, [command]))
    text = "\n".join(lines).replace("next ", "     ", 1).replace("make infer", "printf '%s|'", 1)
    config, words, rest = subprocess.run(["sh", "-c", text], capture_output=True, text=True).stdout.split("|")
    assert config == f"CONFIG={PATH}.yaml" and shlex.split(words.removeprefix("ARGS=")) == overrides
    assert rest == "" and (len(lines) > 1) == (name == "mine")


def test_a_command_is_quoted_for_a_shell():
    assert make_command("train", "a b.yaml") == "make train CONFIG='a b.yaml'"
    assert make_command("eval", "a.yaml", ["x=1", "y=b c"]).endswith("""ARGS='x=1 '"'"'y=b c'"'"''""")


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({"NO_COLOR": "1", "TERM": "xterm-256color"}, {"force_terminal": True}),
        ({}, {"force_terminal": False}),
    ],
    ids=["NO_COLOR", "not a terminal"],
)
def test_no_escape_codes(monkeypatch, variables, settings):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for renderable in (Text("text", style="bold"), ending({"log": "x"}, ["make eval"])):
        assert not any("\x1b" in line for line in shown(renderable, **settings))


def test_a_terminal_has_styles(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1m" in shown(Text("text", style="bold"), force_terminal=True)[0]


def test_an_answer_is_streamed_as_it_comes():
    screen = Screen(file=io.StringIO(), width=20)
    for piece in ("a long ", "line of an answer"):
        screen.print(piece, end="", soft_wrap=True)
    assert screen.file.getvalue() == "a long line of an answer"


@pytest.mark.parametrize(("share", "bar"), [(0, ""), (0.5, "██"), (0.56, "██▎"), (1, "████"), (9, "████")])
def test_a_bar_is_as_long_as_its_share(share, bar):
    assert shown(Bar(share, width=4)) == [bar.ljust(4)]


def test_a_screen_without_unicode_has_bars_too():
    class Ascii(io.StringIO):
        encoding = "ascii"

    screen = Screen(file=Ascii(), width=40)
    screen.print(Bar(0.5, width=4))
    assert screen.file.getvalue() == "##  \n"


def test_a_header_says_what_will_be_done(tmp_path):
    from sft_play.config.load import load_config

    (tmp_path / "my.yaml").write_text("model: {name: org/base}\ndata: {train_path: rows.jsonl}\n")
    lines = shown(header("train", load_config(tmp_path / "my.yaml", ["output.dir=out"])), width=200)
    assert lines == [
        f"train my  {tmp_path / 'my.yaml'}",
        "  LoRA of org/base on rows.jsonl, results in out/my",
        "",
    ]


def test_a_header_says_beforehand_that_answers_will_be_noise(tmp_path):
    from sft_play.config.load import load_config

    (tmp_path / "my.yaml").write_text("model: {name: 'builtin:tiny'}\ndata: {train_path: rows.jsonl}\n")
    resolved = load_config(tmp_path / "my.yaml", [])
    assert "its answers will be noise" in shown(header("train", resolved), width=200)[2]
    assert "noise" not in "".join(shown(header("eval", resolved, "each model's loss"), width=200))
