"""One function per command that shows or converts data; each imports only what it needs."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sft_play.commands.handlers import announce, importing, load_resolved, print_json, say_next
from sft_play.errors import CheckpointError


def prepare(args: argparse.Namespace) -> int:
    """Tokenize the data and show its statistics."""
    from sft_play.data import show
    from sft_play.runlog import console

    announce(args, "converts, renders and tokenizes the rows; keeps the result for the run")
    with importing():
        from sft_play.model.load import load_data
    loaded = load_data(load_resolved(args).config, progress=not args.json)
    if args.json:
        print_json(loaded.rows.stats)
        return 0
    console().print(show.table(loaded.rows))
    if args.show:
        show.print_samples(loaded.rows, loaded.tokenizer, args.show)
    say_next(args, "plan", "train")
    return 0


def _data_folder(resolved: Any) -> Path:
    from sft_play.runlog import open_run

    folder = open_run(resolved.config.output.dir, resolved.config.output.name).path / "data"
    folder.mkdir(exist_ok=True)
    return folder


def _report_counts(args: argparse.Namespace, out: Path, counts: Mapping[str, int], target: str) -> int:
    """Prints what was written where, and the make target to run next."""
    from sft_play.runlog import console
    from sft_play.screen import NamedValues

    rows = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    console().print(NamedValues([("rows", rows), ("file", str(out))]))
    say_next(args, target, apart=False)
    return 0


def process(args: argparse.Namespace) -> int:
    """Data step 1: convert rows of any format to conversations."""
    from sft_play.data import show

    announce(args, "converts the training rows to conversations")
    resolved = load_resolved(args)
    out = _data_folder(resolved) / "processed.jsonl"
    return _report_counts(args, out, show.process(resolved.config, out), "render")


def style(args: argparse.Namespace) -> int:
    """Data step 2: add a system prompt to the conversations."""
    from sft_play.data import show

    announce(args, "adds a system prompt to the conversations")
    folder = _data_folder(load_resolved(args))
    rows = _earlier_step(folder, "processed.jsonl", "process")
    out = folder / "styled.jsonl"
    return _report_counts(args, out, show.style(rows, out, args.style), "render")


def render(args: argparse.Namespace) -> int:
    """Data step 3: render the text as the model sees it, with its supervised parts."""
    from sft_play.data import show

    announce(args, "renders the text as the model sees it")
    with importing():
        from sft_play.model.load import load_tokenizer
    resolved = load_resolved(args)
    folder = _data_folder(resolved)
    styled = folder / "styled.jsonl"
    rows = styled if styled.exists() else _earlier_step(folder, "processed.jsonl", "process")
    out = folder / "rendered.jsonl"
    tokenizer = load_tokenizer(resolved.config.model)
    return _report_counts(args, out, show.render(resolved.config, tokenizer, rows, out), "prepare")


def dapt_docx(args: argparse.Namespace) -> int:
    """Convert a folder of .docx, .pdf, .txt and .md documents to raw text for data.task=cpt."""
    from sft_play.commands.documents import convert_documents
    from sft_play.report.layout import ending, make_command
    from sft_play.runlog import console
    from sft_play.units import counted

    output = Path(args.output)
    done = convert_documents(Path(args.input), output, force=args.force)
    if args.json:
        print_json({"output": args.output, "documents": done.counts["written"], "skipped": done.skipped})
        return 0
    for name, reason in done.skipped.items():
        console().print(f"  skipped: {name}: {reason}", markup=False, soft_wrap=True)
    text = f"{counted(done.counts['written'], 'document')}, {len(done.skipped):,} skipped"
    command = make_command("train", "configs/run_lora.yaml", ["data.task=cpt", f"data.train_path={output}"])
    console().print(text, ending({"file": output}, [command]))
    return 0


def _earlier_step(folder: Path, name: str, target: str) -> Path:
    """The file of an earlier data step.

    Raises:
        CheckpointError: the file does not exist.
    """
    if not (folder / name).exists():
        raise CheckpointError(
            f"{folder / name} does not exist; run `make {target}` with the same CONFIG first"
        )
    return folder / name
