"""One function per command that shows or converts data."""

from collections.abc import Mapping
from pathlib import Path

from rich.text import Text

from sft_play.commands.command_line import (
    Arguments,
    announce,
    command,
    end,
    flag,
    importing,
    loaded_config,
    number,
)
from sft_play.commands.handlers import force
from sft_play.errors import CheckpointError
from sft_play.report.layout import ending, make_command
from sft_play.runlog import open_run
from sft_play.spelling import make, var
from sft_play.ui.console import console
from sft_play.ui.screen import NamedValues, Words
from sft_play.units import counted, listed


@command("prepare", as_json=True, prints=True)
@number("--show", "SHOW", "print the first N training rows", 0, default=0)
def prepare(args: Arguments, show: int) -> int:
    """Tokenize the data and show its statistics."""
    from sft_play.data.show import print_samples, table

    what = "converts, renders and tokenizes the rows; keeps the result for the run"
    announce(args, what, reads_rows=True)
    with importing():
        from sft_play.model.load import load_data
    loaded = load_data(loaded_config(args), progress=not args.json)
    if not args.json:
        console().print(table(loaded.rows))
        if show:
            print_samples(loaded.rows, loaded.tokenizer, show)
    hint = Words(
        Text(
            f"{var(SHOW=3)} prints rows as the model sees them, with supervised tokens in colour",
            style="dim",
        )
    )
    shown = [""] if show else ["", hint, ""]
    return end(args, loaded.rows.stats, *shown, then=["plan", "train"])


@command("process")
def process(args: Arguments) -> int:
    """Data step 1: convert rows of any format to conversations."""
    from sft_play.data import show

    announce(args, "converts the training rows to conversations")
    out = _data_folder(args) / "processed.jsonl"
    return _report_counts(args, out, show.process(loaded_config(args), out), "render")


@command("style")
@flag("--style", "system prompt to add", required=True, metavar="TEXT")
def style(args: Arguments, style: str) -> int:
    """Data step 2: add a system prompt to the conversations."""
    from sft_play.data import show

    announce(args, "adds a system prompt to the conversations")
    folder = _data_folder(args)
    rows, out = _processed(folder), folder / "styled.jsonl"
    return _report_counts(args, out, show.style(rows, out, style), "render")


@command("render")
def render(args: Arguments) -> int:
    """Data step 3: render the text as the model sees it, with its supervised parts."""
    from sft_play.data import show

    announce(args, "renders the text as the model sees it")
    with importing():
        from sft_play.model.load import load_tokenizer
    config, folder = loaded_config(args), _data_folder(args)
    styled, out = folder / "styled.jsonl", folder / "rendered.jsonl"
    rows = styled if styled.exists() else _processed(folder)
    counts = show.render(config, load_tokenizer(config.model), rows, out)
    return _report_counts(args, out, counts, "prepare")


@command("dapt-docx", config=False, as_json=True)
@flag("--input", "folder of documents", type=Path, required=True, metavar="FOLDER")
@flag("--output", "JSONL file to write", type=Path, required=True, metavar="FILE")
@force
def dapt_docx(args: Arguments, input: Path, output: Path, force: bool) -> int:
    """Convert a folder of .docx, .pdf, .txt and .md documents to raw text for data.task=cpt."""
    from sft_play.commands.documents import convert_documents

    done = convert_documents(input, output, force=force)
    result = {"output": str(output), "documents": done.counts["written"], "skipped": done.skipped}
    if not args.json:
        for reason in dict.fromkeys(done.skipped.values()):
            names = listed([name for name, other in done.skipped.items() if other == reason], 4)
            console().print(f"  skipped: {names}: {reason}")
    text = f"{counted(done.counts['written'], 'document')}, {len(done.skipped):,} skipped"
    settings = ["data.task=cpt", f"data.train_path={output}"]
    command = make_command("train", "configs/run_lora.yaml", settings)
    return end(args, result, text, ending({"file": output}, [command]))


def _data_folder(args: Arguments) -> Path:
    output = loaded_config(args).output
    folder = open_run(output.dir, output.name).path / "data"
    folder.mkdir(exist_ok=True)
    return folder


def _processed(folder: Path) -> Path:
    """What `process` has written; CheckpointError if it has not been run."""
    rows = folder / "processed.jsonl"
    if not rows.exists():
        raise CheckpointError(
            f"{rows} does not exist; run `{make('process')}` with the same {var(CONFIG=None)} first"
        )
    return rows


def _report_counts(args: Arguments, out: Path, counts: Mapping[str, int], target: str) -> int:
    """Prints what was written where, and the make target to run next."""
    rows = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    return end(args, None, NamedValues([("rows", rows), ("file", str(out))]), then=[target])
