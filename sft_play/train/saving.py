"""The weights that a run leaves: saved in the type of the base, and scored as they are saved.

A whole model may be trained in a wider type than its base has. Each process rounds its part of the weights in
place, so what is scored, what the processes answer with and what is written are the same weights.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sft_play.engines.registry import engine_of
from sft_play.engines.stored import part_of, type_of
from sft_play.fingerprints import installed_versions
from sft_play.manifest import CARD, replacing
from sft_play.model.adapters.decomposition import save_trained
from sft_play.model.generation import unknown_stops
from sft_play.model.weights.files import copy_processors
from sft_play.train.nonfinite import check_weights
from sft_play.train.ranks import from_all
from sft_play.train.session import Session
from sft_play.ui.progress import spinner
from sft_play.upstream.transformers import types_apart

Types = Mapping[str, torch.dtype]  # name of a weight -> the type to save it in


@dataclass(frozen=True)
class SavedType:
    """The type of the weights of a saved model."""

    dtype: str
    asked: str  # output.dtype, or what auto stands for; another type if a weight overflowed it
    of_base: bool  # whether it was asked for as that of the base


@dataclass(frozen=True)
class Saved:
    """What a run has left."""

    type: SavedType | None = None  # None for an adapter
    scores: dict[str, float] | None = None  # of what was rounded, on the validation rows


def facts_of_weights(session: Session, saved: Saved | None) -> dict[str, object]:
    """For summary.json: whether weights were saved, in which type, and the `unknown_stops` of an adapter."""
    job, trainer = session.job, session.trainer
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return {
        "trained": saved is not None,
        "saved": asdict(saved.type) if saved and saved.type else None,
        "stop_tokens": {} if job.config.tuning.mode == "full" else unknown_stops(model, job.tokenizer),
    }


def save(session: Session) -> Saved:
    """Writes the trained weights and the tokenizer on the main rank; all ranks call it.

    Afterwards, the weights in memory have the values of those that were saved.

    Raises:
        NonFiniteError: a trained weight is NaN or infinite.
    """
    trainer, job = session.trainer, session.job
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    trainer.optimizer.eval()  # type: ignore[union-attr]  # the average, if it has one
    check_weights(model)
    found: SavedType | None = None
    types: Types = {}
    scores: dict[str, float] | None = None
    if session.saved_dtype:
        found = _type_that_holds(session, model)
        types = _types(model, found.dtype)
        if any(from_all(_round(model, types))) and trainer.eval_dataset is not None:
            with spinner(f"scoring the weights in {found.dtype}, as they are saved"):
                score = trainer.score()
            scores = {"loss": score.loss, "token_accuracy": score.accuracy}
    weights = engine_of(job.plan.sharing.engine).full_weights(model, types)  # all ranks take part
    if trainer.accelerator.is_main_process:
        _write(session, model, weights, found.dtype if types and found else None)
    return Saved(found, scores)


def _type_that_holds(session: Session, model: torch.nn.Module) -> SavedType:
    """The type that is asked for, unless a weight overflows it in a process: then float32."""
    asked = str(from_all(session.saved_dtype)[0])
    types = _types(model, asked)
    overflows = any(
        not part.to(types[name]).isfinite().all() for name, part in _parts(model) if name in types
    )
    chosen = "float32" if any(from_all(overflows)) else asked
    return SavedType(chosen, asked, of_base=session.job.config.output.dtype == "auto")


def _types(model: torch.nn.Module, dtype: str) -> Types:
    """The types of weights that have another one in memory; an architecture may want some in fp32."""
    wanted = getattr(torch, dtype)
    others = types_apart(model, wanted)
    types = {name: type_of(name, wanted, others) for name, _ in _parts(model)}
    return {name: types[name] for name, part in _parts(model) if part.dtype != types[name]}


def _parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What this process holds of each parameter, by all of its names; any shape."""
    for name, value in model.named_parameters(remove_duplicate=False):
        if value.is_floating_point():
            yield name, part_of(value).detach()


@torch.no_grad()
def _round(model: torch.nn.Module, types: Types) -> bool:
    """Rounds this process's part of the weights to these types, in place; returns whether one has changed."""
    changed = False
    for name, part in _parts(model):
        if name not in types:
            continue
        rounded = part.to(types[name]).to(part.dtype)
        if not torch.equal(rounded, part):  # those that are frozen may be mapped from the files of the base
            part.copy_(rounded)
            changed = True
    return changed


def _write(session: Session, model: Any, weights: dict[str, torch.Tensor] | None, dtype: str | None) -> None:
    """Writes the folder of the run's weights; `dtype` if it is another one than in memory."""
    trainer, job = session.trainer, session.job
    facts = {
        "step": trainer.state.global_step,
        "versions": installed_versions(),
        "new_tokens": list(job.config.model.new_tokens),
        "rope_scaling": job.config.model.model_dump()["rope_scaling"],
    }
    target = job.run.model if job.config.tuning.mode == "full" else job.run.adapter
    with replacing(target, facts) as folder:
        save_trained(model, folder, weights)
        if dtype:
            _say_type(folder / "config.json", dtype)
        job.tokenizer.save_pretrained(str(folder))
        if target == job.run.model:
            copy_processors(job.config.model, job.architecture, folder)
        (folder / CARD).unlink(missing_ok=True)  # PEFT's has nothing but placeholders; ours comes at the end


def _say_type(file: Path, dtype: str) -> None:
    """Writes the type of saved weights into their config and its parts, which have that in memory."""
    tree = json.loads(file.read_text(encoding="utf-8"))
    for part in (tree, *(value for value in tree.values() if isinstance(value, dict))):
        if "dtype" in part:
            part["dtype"] = dtype
    file.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")
