"""A tokenizer as llama.cpp needs it: texts and kinds of tokens, merges or scores, how text is split first.

llama.cpp has the rules for splitting text in its own code, each under a name (src/llama-vocab.cpp, read
2026-11-22). A tokenizer is exported if its rules are among these; otherwise texts would silently become other
tokens.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from sft_play.data.template import render_example
from sft_play.errors import ConfigError
from sft_play.model.generation import end_of_turn_id
from sft_play.spelling import var

if TYPE_CHECKING:
    from gguf import GGUFWriter

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {_WORDS % r"\p{N}{1,3}": "llama-bpe", _WORDS % r"\p{N}": "qwen2", _TEKKEN: "tekken"}

SPACE = "\u2581"  # SentencePiece writes a space as this
ADDED_SCORE, UNREACHED_SCORE = -1000.0, -1e6


@dataclass(frozen=True)
class Vocabulary:
    """The fields of GGUF's tokenizer section."""

    model: str  # gpt2: merges of bytes; llama: merges of characters in the order of scores, as SentencePiece
    split: str  # name of the rules by which text is split before merging
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]  # gguf.TokenType of each token
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    space_first: bool = False  # whether a space is put before the text


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
    """The tokens of a fast tokenizer, padded to the rows of the embedding.

    Raises:
        ConfigError: llama.cpp has no such tokenizer.
    """
    tree = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    kind = tree["model"]["type"]
    if kind != "BPE":
        raise ConfigError(
            f"{var(FORMAT='gguf')}: tokenizers of type {kind} cannot be exported; supported: BPE"
        )
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in tree["model"]["merges"]]
    if tree["model"].get("byte_fallback"):
        tokens, kinds = _tokens(tokenizer, tree, size)
        scores = _scores(tree["model"]["merges"], tokens, kinds)
        return Vocabulary("llama", "default", tokens, kinds, (), scores, _puts_space_first(tree))
    split = _split_name(tree["pre_tokenizer"])
    if split is None:
        known = ", ".join([*SPLITS.values(), "gpt-2", "smollm"])
        raise ConfigError(
            f"{var(FORMAT='gguf')}: llama.cpp does not know how this tokenizer splits text, and would "
            f"tokenize it differently; it knows the rules of {known}"
        )
    return Vocabulary("gpt2", split, *_tokens(tokenizer, tree, size), tuple(pairs))


def _split_name(tree: dict[str, Any]) -> str | None:
    """The name in llama.cpp of how a byte-level tokenizer splits text."""
    steps = tree["pretokenizers"] if tree and tree["type"] == "Sequence" else [tree]
    if not steps or not steps[-1] or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if steps[-1].get("use_regex", True):
        if len(steps) == 1:
            return "gpt-2"
        return "smollm" if steps[:-1] == [{"type": "Digits", "individual_digits": True}] else None
    if len(steps) != 2 or steps[0]["type"] != "Split" or steps[0]["invert"]:
        return None
    return SPLITS.get(steps[0]["pattern"].get("Regex"))


def _puts_space_first(tree: dict[str, Any]) -> bool:
    """Whether a SentencePiece tokenizer puts a space before the text."""
    normalizer, before = tree["normalizer"] or {}, tree["pre_tokenizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    prepends = any(step.get("type") == "Prepend" for step in steps)
    return prepends or (before.get("type") == "Metaspace" and before["prepend_scheme"] != "never")


def _tokens(
    tokenizer: PreTrainedTokenizerBase, tree: dict[str, Any], size: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Texts and kinds of all tokens; rows of the embedding that no token has are marked as unused."""
    from gguf import TokenType

    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    unknown = tree["model"].get("unk_token")
    by_bytes = bool(tree["model"].get("byte_fallback"))
    tokens, kinds = [], []
    for index in range(size):
        text = texts.get(index)
        if text is None:
            text, kind = f"[PAD{index}]", TokenType.UNUSED
        elif by_bytes and text == unknown:
            kind = TokenType.UNKNOWN
        elif index in added:
            special = added[index].special or _looks_special(text)
            kind = TokenType.CONTROL if special else TokenType.USER_DEFINED
            text = text if special else text.replace(SPACE, " ")
        elif by_bytes and text.startswith("<0x") and len(text) == len("<0x00>"):
            kind = TokenType.BYTE
        else:
            kind = TokenType.NORMAL
        tokens.append(text)
        kinds.append(int(kind))
    return tuple(tokens), tuple(kinds)


def _looks_special(text: str) -> bool:
    """Whether llama.cpp's converter takes it for a control token although the model does not mark it."""
    return text.startswith("<|") and text.endswith("|>") or text in ("<pad>", "<mask>")


def _scores(merges: list[Any], tokens: tuple[str, ...], kinds: tuple[int, ...]) -> tuple[float, ...]:
    """The score of each token: the earlier it is merged, the higher."""
    from gguf import TokenType

    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        parts = pair.split(" ") if isinstance(pair, str) else pair
        ranks.setdefault("".join(parts), rank)
    scores = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == TokenType.NORMAL:
            scores.append(-float(ranks[token]) if token in ranks else UNREACHED_SCORE)
        else:
            scores.append(0.0 if kind in (TokenType.BYTE, TokenType.UNKNOWN) else ADDED_SCORE)
    return tuple(scores)


@dataclass(frozen=True)
class Beginning:
    """Where the token for the beginning of a text came from in training."""

    of_text: bool  # the tokenizer puts it before a plain text
    of_chat: bool  # the chat template writes it

    def added(self, *, only_text: bool) -> bool:
        """Whether whoever runs the file is to put it before every prompt.

        llama.cpp (common/chat.cpp, read 2026-11-28) first takes it off a chat prompt that begins with it;
        Ollama takes nothing off. Where only plain texts begin with it, no answer is right for both: it is
        right for chats, unless the model has learned from `only_text`.
        """
        return self.of_text and (self.of_chat or only_text)


def beginning(tokenizer: PreTrainedTokenizerBase) -> Beginning:
    """Where the token for the beginning of a text comes from, if there is one."""
    bos = tokenizer.bos_token_id
    of_text = bos is not None and list(tokenizer("a", verbose=False)["input_ids"])[:1] == [bos]
    chat = render_example(tokenizer, "question", prompt=True) or ""
    return Beginning(of_text, bos is not None and chat.startswith(str(tokenizer.bos_token)))


def describe(writer: "GGUFWriter", tokenizer: PreTrainedTokenizerBase, size: int, *, adds_bos: bool) -> None:
    """Writes the tokenizer, with the run's template, into a GGUF writer, as the model was trained with it.

    `size` is the number of rows of the embedding, and `adds_bos` that of `Beginning.added`.

    Raises:
        ConfigError: llama.cpp has no such tokenizer.
    """
    words = vocabulary(tokenizer, size)
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.split)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.kinds)
    if words.merges:
        writer.add_token_merges(words.merges)
    if words.scores:
        writer.add_token_scores(words.scores)
        writer.add_add_space_prefix(words.space_first)
    end_of_turn = end_of_turn_id(tokenizer)
    special = {
        writer.add_bos_token_id: tokenizer.bos_token_id,
        writer.add_eos_token_id: tokenizer.eos_token_id,
        writer.add_eot_token_id: end_of_turn if end_of_turn != tokenizer.eos_token_id else None,
        writer.add_unk_token_id: tokenizer.unk_token_id,
        writer.add_pad_token_id: tokenizer.pad_token_id,
    }
    for add, token_id in special.items():
        if token_id is not None:
            add(token_id)
    writer.add_add_bos_token(adds_bos)
    writer.add_add_eos_token(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
