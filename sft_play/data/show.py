"""Shows the prepared data: statistics, samples with supervised tokens highlighted, and each step as a file.

The files are JSONL: `process` (any format -> messages), `style` (adds a system prompt), `render` (the text as
the model sees it). The first two can be used as training data.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from sft_play.config.inputs import data_inputs
from sft_play.config.schema import RunConfig
from sft_play.data.bad_rows import DROPPED
from sft_play.data.chat import Chat, make_chat, render_rows, with_control_tokens
from sft_play.data.inventory import input_lines, remark_lines
from sft_play.data.prepare import PreparedData
from sft_play.data.reading import read_rows
from sft_play.data.sources import Source, open_source, opened
from sft_play.data.stats import SourceStats, SplitStats, splits_of
from sft_play.data.template import use_template
from sft_play.errors import ConfigError, DataError, StorageError
from sft_play.files import replacing_file
from sft_play.parts import IGNORED
from sft_play.report.table import Table, on_screen
from sft_play.rows.formats import Conversation, convert, detect_format, with_format
from sft_play.spelling import make, quoted, var
from sft_play.ui.console import console
from sft_play.ui.screen import Words
from sft_play.units import counted
from sft_play.vision.shown import each_once, picture_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUPERVISED_STYLE, CONTEXT_STYLE = "bold green", "dim"
PARTS, IMAGES, IMAGE_TOKENS = "parts of longer rows", "images", "tokens of images"
RARE = (PARTS, IMAGES, IMAGE_TOKENS)  # shown where there are any
EACH_ROW = "each row"  # a format: what `process` writes may come from sources of several formats


def table(prepared: PreparedData) -> Group:
    """The statistics of each split, what was dropped and why, and the warnings."""
    stats = prepared.stats
    splits = splits_of(stats)
    notes = Text(f"  chat template: {stats['chat_template']}; max_seq_len {prepared.max_seq_len:,}\n")
    notes.append(f"  cached in {prepared.cache_path}")
    held_out = [
        f"{split}: held out of the training rows" for split, found in splits.items() if "read" not in found
    ]
    for line in (*input_lines(stats["inputs"]), *held_out, *remark_lines(stats["remarks"], expected=True)):
        notes.append(f"\n  {line}")
    for split, found in splits.items():
        for reason, count in sorted(found["dropped"].items(), key=lambda item: -item[1]):
            notes.append(f"\n  dropped from {split}: {counted(count, 'row')} ({reason})")
    for warning in stats["warnings"]:
        notes.append(f"\n  warning: {warning}", style="yellow")
    counts = list(map(_counts, splits.values()))
    rows = [(name, *(column[name] for column in counts)) for name in counts[0]]
    rows = [row for row in rows if row[0] not in RARE or set(row[1:]) != {"0"}]
    tables = [Table(("data", *splits), rows)]
    if sources := stats["train"].get("sources"):
        tables.append(_sources_table(sources))
    return Group(*map(on_screen, tables), Words(notes))


def _sources_table(sources: list[SourceStats]) -> Table:
    """The training rows of each source, and its shares of an epoch."""
    rows: list[tuple[str, ...]] = []
    all_rows = sum(source["rows_per_epoch"] for source in sources)
    all_tokens = sum(source["tokens_per_epoch"] for source in sources)
    for source in sources:
        seen, tokens = source["rows_per_epoch"], source["tokens_per_epoch"]
        name, weight, own = Path(source["path"]).name, f"{source['weight']:g}", f"{source['rows']:,}"
        of_rows, of_tokens = f"{100 * seen / all_rows:.1f}%", f"{100 * tokens / all_tokens:.1f}%"
        rows.append((name, weight, own, f"{seen:,}", of_rows, f"{tokens:,}", of_tokens))
    return Table(("source", "weight", "rows", "rows/epoch", "of all", "tokens/epoch", "of all"), rows)


def _counts(split: SplitStats) -> dict[str, str]:
    lengths = split["lengths"]
    return {
        "conversations": f"{split['conversations']:,}",
        "rows": f"{split['rows']:,}",
        "tokens": f"{split['tokens']:,}",
        "supervised": f"{100 * split['supervised_tokens'] / split['tokens']:.1f}%",
        "truncated": f"{100 * split['truncated'] / split['rows']:.1f}%",
        PARTS: f"{split['parts']:,}",
        IMAGES: f"{split['pictures']:,}",
        IMAGE_TOKENS: f"{split['picture_tokens']:,}",
        "dropped": f"{sum(split['dropped'].values()):,}",
        "tokens per row, median": f"{lengths['p50']:,}",
        "90th percentile": f"{lengths['p90']:,}",
        "99th percentile": f"{lengths['p99']:,}",
        "longest": f"{lengths['max']:,}",
    }


def marked(ids: list[int], labels: list[int], tokenizer: "PreTrainedTokenizerBase", *, colour: bool) -> Text:
    """A row as text with its supervised tokens highlighted, by colour or between {+ and +}."""
    text = Text()
    for supervised, group in groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED):
        part = str(tokenizer.decode([token for token, _ in group], skip_special_tokens=False))
        if colour:
            text.append(part, style=SUPERVISED_STYLE if supervised else CONTEXT_STYLE)
        else:
            text.append(f"{{+{part}+}}" if supervised else part)
    return text


def print_samples(prepared: PreparedData, tokenizer: "PreTrainedTokenizerBase", count: int) -> None:
    """Prints the first `count` training rows of each source with the supervised tokens highlighted."""
    screen = console()
    colour = screen.color_system is not None
    legend = Text("Supervised tokens are ")
    if colour:
        legend.append("green and bold", style=SUPERVISED_STYLE)
    else:
        legend.append("between {+ and +}")
    screen.print(legend.append("; the rest is context without loss."))
    first = 0
    sources = [(each["path"], each["rows"]) for each in prepared.stats["train"].get("sources", ())]
    for path, held in sources or [("", len(prepared.train))]:
        of = f" of {path}" if path else ""
        rows = prepared.train.select(range(first, first + min(count, held)))
        for number, row in enumerate(rows, 1):
            supervised = sum(label != IGNORED for label in row["labels"])
            screen.print(f"\nrow {number}{of}: {row['length']} tokens, {supervised} supervised", style="bold")
            for line in picture_lines(row.get("pictures", ())):
                screen.print(line)
            ids, labels = each_once(prepared.recipe, row["input_ids"], row["labels"])
            screen.print(marked(ids, labels, tokenizer, colour=colour))
        first += held


def process(config: RunConfig, out: Path) -> Counter[str]:
    """Writes the training rows in the messages format; returns the counts of written and dropped rows."""
    counts: Counter[str] = Counter()
    training = [given for given in data_inputs(config.data) if given.split == "train"]
    sources = [opened(given) for given in training]
    rows = chain.from_iterable(
        _conversations(source, given.format, config.data.limit, None, counts, config.data.bad_rows)
        for given, source in zip(training, sources, strict=True)
    )
    write_rows(out, ({**row.as_row(), "source": row.source} for row in rows), counts)
    return counts


def style(rows: Path, out: Path, system_prompt: str) -> Counter[str]:
    """Copies a file of rows and adds `system_prompt` to each conversation without a system message.

    Raises:
        ConfigError: the prompt is blank.
    """
    if not system_prompt.strip():
        raise ConfigError(
            f"{var(STYLE=None)} is blank; set it to the system prompt to add: "
            + make("style", STYLE=quoted("Answer in one sentence."))
        )
    counts: Counter[str] = Counter()
    conversations = _conversations(open_source(str(rows), "train"), EACH_ROW, None, system_prompt, counts)

    def styled() -> Iterator[dict[str, object]]:
        for row in conversations:
            if not row.messages or row.messages[0] != {"role": "system", "content": system_prompt}:
                counts["unchanged (plain text, or with a system message of their own)"] += 1
            yield {**row.as_row(), "source": row.source}

    write_rows(out, styled(), counts)
    return counts


def render(config: RunConfig, tokenizer: "PreTrainedTokenizerBase", rows: Path, out: Path) -> Counter[str]:
    """Writes each row of the file `rows` as the text that the model sees, with its supervised parts."""
    use_template(tokenizer, config.data.chat_template)
    chat = make_chat(tokenizer, config.data.supervise, learn_tool_calls=config.data.learn_tool_calls)
    chat = with_control_tokens(chat, config.data.control_tokens)
    counts: Counter[str] = Counter()
    conversations = _conversations(
        open_source(str(rows), "train"), EACH_ROW, None, config.data.system_prompt, counts
    )
    write_rows(out, chain.from_iterable(_rendered(chat, row) for row in conversations), counts)
    return counts


def _rendered(chat: Chat, row: Conversation) -> list[dict[str, object]]:
    eos = str(chat.tokenizer.eos_token)
    if row.text is not None:
        text = row.text + (eos if row.ends else "")
        return [{"text": text, "learned": [text], "source": row.source}]
    rendered = list[dict[str, object]]()
    for part in render_rows(chat, [row])[0]:
        text, supervised = part.text, [part.text[start:end] for start, end in part.supervised]
        if part.add_eos:
            text += eos
            supervised[-1] += eos
        rendered.append({"text": text, "learned": supervised, "source": row.source})
    return rendered


def _conversations(
    source: Source,
    name: str,
    limit: int | None,
    system_prompt: str | None,
    counts: Counter[str],
    bad_rows: str = "refuse",
) -> Iterator[Conversation]:
    name, rows = with_format(read_rows(source, limit), name, source.path)
    for row in rows:
        try:
            converted = convert(row, detect_format(row) if name == EACH_ROW else name, system_prompt)
        except DataError:
            if bad_rows == "refuse":
                raise
            converted = DROPPED
        if isinstance(converted, Conversation):
            yield converted
        else:
            counts[f"dropped: {converted}"] += 1


def write_rows(out: Path, rows: Iterable[Mapping[str, object]], counts: Counter[str]) -> None:
    """Writes a JSONL file, which appears whole or not at all; `counts` counts the rows as "written".

    Raises:
        StorageError: it cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(out) as temporary, temporary.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                counts["written"] += 1
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}") from error
