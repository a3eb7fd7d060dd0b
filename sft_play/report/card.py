"""The model card of trained weights: a README.md with the hub's metadata, from config, summary and scores."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sft_play.config.inputs import asked_name, training_paths
from sft_play.config.methods import METHODS
from sft_play.config.schema import RunConfig
from sft_play.files import storing, write_atomic
from sft_play.hub import REPOSITORY
from sft_play.manifest import CARD
from sft_play.report.closing import run_values, training_time
from sft_play.report.record import SPLITS, scores_of_models
from sft_play.report.table import Table, markdown
from sft_play.report.tables import MISSING, metric_table, with_perplexity
from sft_play.runlog import RunDir, read_json
from sft_play.spelling import make

FOLDERS = re.compile(r"(?<![\w/:.])/(?:[^\s/]+/)+")  # of an absolute path
SUPERVISED = {"assistant": "all assistant turns", "last": "the last assistant turn", "all": "all tokens"}


def write_card(config: RunConfig, run: RunDir, folder: Path, *, merged: bool = False) -> None:
    """Writes README.md into the folder of a run's weights; replaces the one that PEFT writes."""
    write_atomic(folder / CARD, _text(config, run, merged=merged))


def _text(config: RunConfig, run: RunDir, *, merged: bool) -> str:
    found = {split: scores_of_models(read_json(run.evaluation(split))) for split in SPLITS}
    return model_card(config, read_json(run.summary), found, merged=merged)


@contextmanager
def renewed_cards(config: RunConfig, run: RunDir) -> Iterator[None]:
    """Writes the cards of a run again after new scores were written within; those that people edited stay.

    Raises StorageError if a card cannot be written.
    """
    folders = (run.adapter, run.model, run.merged)
    ours = [folder for folder in folders if _is_ours(folder, _text(config, run, merged=folder == run.merged))]
    yield
    for folder in ours:
        with storing(folder / CARD, "Free space, or make the folder writable"):
            write_card(config, run, folder, merged=folder == run.merged)


def _is_ours(folder: Path, text: str) -> bool:
    """Whether the card has not been edited."""
    try:
        return (folder / CARD).read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def model_card(
    config: RunConfig,
    summary: Mapping[str, Any],
    evaluations: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    merged: bool = False,
) -> str:
    """The card as Markdown, from summary.json and split -> model -> scores of `make eval`.

    Local paths are shortened to their last part: a card is published, the folders of a machine are not.
    """
    is_adapter = config.tuning.mode != "full" and not merged
    base = public_name(config.model.name)
    what = "A LoRA adapter for" if is_adapter else "A fine-tuned version of"
    data = ", ".join(f"`{public_name(path)}`" for path in training_paths(config.data))
    on_hub = f"[{base}](https://huggingface.co/{base})" if is_on_hub(base) else f"`{base}`"
    device, duration = summary.get("device", MISSING), training_time(summary)
    measured = [("device", device), ("training time", duration), *run_values(summary)]
    versions = summary.get("versions") or {}
    sections = {
        "Use": _usage(config, is_adapter, summary.get("model_class"), summary.get("stop_tokens") or {}),
        "Scores on held-out rows": _scores(summary, evaluations or {}),
        "Data": _data(summary.get("data") or {}),
        "Settings": markdown(Table(("setting", "value"), _settings(config))),
        "Measured": markdown(Table(("", ""), measured)),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    blocks = [
        _metadata(config, is_adapter),
        f"# {config.output.name}",
        f"{'A LoRA adapter merged into' if merged else what} {on_hub}, trained on {data} with SFT-Play.",
        *([config.output.note] if config.output.note else []),
        *(f"## {title}\n\n{text}" for title, text in sections.items() if text),
    ]
    return "\n\n".join(blocks) + "\n"


def public_name(name: str) -> str:
    """The name of a model or of data as it may be published: paths lose their folders."""
    name = asked_name(name)
    return name if is_on_hub(name) or name.startswith("builtin:") else Path(name).name


def without_folders(text: str, instead: str = "") -> str:
    """A message as it may be published: absolute paths in it have something else for their folders."""
    return FOLDERS.sub(instead, text)


def is_on_hub(name: str) -> bool:
    """Whether this is the name of a repository on the hub rather than a path."""
    return bool(REPOSITORY.fullmatch(name)) and not Path(name).exists()


def _metadata(config: RunConfig, is_adapter: bool) -> str:
    """The front matter, which the hub reads."""
    from huggingface_hub import ModelCardData

    data = [path for path in training_paths(config.data) if is_on_hub(path)]
    card = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        base_model=config.model.name if is_on_hub(config.model.name) else None,
        datasets=data or None,
        pipeline_tag="text-generation",
        tags=["sft", "sft-play", *(["lora"] if config.tuning.mode != "full" else [])],
    )
    return f"---\n{card.to_yaml()}\n---"


def _loading(config: RunConfig, is_adapter: bool, model_class: str | None) -> tuple[str, str]:
    """What is imported, and how the weights are loaded; `model_class` if it is not what Auto classes take."""
    if is_adapter and model_class:
        base = public_name(config.model.name)
        return (
            f"from peft import PeftModel\nfrom transformers import AutoTokenizer, {model_class}",
            f'base = {model_class}.from_pretrained("{base}", dtype="auto")\n'
            "model = PeftModel.from_pretrained(base, folder)",
        )
    library, name = "transformers", model_class or "AutoModelForCausalLM"
    if is_adapter:
        library, name = "peft", "AutoPeftModelForCausalLM"
    return (
        f"from {library} import {name}\nfrom transformers import AutoTokenizer",
        f'model = {name}.from_pretrained(folder, dtype="auto")',
    )


def _usage(
    config: RunConfig, is_adapter: bool, model_class: str | None, stop_tokens: Mapping[str, int]
) -> str:
    """How the weights are loaded; the base of an adapter does not know that `stop_tokens` end an answer."""
    imports, loading = _loading(config, is_adapter, model_class)
    ends = [*stop_tokens.values()] if is_adapter else []
    scaled = config.model.rope_scaling if is_adapter else None
    first = ""
    if scaled:
        settings = ", ".join(
            f"{name}: {value:g}" if isinstance(value, float) else f"{name}: {value}"
            for name, value in scaled
            if value
        )
        first = (
            f"It was trained with scaled positions ({settings}), which the config of the base model needs "
            "before it computes what was trained; a merged model has them.\n\n"
        )
    if ends:
        listed = " and ".join(f"`{text}` (token {token_id})" for text, token_id in stop_tokens.items())
        first += (
            f"Its answers end with {listed}, where the base does not stop. Tell a server of this adapter, "
            f'such as vLLM, with `"stop_token_ids": {ends}` in each request; a merged model knows.\n\n'
        )
    stop = f", eos_token_id=[tokenizer.eos_token_id, {', '.join(map(str, ends))}]" if ends else ""
    return (
        f"{first}```python\n{imports}\n\n"
        'folder = "."  # this folder, or its name on the hub\n'
        f"{loading}\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        'messages = [{"role": "user", "content": "..."}]\n'
        'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", '
        "return_dict=True)\n"
        f"answer = model.generate(**inputs, max_new_tokens={config.eval.max_new_tokens}{stop})\n"
        'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))\n'
        "```"
    )


def _scores(summary: Mapping[str, Any], evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of the scores before and after training, and one for each split that was evaluated."""
    scores = summary.get("eval") or {}
    both = {when: with_perplexity(scores.get(when) or {}) for when in ("before", "after")}
    parts = []
    for split, columns in {"": both, **evaluations}.items():
        if table := markdown(metric_table(columns)):
            parts += [f"`{make('eval')}` on the {split} split:", table] if split else [table]
    return "\n\n".join(parts)


def _data(data: Mapping[str, Any]) -> str:
    rows = []
    for split in ("train", "val", "test"):
        if counts := data.get(split):
            numbers = (counts["rows"], counts["tokens"], counts["supervised_tokens"])
            rows.append((split, *(f"{number:,}" for number in numbers)))
    table = markdown(Table(("split", "rows", "tokens", "supervised tokens"), rows))
    return f"{table}\n\nFingerprint of the tokenized rows: `{data['fingerprint']}`" if table else ""


def _settings(config: RunConfig) -> list[tuple[str, str]]:
    train, lora = config.train, config.tuning.lora
    rows = [("method", METHODS[config.tuning.mode])]
    if config.tuning.mode != "full":
        rows.append(("rank, alpha, dropout", f"{lora.r}, {lora.alpha:g}, {lora.dropout:g}"))
        targets = "all linear layers" if lora.target_modules == "auto" else ", ".join(lora.target_modules)
        rows.append(("adapted modules", targets))
        if lora.init != "default" or lora.plus_ratio:
            rows.append(("initialization, LoRA+ ratio", f"{lora.init}, {lora.plus_ratio or 1:g}"))
        if lora.modules_to_save:
            rows.append(("modules trained in full", ", ".join(lora.modules_to_save)))
    if config.model.new_tokens:
        rows.append(("new tokens", ", ".join(f"`{token}`" for token in config.model.new_tokens)))
    return [
        *rows,
        ("peak learning rate", f"{train.learning_rate:g}, {train.lr_schedule}"),
        ("optimizer", f"{train.optimizer}, weight decay {train.weight_decay:g}"),
        ("loss on", SUPERVISED[config.data.supervise]),
        ("seed", str(train.seed)),
    ]
