"""Exports a finished run as a GGUF file with a Modelfile, for llama.cpp and Ollama."""

import importlib.util
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play.commands.merge import MERGE_INFO, digest, merge
from sft_play.commands.output import replacing_output, require_overwritable, require_space
from sft_play.config.data import DataConfig
from sft_play.config.inputs import data_inputs
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.export import ollama
from sft_play.export.architecture import gguf_family
from sft_play.export.gguf_file import TYPES, Source, file_bytes, write
from sft_play.export.vocabulary import beginning, vocabulary
from sft_play.extras import install_command
from sft_play.manifest import find_damage
from sft_play.model.generation import end_of_turn_id, load_chat_tokenizer
from sft_play.model.load import load_model_config, without_new_tokens
from sft_play.model.weights.finished import finished_weights
from sft_play.report.layout import ending
from sft_play.runlog import RunDir, read_json
from sft_play.spelling import make, var
from sft_play.ui.console import console, quiet_libraries
from sft_play.units import SHORT_NAMES, format_bytes

EXPORT_INFO = "export.json"  # in the exported folder: of what; a folder with it may be overwritten
MODELFILE = "Modelfile"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What a folder holds, as its export.json says."""

    format: str = "gguf"
    dtype: str
    tensors: Mapping[str, int]  # how many of each type
    source: str  # folder of the model
    template: bool  # whether the Modelfile has it
    system_left_out: bool  # of the Modelfile
    adds_bos: bool
    bos_of_texts: str | None  # what only texts begin with, which the file cannot say beside what chats do


def export(
    config: RunConfig, run: RunDir, output: Path | None = None, dtype: str = "auto"
) -> dict[str, object]:
    """Writes `<run>/gguf/`: the merged model as a GGUF file, and a Modelfile for Ollama.

    Merges the adapter first, unless `make merge` has done it. An earlier export is overwritten once the new
    one is complete. `dtype`, of the matrices: f32, f16, bf16 or q8_0; auto is that of the merged model.

    Raises:
        ConfigError: the model or the tokenizer cannot be exported, or `output` has other content.
        CheckpointError: the run has no complete weights.
        StorageError: there is not enough disk space.
        NonFiniteError: a weight is not finite in this dtype.
    """
    if dtype not in ("auto", *TYPES):
        raise ConfigError(f"{var(DTYPE=dtype)} is not supported; allowed: auto, {', '.join(TYPES)}")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{make('export')} needs gguf (not installed); run `{install_command('export')}`")
    output = output or run.path / "gguf"
    require_overwritable(output, EXPORT_INFO, "export")
    finished_weights(config, run)
    architecture, tokenizer = load_model_config(config.model), load_chat_tokenizer(config)
    gguf_family(architecture)  # reports what cannot be exported before anything is merged
    vocabulary(tokenizer, len(tokenizer))
    folder = run.model if config.tuning.mode == "full" else _merged(config, run)
    with quiet_libraries(run.log):
        merged = without_new_tokens(config.model).model_copy(update={"name": str(folder)})  # it has them
        merged_config = load_model_config(merged)
        wanted = dtype if dtype != "auto" else SHORT_NAMES[str(merged_config.dtype).removeprefix("torch.")]
        adds_bos = beginning(tokenizer).added(only_text=_only_text(config.data))
        source = Source(folder, merged_config, tokenizer, config.output.name, adds_bos)
        file = output / f"{config.output.name}-{wanted.upper()}.gguf"
        exported = _write_folder(config, run, source, file, wanted)
    size = file.stat().st_size
    _report(config.output.name, file, size, exported)
    return {"output": str(output), **vars(exported), "file": file.name, "bytes": size}


def _only_text(data: DataConfig) -> bool:
    """Whether a run has learned from plain texts alone, as far as its config says."""
    return data.task == "cpt" or all(given.format == "text" for given in data_inputs(data))


def _merged(config: RunConfig, run: RunDir) -> Path:
    """The folder of the merged model; merges first unless it is there, whole and of this adapter."""
    folder = run.merged
    if read_json(folder / MERGE_INFO).get("adapter_sha256") != digest(run.adapter) or find_damage(folder):
        merge(config, run)
    return folder


def _write_folder(config: RunConfig, run: RunDir, source: Source, file: Path, wanted: str) -> Exported:
    require_space(file.parent, file_bytes(source, wanted), "the GGUF file")
    tokenizer = source.tokenizer
    template, system = ollama.template_in_go(tokenizer, adds_bos=source.adds_bos), config.data.system_prompt
    stops = {tokenizer.eos_token_id, end_of_turn_id(tokenizer)} - {None}
    texts = [str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in sorted(stops)]
    bos = tokenizer.bos_token if beginning(tokenizer).of_text and not source.adds_bos else None
    writable = system if system and '"""' not in system else None
    with replacing_output(file.parent) as folder:
        counts = write(folder / file.name, source, wanted)
        text = ollama.modelfile(file.name, template, texts, writable)
        (folder / MODELFILE).write_text(text, encoding="utf-8")
        exported = Exported(
            dtype=wanted,
            tensors=counts,
            source=str(source.folder),
            template=template is not None,
            system_left_out=system != writable,
            adds_bos=source.adds_bos,
            bos_of_texts=bos,
        )
        run.write_json(folder / EXPORT_INFO, vars(exported))
    return exported


def _report(name: str, file: Path, size: int, exported: Exported) -> None:
    say, modelfile = console().print, file.with_name(MODELFILE)
    parts = [f"exported: {exported.dtype}", format_bytes(size)]
    for kind, count in exported.tensors.items():
        if kind not in (exported.dtype.upper(), "F32"):
            parts.append(f"{count} matrices in {kind}")
    say(f"{', '.join(parts)}; llama.cpp loads the file as it is", style="bold")
    if not exported.template:
        say(
            f"{modelfile} has no TEMPLATE: SFT-Play writes one for the chat templates plain and chatml only, "
            "and Ollama recognizes only some of those inside GGUF files: compare its prompts",
            style="yellow",
        )
    if exported.system_left_out:
        say(f'{modelfile} has no SYSTEM: data.system_prompt contains """', style="yellow")
    if bos := exported.bos_of_texts:
        say(
            f"the file adds no {bos}, because chats did not begin with it in training: add it yourself to a "
            "prompt that is not a chat",
            style="yellow",
        )
    command = f"ollama create {shlex.quote(name)} -f {shlex.quote(str(modelfile))}"
    say(ending({"gguf": file, "Modelfile": modelfile}, [command]))
