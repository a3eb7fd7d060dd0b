"""The settings of the data section: rows, how they are rendered, and which tokens carry loss."""

from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from sft_play.config.section import Section
from sft_play.config.values import NUMBER, Auto, AutoOrWorkers, Count, Fraction, PathText
from sft_play.rows.formats import FORMATS

RowFormat = Literal["auto", *FORMATS]  # type: ignore[valid-type]  # mypy wants the names here
Streaming = bool | Auto
# What keys of a format are called in the data, e.g. {prompt: input_text, completion: target_text}
Columns = dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]]


class SourceConfig(Section):
    """One of several sources of training rows."""

    path: PathText = Field(min_length=1)
    """As data.train_path."""
    weight: Annotated[FiniteFloat, Field(ge=0, le=1000), NUMBER] = 1.0
    """How often each of its rows is seen per epoch. 2: twice. 0.5: half of the rows, the other half in the
    next epoch. 0: the source is left out. With train.packing, it counts packed sequences, not rows."""
    format: RowFormat | None = None
    """Row format. Default: data.format."""
    columns: Columns | None = None
    """Like data.columns, which is the default."""
    split: str | None = None
    """Split of a folder or a Hub dataset. Default: train; its other splits are used for evaluation."""


class DataConfig(Section):
    """The rows, how they are rendered as text, and which tokens carry loss."""

    train_path: PathText | None = Field(default=None, min_length=1)
    """JSONL, JSON, Parquet, Arrow or CSV file, a folder of such files, a Hub dataset, or built-in rows:
    "builtin:demo", "builtin:replies" or "builtin:shapes". Raw text (data.task) may also be .txt and .md
    files. Either this or sources is required. From a folder or dataset with splits, the training split is
    read; folder::split and org/name:config:split select another."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources of training rows in place of train_path."""
    task: Literal["sft", "cpt", "mixed"] = "sft"
    """sft: each row is trained on by itself. cpt: raw text (format text) for domain training: documents are
    joined with the end-of-text token and cut into rows of model.max_seq_len tokens (auto: 2048), with loss
    on every token. mixed: raw text is treated as in cpt, conversations as in sft."""
    val_path: PathText | None = None
    """Validation rows. Default: those that the training data comes with, or else val_fraction of it."""
    test_path: PathText | None = None
    """Test rows. Default: those that the training data comes with, or else test_fraction of it."""
    val_fraction: Fraction = 0.05
    """Share of the rows of each source to hold out for validation if there are no validation rows."""
    test_fraction: Fraction = 0.0
    """Share of the rows of each source to hold out for testing if there are no test rows."""
    format: RowFormat = "auto"
    """Row format. auto: detected from the keys of the first row; all other rows must have the same format.
    preference: chosen answers are trained on, rejected ones are left out; never detected."""
    columns: Columns = {}
    """What the keys of a format are called in your files, e.g. {prompt: input_text, completion:
    target_text}."""
    chat_template: PathText = "auto"
    """auto: the tokenizer's own, or "plain" if it has none. Or "plain", "chatml", or the path of a Jinja
    file."""
    system_prompt: str | None = None
    """Added to each conversation that has no system message."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens carry loss: those of all assistant turns, of the last assistant turn, or all tokens."""
    learn_tool_calls: bool = True
    """Whether assistant turns that call tools carry loss. A row excludes any assistant message with
    `"train": false` (or `"weight": 0`) in it."""
    control_tokens: Literal["keep", "escape", "refuse"] = "keep"
    """How to treat control tokens, such as <|im_end|>, in the text of rows or prompts. keep: as control
    tokens; a warning counts them. escape: as ordinary text, in training, evaluation and inference. refuse:
    the first one is an error."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """What to do with rows that cannot be read, or do not match their format or the chat template. refuse:
    an error that lists them. drop: they are left out, counted, and listed in a file."""
    overlong: Literal["drop", "truncate", "split", "error"] = "drop"
    """What to do with rows longer than model.max_seq_len; their number is always reported. split: into
    several rows, each of whole exchanges with the system message where they fit, so that each supervised
    token is learned once."""
    dedup: bool = False
    """Drop exact duplicates of earlier conversations."""
    limit: Count | None = None
    """Maximum number of rows to use from each file."""
    streaming: Streaming = "auto"
    """Whether the rows of a Hub dataset are read over the network instead of being downloaded first. auto: if
    the download does not fit on the disk. With limit, only that many rows are read."""
    image_folder: PathText | None = None
    """Folder that paths of images are relative to, and have to be in. Default: that of the file of their row;
    the rows of a folder may share its images."""
    image_max_pixels: Count | None = None
    """The most pixels that an image keeps; larger ones are made smaller. Default: as the model's image
    processor says."""
    allow_urls: bool = False
    """Whether images that rows name by http(s) URLs are downloaded, once, with the rows: at most 32 MiB in
    30 s each."""
    num_workers: AutoOrWorkers = "auto"
    """Number of tokenizing processes. auto: the number of CPU cores, at most 8, and 1 for small data."""

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError("val_fraction + test_fraction must be below 1, so that training rows are left")
        self._require_training_data()
        without_effect = {
            "supervise": self.supervise == "last",
            "system_prompt": self.system_prompt is not None,
            "learn_tool_calls": not self.learn_tool_calls,
        }
        given = [name for name, is_set in without_effect.items() if is_set]
        if self.task == "cpt" and given:
            raise ValueError(f"{given[0]} has no effect with task=cpt; remove it, or set task=mixed")
        if self.supervise == "all" and not self.learn_tool_calls:
            raise ValueError(
                "learn_tool_calls=false contradicts supervise=all, which puts loss on every token"
            )
        return self

    def _require_training_data(self) -> None:
        if self.train_path is not None and self.sources:
            raise ValueError(
                "train_path and sources are both given; list train_path as one of the sources, or remove one"
            )
        if self.train_path is None and not self.sources:
            raise ValueError("train_path is required (or sources, for several)")
        if self.sources and not any(source.weight for source in self.sources):
            raise ValueError("sources: the weights add up to 0; give at least one source a weight above 0")
        named = [(source.path, source.split) for source in self.sources]
        twice = next((path for path, split in named if named.count((path, split)) > 1), None)
        if twice is not None:
            raise ValueError(f"sources: {twice!r} is listed twice; list it once, with a weight of 2")
