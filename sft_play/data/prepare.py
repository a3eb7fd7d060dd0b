"""Prepares the data of a run: read, convert, render, tokenize and split.

This happens once, before any process group exists; the result is cached on disk.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sft_play.cache import project_dir
from sft_play.config.inputs import DataInput, data_inputs
from sft_play.config.schema import RunConfig
from sft_play.data import bad_rows, store
from sft_play.data.batching import Share
from sft_play.data.chat import Chat, make_chat, with_control_tokens
from sft_play.data.folders import TEXT_SUFFIXES
from sft_play.data.inventory import Inventory, inventory, remark_lines
from sft_play.data.length import block_tokens, length_limit
from sft_play.data.reading import read_rows
from sft_play.data.sources import Source, fingerprint, open_inputs
from sft_play.data.spans import pieces_of
from sft_play.data.splits import Part, write_splits
from sft_play.data.stats import SPLITS, DataStats, KeptStats, SourceStats, splits_of
from sft_play.data.template import (
    check_template,
    day_warning,
    render_as_of,
    split_markers,
    split_warning,
    use_template,
    writes_the_day,
)
from sft_play.data.warnings import data_warnings
from sft_play.data.workers import (
    PART_ROWS,
    SMALL_BYTES,
    TEXTS,
    Counts,
    EncodingTask,
    conversation_from_json,
    encode_all,
    worker_count,
)
from sft_play.errors import ConfigError, DataError
from sft_play.fingerprints import PACKAGE, installed_versions, sources_digest
from sft_play.manifest import read_manifest
from sft_play.rows.formats import Conversation, convert, with_format
from sft_play.rows.json_files import Row
from sft_play.runlog import RunDir, read_json
from sft_play.ui.progress import progress_bar
from sft_play.vision.families import TEXT_ALONE, Recipe
from sft_play.vision.gallery import Gallery, described

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

SOURCES = PACKAGE / "data", PACKAGE / "rows", PACKAGE / "vision"
PACKAGES = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow", "pillow")


@dataclass(frozen=True)
class PreparedData:
    """Tokenized rows by split, and their statistics.

    A row has input_ids, labels (-100: no loss; always so for the first token), length, and pictures (see
    vision/types.py). A conversation is one row, or several if the chat template rewrites earlier turns (see
    chat.py).
    """

    train: "Dataset"
    val: "Dataset | None"
    test: "Dataset | None"
    max_seq_len: int  # model.max_seq_len; for "auto" the length of the longest row of all splits
    stats: DataStats
    cache_path: Path
    shares: tuple[Share, ...] = ()  # how often the training rows are seen per epoch; () for once
    recipe: Recipe | str = TEXT_ALONE  # how the model takes pictures, or why it takes none

    @property
    def fingerprint(self) -> str:
        """A hash of the tokenized rows and of how often each is seen."""
        weights = [share.weight for share in self.shares]
        if not weights:
            return self.cache_path.name
        return store.content_key({"rows": self.cache_path.name, "weights": weights})

    def digests(self) -> dict[str, str]:
        """Split -> hash of its rows; {} if they are not from the cache."""
        files = read_manifest(self.cache_path).get("files", {})
        names = {split: f"{split}.arrow" for split in SPLITS}
        return {split: store.content_key(files[name]) for split, name in names.items() if name in files}

    def conversations(self, split: str) -> Iterator[Conversation]:
        """The conversations of val or test, for generated answers; plain text has none."""
        file = self.cache_path / f"{split}.conversations.arrow"
        batches = store.batches(file) if file.exists() else ()
        texts = chain.from_iterable(batch["value"].to_pylist() for batch in batches)
        return (conversation_from_json(text) for text in texts if text)


def prepare(
    config: RunConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    model_limit: int | None = None,
    recipe: Recipe | str = TEXT_ALONE,
    progress: bool = True,
    hashes: bool = True,
    day: date | None = None,
) -> PreparedData:
    """Tokenizes the data of a run or loads it from the cache; of concurrent callers only one does the work.

    Sets the tokenizer's chat template as data.chat_template asks. `model_limit` is the longest sequence that
    the model supports, if known, `recipe` how it takes pictures, or why it takes none. Without `hashes`, only
    the sizes of the cached files are checked for damage. A chat template that writes the date writes that of
    `day`, by default today.

    Raises:
        DataError: the data cannot be read, or has no supervised tokens.
        ConfigError: the chat template or the length limit cannot be used.
        StorageError: the cache cannot be written.
    """
    origin = use_template(tokenizer, config.data.chat_template)
    max_tokens = length_limit(config.model, tokenizer, model_limit)
    chat = _chat(config, tokenizer, max_tokens, recipe)
    dated = _day_written(config, tokenizer, day)
    opened = open_inputs(config.data)
    inputs, sources = zip(*opened, strict=True)
    fingerprints = [fingerprint(source) for source in sources]
    galleries = [gallery_of(config, source, recipe) for source in sources]
    key = _cache_key(config, tokenizer, max_tokens, dated, inputs, fingerprints, galleries)

    def make(folder: Path) -> dict[str, object]:
        started, tasks, parts = time.perf_counter(), [], []
        for (given, source), gallery in zip(opened, galleries, strict=True):
            with _own_rows(given):
                tasks.append(_task(config, given, source, chat, origin, replace(gallery, kept=folder)))
        for number, (given, source, task) in enumerate(zip(inputs, sources, tasks, strict=True)):
            name = Path(given.path).name if config.data.sources else given.split
            bar = progress_bar(f"tokenizing {name}", fingerprints[number][1])
            with bar if progress else nullcontext(lambda rows: None) as advance, _own_rows(given):
                parts.append(_encode(config, given, source, task, folder / f"{number}.part", advance))
        _require_valid(config, parts, folder)
        splits, chosen = write_splits(config, parts, folder, tokenizer, max_tokens)
        warnings = data_warnings(config, splits, parts, chosen)
        markers = split_markers(tokenizer) if not all(task.block for task in tasks) else []
        warnings += [split_warning(markers)] if markers else []
        took = round(time.perf_counter() - started, 2)
        stats = KeptStats(
            **splits, warnings=warnings, images=described(recipe), chat_template=origin, seconds=took
        )
        if dated:
            warnings.append(day_warning(dated))
            stats["rendered_as_of"] = str(dated)
        return {"stats": stats}

    folder = project_dir() / "data" / key
    store.build(folder, make, announce=progress, hashes=hashes)
    return _load(config, folder, inventory(opened), recipe)


def _chat(
    config: RunConfig, tokenizer: "PreTrainedTokenizerBase", max_tokens: int | None, recipe: Recipe | str
) -> Chat:
    chat = make_chat(
        tokenizer, config.data.supervise, max_tokens, learn_tool_calls=config.data.learn_tool_calls
    )
    return replace(chat, recipe=recipe)


@contextmanager
def _own_rows(given: DataInput) -> Iterator[None]:
    """Adds to errors in rows that the training data comes with how to do without these."""
    try:
        yield
    except DataError as error:
        if not given.alone:
            raise
        raise DataError(f"{error}\nTo train without these rows, use only the others: {given.alone}") from None


def _day_written(config: RunConfig, tokenizer: "PreTrainedTokenizerBase", day: date | None) -> date | None:
    """The day that the chat template writes from now on; None if it writes none, or renders no row."""
    if config.data.task == "cpt" or not writes_the_day(tokenizer):
        return None
    day = day or date.today()
    render_as_of(tokenizer, day)
    return day


def first_day(run: Path | None) -> date | None:
    """The day of the rows of a run that has begun; None if there is none, or its template writes no day."""
    with suppress(ValueError):
        return date.fromisoformat(str(read_json(RunDir(run).data).get("rendered_as_of"))) if run else None
    return None


def _cache_key(
    config: RunConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int | None,
    day: date | None,
    inputs: Sequence[DataInput],
    fingerprints: Sequence[tuple[str, int | None]],
    galleries: Sequence[Gallery],
) -> str:
    """Does not depend on weights: they decide how often rows are seen, not what they are."""
    data = config.data
    own = {given.split for given in inputs}
    fractions = {"val": data.val_fraction, "test": data.test_fraction}
    held_out = {split: fraction for split, fraction in fractions.items() if split not in own and fraction}
    files = [
        [given.split, given.format, dict(given.columns), digest]
        for given, (digest, _) in zip(inputs, fingerprints, strict=True)
    ]
    settings = (
        "task", "system_prompt", "supervise", "learn_tool_calls", "control_tokens",
        "bad_rows", "overlong", "dedup", "limit",
    )  # fmt: skip
    return store.content_key(
        {
            "code": [sources_digest(*SOURCES), installed_versions(PACKAGES)],
            "files": files,
            "sources": [given.path for given in inputs] if data.sources else None,
            "tokenizer": store.tokenizer_digest(tokenizer),
            "max_tokens": max_tokens,
            "auto_blocks": data.task != "sft" and config.model.max_seq_len == "auto",  # as of `block_tokens`
            "day": str(day),
            "images": [gallery.key for gallery in galleries],
            "held_out": [held_out, config.train.seed] if held_out else None,
            **{name: getattr(data, name) for name in settings},
        }
    )


def _task(
    config: RunConfig, given: DataInput, source: Source, chat: Chat, origin: str, gallery: Gallery
) -> EncodingTask:
    """Detects the format from the first row and tries the chat template on the first conversation."""
    what = f"{given.key}: {source.path}"
    name, rows = with_format(read_rows(source, config.data.limit), given.format, what)
    settings = (name, config.data.system_prompt, config.data.overlong, gallery)
    if is_raw_text(config, given, source, name):
        whole = with_control_tokens(replace(chat, max_tokens=None), config.data.control_tokens, renders=False)
        return EncodingTask(whole, *settings, block=block_tokens(config.model, chat.max_tokens))
    first = _first_conversation(rows, name, config.data.system_prompt)
    tried = first is not None and bool(first.messages)
    if first is not None and tried:
        check_template(chat.tokenizer, first, origin)
    return EncodingTask(with_control_tokens(chat, config.data.control_tokens, renders=tried), *settings)


def gallery_of(config: RunConfig, source: Source, recipe: Recipe | str) -> Gallery:
    """Where the pictures of a source may come from."""
    base = Path(config.data.image_folder).expanduser() if config.data.image_folder else None
    folder = source.folder or next((file.parent for file in source.files), None)
    return Gallery(recipe, base or folder, base, config.data.allow_urls)


def _first_conversation(rows: Iterable[Row], name: str, system_prompt: str | None) -> Conversation | None:
    """The first that is valid and has something to learn; what is not valid is found later."""
    for row in rows:
        with suppress(DataError):
            found = convert(row, name, system_prompt)
            if isinstance(found, Conversation):
                return found
    return None


def is_raw_text(config: RunConfig, given: DataInput, source: Source, name: str) -> bool:
    """Whether rows of the format `name` are documents to be joined and cut, which data.task decides.

    Raises:
        ConfigError: this data cannot be used with data.task.
    """
    task = config.data.task
    document = next((file for file in source.files if file.suffix.lower() in TEXT_SUFFIXES), None)
    if document and name != "text":
        raise ConfigError(
            f"{given.key}: {document} is a text file, which has no {name} rows. For raw text, remove the "
            "format (data.format=auto) and set data.task=cpt; conversations go into a .jsonl file, one a line"
        )
    if task == "cpt" and name != "text":
        raise ConfigError(
            f"{given.key}: {given.path} has {name} rows, but data.task=cpt trains on raw text (rows with "
            '"text", .txt or .md files). Set data.task=sft for conversations, or mixed for both'
        )
    if task == "sft" and document:
        raise ConfigError(
            f"{given.key}: {given.path} is raw text, but data.task=sft trains on separate rows. Set "
            "data.task=cpt to join and cut documents, or mixed if other data has conversations"
        )
    return task != "sft" and name == "text"


def _encode(
    config: RunConfig,
    given: DataInput,
    source: Source,
    task: EncodingTask,
    rows_file: Path,
    advance: Callable[[int], None],
) -> Part:
    """Tokenizes one path into temporary files."""
    conversations_file = rows_file.with_suffix(".conversations.part")
    counts = Counts()
    digests, row_counts = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    size = sum(file.stat().st_size for file in source.files)
    if source.hub:
        size = SMALL_BYTES if source.hub.count is None else 200 * source.hub.count
    if size >= SMALL_BYTES and not task.block:  # for fewer rows, they take longer to make than they save
        task = replace(task, chat=replace(task.chat, pieces=pieces_of(task.chat.tokenizer)))
    rows, bad = read_rows(source, config.data.limit, counts.notes), 0
    with (
        store.writing(rows_file, PART_ROWS) as rows_writer,
        store.writing(conversations_file, TEXTS) as conversations_writer,
    ):
        for chunk in encode_all(task, rows, worker_count(config.data.num_workers, size)):
            rows_writer.write_batch(chunk.rows)
            conversations_writer.write_batch(chunk.conversations)
            digests.append(chunk.digests)
            row_counts.append(chunk.row_counts)
            counts.add(chunk.counts)
            bad_rows.keep(rows_file.parent, chunk.counts.bad)
            bad += len(chunk.counts.bad)
            advance(chunk.counts.read)
    if bad:
        counts.dropped[bad_rows.DROPPED] = bad
    return Part(
        given,
        rows_file,
        conversations_file,
        np.concatenate(digests),
        np.concatenate(row_counts),
        counts,
        task.format,
        task.block,
    )


def _require_valid(config: RunConfig, parts: Sequence[Part], folder: Path) -> None:
    """Raises one DataError for the rows of all paths that are not valid, unless they are to be left out."""
    found = [part for part in parts if part.counts.dropped[bad_rows.DROPPED]]
    if found and config.data.bad_rows == "refuse":
        what = ", ".join(part.given.key for part in found)
        bad = sum(part.counts.dropped[bad_rows.DROPPED] for part in found)
        with _own_rows(min((part.given for part in found), key=lambda given: bool(given.alone))):
            bad_rows.refuse(folder, what, bad, sum(part.counts.read for part in found))


def _load(config: RunConfig, folder: Path, found: Inventory, recipe: Recipe | str) -> PreparedData:
    import datasets

    kept: KeptStats = read_manifest(folder)["stats"]
    stats: DataStats = {**kept, "inputs": found.inputs, "remarks": found.remarks}
    dropped = bad_rows.dropped_lines(folder, stats)
    stats["warnings"] = [*remark_lines(found.remarks, expected=False), *dropped, *kept["warnings"]]
    longest = max(split["lengths"]["max"] for split in splits_of(stats).values())
    asked = config.model.max_seq_len
    files = {split: folder / f"{split}.arrow" for split in SPLITS}
    rows = {name: datasets.Dataset.from_file(str(file)) for name, file in files.items() if file.exists()}
    shares = _weighted(stats["train"].get("sources", []), config)
    length = longest if asked == "auto" else asked
    return PreparedData(
        rows["train"], rows.get("val"), rows.get("test"), length, stats, folder, shares, recipe
    )


def _weighted(sources: list[SourceStats], config: RunConfig) -> tuple[Share, ...]:
    """How often the rows of each source are seen; also says so in their statistics."""
    if not sources:
        return ()
    training = [given for given in data_inputs(config.data) if given.split == "train"]
    shares = [Share(source["rows"], given.weight) for source, given in zip(sources, training, strict=True)]
    for source, share in zip(sources, shares, strict=True):
        source |= {"weight": share.weight, "rows_per_epoch": share.per_epoch}
        source["tokens_per_epoch"] = round(source["tokens"] * share.per_epoch / share.rows)
    return tuple(shares)
