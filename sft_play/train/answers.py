"""Answers before and after training, by the processes that hold the parts of a divided model.

A forward pass gathers the model unit by unit, so all processes answer the same prompts and take the same
tokens. One that runs out of memory goes on gathering for the others until the pass ends, and says so then.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule

from sft_play.errors import DoesNotFitError
from sft_play.model.attention_choice import generation_attention
from sft_play.model.attention_table import NAME
from sft_play.model.generation import Answer, generate, generate_answers
from sft_play.model.weights import release_memory
from sft_play.runlog import RunDir
from sft_play.train.recovery import is_out_of_memory
from sft_play.train.session import Session
from sft_play.ui.console import warn


def answers_of(session: Session, prompts: Sequence[Sequence[int]], name: str) -> list[Answer] | None:
    """Greedy answers of the model as it is now; all processes call it, and nothing of the training changes.

    Args:
        session: whose engine divides weights.
        prompts: the same in all processes; without any, nothing is done.
        name: of the model, for the progress bar.

    Returns:
        None if there are no prompts, or the processes have no memory for a single one.
    """
    if not prompts:
        return None
    trainer, settings = session.trainer, session.job.config.eval
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    together = Together(model, reshard_after_forward=session.job.plan.sharing.reshard_after_forward)
    try:
        with _answering(session, model), trainer.compute_loss_context_manager():
            return generate_answers(
                model,
                session.job.tokenizer,
                prompts,
                max_new_tokens=settings.max_new_tokens,
                batch_size=settings.rows_answered_together,
                description=f"{name}: answering",
                generate=together.generate,
            )
    except DoesNotFitError as error:
        warn(f"no answers are compared: {str(error).splitlines()[0]}")
        return None


@contextmanager
def _answering(session: Session, model: Any) -> Iterator[None]:
    """In the block, the model is in eval mode, and its attention works with a cache."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    attention, was_training = base.config._attn_implementation, model.training
    model.eval()
    if session.job.plan.attention == NAME:
        base.config._attn_implementation = generation_attention(session.job.architecture)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        base.config._attn_implementation = attention
        model.train(was_training)


class Together:
    """Generation with a model that `fully_shard` has divided, in step with the other processes."""

    def __init__(self, model: Any, *, reshard_after_forward: bool = True) -> None:
        """Units are gathered in the order of a forward pass: the whole model first, then the embedding."""
        self._whole, *inner = (module for module in model.modules() if isinstance(module, FSDPModule))
        inner.sort(key=lambda unit: not isinstance(unit, torch.nn.Embedding))
        self._units: list[Any] = [self._whole, *inner]
        self._reshard_after_forward = reshard_after_forward  # in training
        self._gathered: set[torch.nn.Module] = set()  # in the pass under way
        self._ran_out = False

    def generate(
        self, model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
    ) -> list[list[int]]:
        """As `model.generation.generate`, greedily; all processes call it with the same prompts.

        Raises:
            OutOfMemoryError: in all processes, if memory has run out in one.
        """
        self._ran_out = False
        self._gathered.clear()
        # else what is gathered could not be resharded in the midst of a pass
        self._whole.set_reshard_after_forward(True)
        hooks = [unit.register_forward_pre_hook(self._note) for unit in self._units]  # after torch's own
        new = None
        try:
            new = generate(
                model,
                tokenizer,
                prompts,
                max_new_tokens=max_new_tokens,
                logits_processor=[self._take_tokens_of_first],
                stopping_criteria=[self._stop],
                synced_gpus=False,
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        finally:
            for hook in hooks:
                hook.remove()
        if new is None:  # not in the handler, whose traceback keeps the tensors of the pass alive
            release_memory()
            self._gather_the_rest()
            self._agree(torch.zeros(len(prompts), dtype=torch.long, device=model.device), ran_out=True)
        self._whole.reshard()  # as the others have done
        if self._ran_out:
            self._pass_over_one_token(model)
        self._whole.set_reshard_after_forward(self._reshard_after_forward)
        self._whole.set_reshard_after_forward(False, recurse=False)  # as torch has it
        if new is None or self._ran_out:
            raise torch.OutOfMemoryError("a process ran out of memory.")
        return new

    def _note(self, unit: torch.nn.Module, inputs: Any) -> None:
        self._gathered.add(unit)

    def _take_tokens_of_first(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Ends a pass: makes the next tokens of the first process, [rows], the best of [rows, vocabulary].

        Processes on other devices may round to other tokens, and would end at another one.
        """
        tokens = self._agree(scores.argmax(-1), ran_out=False)
        scores[torch.arange(len(tokens), device=scores.device), tokens] = torch.inf
        return scores

    def _stop(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Whether each of the rows, [rows], is to end here."""
        return torch.full((len(ids),), self._ran_out, device=ids.device)

    def _agree(self, tokens: torch.Tensor, *, ran_out: bool) -> torch.Tensor:
        """The tokens of the first process, [rows]; all hear whether memory ran out in one."""
        own = tokens if distributed.get_rank() == 0 else torch.zeros_like(tokens)
        said = torch.cat([own.new_tensor([int(ran_out)]), own])
        distributed.all_reduce(said, op=distributed.ReduceOp.MAX)
        self._ran_out = bool(said[0])
        self._gathered.clear()
        return said[1:]

    def _gather_the_rest(self) -> None:
        """Takes part in what is left of the pass that the other processes are in."""
        for unit in self._units:
            if unit not in self._gathered:
                unit.unshard()
            if unit is not self._whole:
                unit.reshard()

    def _pass_over_one_token(self, model: Any) -> None:
        """FSDP2 takes a pass that an error has ended for one that goes on until another one ends."""
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)


def hand_over(run: RunDir, before: list[Answer] | None, after: list[Answer] | None) -> None:
    """Writes the answers for the command that started the processes; an earlier run's are removed."""
    run.answers.unlink(missing_ok=True)
    if before is not None and after is not None:
        run.write_json(run.answers, {"before": _as_json(before), "after": _as_json(after)})


def _as_json(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [asdict(answer) for answer in answers]


def handed_over(run: RunDir) -> tuple[list[Answer], list[Answer]] | None:
    """The answers before and after training; None if there are none."""
    if not run.answers.exists():
        return None
    tree = json.loads(run.answers.read_text(encoding="utf-8"))
    before, after = (_from_trees(tree[when]) for when in ("before", "after"))
    return before, after


def _from_trees(answers: list[dict[str, Any]]) -> list[Answer]:
    return [Answer(**answer) for answer in answers]
