import io
import sys

from rich.console import Console

from sft_play.ui.console import set_console
from sft_play.ui.progress import describe, progress_bar, spinner


def shown(terminal):
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal)
    set_console(console)
    try:
        with spinner("loading runs/a[1]"):
            print("library noise")
            sys.stderr.write("more noise\n")
            describe("reading the first file")
        with progress_bar("answering", 4) as done:
            done(3)
            describe("answering the fourth")
            print("library noise")
    finally:
        set_console(None)
    return console.file.getvalue()


def test_on_a_terminal_it_moves_and_library_output_is_not_drawn_into_it(capfd, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # not dumb, as in some editors
    text = shown(terminal=True)
    assert "loading runs/a[1]" in text
    assert "answering the fourth" in text and "reading the first file" in text  # once that is said
    assert "noise" not in text
    captured = capfd.readouterr()
    assert captured.out == "library noise\nlibrary noise\n"
    assert captured.err == "more noise\n"


def test_elsewhere_nothing_is_written():
    assert shown(terminal=False) == ""
