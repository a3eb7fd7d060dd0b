"""Warnings about data that is allowed but probably not what was intended."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.data.chat import HIDDEN_REASONING, UNSTOPPED
from sft_play.data.control_tokens import IN_TEXTS
from sft_play.data.splits import Chosen, Part
from sft_play.data.stats import Split, SplitsStats
from sft_play.data.workers import WITH_NULLS, WITH_PLACEHOLDER, is_too_long
from sft_play.errors import ConfigError
from sft_play.rows.json_files import AS_NULL
from sft_play.rows.tables import NUMBERED
from sft_play.units import counted

FEW_ROWS = 32
MAX_KEYS = 10  # that are not used and named, the most frequent ones
HELD_OUT: dict[Split, str] = {"val": "validation", "test": "test"}
WARNING_SHARE = 0.1  # share of rows with a problem that is worth a warning
# Of the notes that are counted: what has it, and what it means.
MEANINGS = {
    HIDDEN_REASONING: (
        "conversation",
        ", so it is not trained on. Use a template that renders message.reasoning_content "
        "(data.chat_template=plain, or a Jinja file), or write the reasoning into content, as the model "
        "should produce it",
    ),
    UNSTOPPED: (
        "conversation",
        ": where the template begins the next turn without a token, the model does not learn to stop. Use a "
        "template that ends each turn with one (data.chat_template=plain or chatml), or data.supervise=last",
    ),
    IN_TEXTS: (
        "row",
        ": they are tokenized as control tokens, so a text can end a turn, and answers teach the model to "
        "write them; "
        "data.control_tokens=escape spells them as ordinary text, refuse makes them errors",
    ),
    WITH_PLACEHOLDER: (
        "row",
        ": nothing beside the text is listed for it, so it is trained as plain text. If it stands for an "
        "image, list that in images; video and audio are not supported: remove such rows",
    ),
    WITH_NULLS: (
        "row",
        ": Parquet does not tell it from a missing key, so it is ignored. To train on it, write the tools or "
        "the arguments as a JSON string",
    ),
    NUMBERED: ("row", ""),
}


def data_warnings(
    config: RunConfig,
    stats: SplitsStats,
    parts: Sequence[Part],
    chosen: Mapping[Split, Sequence[Chosen]],
) -> list[str]:
    """The warnings about the data paths, and about the statistics and the content of each split.

    Raises:
        ConfigError: the tokenizer knows none of the text.
    """
    found = _about_unknown_tokens(config, stats["train"])
    train = stats["train"]
    if train["rows"] < FEW_ROWS:
        found.append(f"only {counted(train['rows'], 'training row')}: the model will overfit")
    found += _about_missing_splits(config, chosen)
    found += _about_duplicates(stats, chosen)
    if train["rows"] > train["conversations"] and not train["parts"] and not any(p.block for p in parts):
        found.append(
            f"the chat template rewrites earlier turns, so {train['conversations']:,} conversations became "
            f"{train['rows']:,} rows, which render each turn as at inference time; set data.supervise=last "
            "to keep one row per conversation"
        )
    for part in parts:
        lost = sum(part.counts.dropped.values())
        if lost >= WARNING_SHARE * part.counts.read:
            what = f"{lost:,} of {part.counts.read:,} rows of {part.given.key} were dropped"
            found.append(what + _how_to_keep(part))
        nulls = {what: count for what, count in part.counts.notes.items() if what.endswith(AS_NULL)}
        found += [f"{part.given.key}: {count} {what}" for what, count in nulls.items()]
        found += _about_unused_keys(part)
        for note, (what, meaning) in MEANINGS.items():
            if count := part.counts.notes[note]:
                first = f" (the first is {part.counts.first[note]})" if note in part.counts.first else ""
                found.append(f"{part.given.key}: {counted(count, what)} {note}{first}{meaning}")
    return found


def _how_to_keep(part: Part) -> str:
    """What would keep most of the rows that were dropped, if they were too long."""
    (reason, count), *_ = part.counts.dropped.most_common(1)
    if not is_too_long(reason):
        return ""
    found = f"; {count} {reason}: "
    if part.format == "text":
        return (
            found
            + "data.task=cpt joins and cuts documents, data.overlong=split keeps all of each in several rows"
        )
    return found + (
        "data.overlong=split keeps all of each in several rows, truncate its beginning; model.max_seq_len is "
        "the limit"
    )


def _about_unused_keys(part: Part) -> list[str]:
    frequent = sorted(part.counts.unused.items(), key=lambda item: (-item[1], item[0]))[:MAX_KEYS]
    shown = [f"{key} ({counted(count, 'row')})" for key, count in frequent]
    if not shown:
        return []
    more = len(part.counts.unused) - len(shown)
    shown += [f"{more} more"] if more else []
    return [
        f"{part.given.key}: keys of its {counted(part.counts.read, 'row')} that are not used: "
        f"{', '.join(shown)}"
    ]


def _about_unknown_tokens(config: RunConfig, train: Mapping[str, Any]) -> list[str]:
    share = train["unknown_tokens"] / train["tokens"]
    if share >= 0.9:
        raise ConfigError(
            f"model.name: the tokenizer of '{config.model.name}' knows none of the text: "
            f"{train['unknown_tokens']:,} of {train['tokens']:,} tokens are its unknown token. Check that it "
            "belongs to this model and supports this language"
        )
    if share < 0.01:
        return []
    return [f"{share:.0%} of the training tokens are unknown to the tokenizer"]


def _about_missing_splits(config: RunConfig, chosen: Mapping[Split, Sequence[Chosen]]) -> list[str]:
    """Paths of so few rows that none is held out although a share is asked for."""
    found = []
    for split, name in HELD_OUT.items():
        fraction = getattr(config.data, f"{split}_fraction")
        for one in chosen[split]:
            if one.part.given.split == split or not fraction or one.mask.any():
                continue
            rows = len(np.unique(one.part.digests))
            enough = f"data.{split}_fraction={math.ceil(100 / rows) / 100:g} for one, or " if rows > 1 else ""
            noun = "text" if one.part.block else "row"
            few = counted(rows, noun if rows == len(one.part.digests) else f"distinct {noun}")
            few += " is" if rows == 1 else " are"
            found.append(
                f"{one.part.given.key}: no {name} rows are held out, since {few} too few for "
                f"data.{split}_fraction={fraction:g}; set {enough}data.{split}_path"
            )
    return found


def _about_duplicates(stats: SplitsStats, chosen: Mapping[Split, Sequence[Chosen]]) -> list[str]:
    """Duplicates within the training data, and between it and held-out data."""
    found = []
    digests = {}
    for split, parts in chosen.items():
        if stats[split]:
            digests[split] = np.concatenate([one.digests for one in parts])
    known = np.unique(digests["train"])
    for split in sorted(digests.keys() - {"train"}, reverse=True):
        common = int(np.isin(digests[split], known).sum())
        if common:
            total = len(digests[split])
            found.append(f"{common} of {total} {split} conversations are also in the training data")
    repeated, total = len(digests["train"]) - len(known), len(digests["train"])
    if repeated >= WARNING_SHARE * total:
        found.append(
            f"{repeated} of {total} training conversations are duplicates; set data.dedup=true to drop them"
        )
    return found
