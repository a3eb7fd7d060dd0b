"""Does a step again in smaller micro-batches if memory runs out in it.

The loss of a step is a sum over its supervised tokens, so its gradients do not depend on how its rows are cut
into micro-batches. If memory runs out, gradients are cleared, random numbers are restored to the beginning of
the step, and each micro-batch that this rank has had in it is computed in twice as many pieces:

    micro-batches   [9, 2] [7, 4] [0, 5]        memory runs out in the second one
    in two pieces   [9] [2] [7] [4] [0] [5]     from the first one again

No other rank need take part, because ranks exchange gradients only in the last backward pass of a step. At
the end of the step, all ranks agree on the number of pieces for the rest of the run. A step is not done again
if memory ran out in that last backward pass, where some gradients may have been sent already; under ZeRO-2,
which exchanges gradients in each backward pass; or in the optimizer, where weights may have changed already.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sft_play.job import Job
from sft_play.plan import Plan
from sft_play.report.reasons import batch_sentence
from sft_play.runlog import console
from sft_play.train.memory_meter import MemoryMeter, release_unreferenced
from sft_play.train.out_of_memory import is_out_of_memory, remember
from sft_play.train.rows import MicroBatches, cut


class Cut:
    """Micro-batches, each cut into the same number of pieces: 1, until memory runs out."""

    def __init__(self, batches: MicroBatches, *, padding_free: bool) -> None:
        self._whole, self._padding_free = batches, padding_free
        self._cut, self.pieces = batches.dataset, 1

    def into(self, pieces: int) -> None:
        """Cuts each micro-batch into so many pieces; one with fewer rows gets fillers."""
        self._cut = cut(self._whole, pieces, padding_free=self._padding_free)
        self.pieces = pieces

    def halve(self) -> None:
        """Cuts each piece in two."""
        self.into(2 * self.pieces)

    def can_be_halved(self, number: int) -> bool:
        """Whether any piece of a micro-batch has more than one row."""
        return any(len(piece["rows"]) > 1 for piece in self.of(number))

    @property
    def largest_tokens(self) -> int:
        """Tokens of the largest piece."""
        return max(self._cut["tokens"])

    def of(self, number: int) -> list[dict[str, Any]]:
        """The pieces of a micro-batch."""
        first = number * self.pieces
        return [self._cut[place] for place in range(first, first + self.pieces)]


class Redo:
    """Computes the micro-batches of the steps, and again in smaller pieces if memory runs out."""

    def __init__(self, trainer: Any, job: Job, meter: MemoryMeter) -> None:
        """Starts with whole micro-batches.

        Args:
            trainer: a PlannedTrainer (session.py), about to start its first step.
            job: the run.
            meter: of memory.
        """
        self._trainer, self._job, self._meter = trainer, job, meter
        self.cut = Cut(trainer._rows, padding_free=job.plan.padding_free)
        evaluated = trainer._eval_rows or trainer._rows  # without validation rows, nothing is evaluated
        self.eval_cut = Cut(evaluated, padding_free=job.plan.padding_free)
        self.plan, self._agreed = job.plan, self.cut.pieces  # as all ranks cut it
        self.said: list[str] = []  # what was said about each time that memory ran out
        self.eval_times = 0  # that memory ran out in an evaluation, on this rank
        self._eval_said = 0
        self._step, self._done = -1, 0  # micro-batches of this rank that are done in the step
        self._phase, self._exchanges = "", False
        self._random: list[Tensor] = []

    def own_plan(self) -> Plan:
        """The plan as this rank cuts it, which the others may not know yet."""
        return cut_plan(self._job.plan, self.cut)

    def begin_phase(self, phase: str) -> None:
        """Notes whether a forward or a backward pass begins."""
        self._phase = phase

    def learn(self, model: Any, inputs: Any, learn: Callable[[Any], Tensor]) -> Tensor:
        """Computes the next micro-batch of a step; if memory runs out, all of it so far in smaller pieces.

        Args:
            model: as the engine wrapped it.
            inputs: of the micro-batch, from a collator.
            learn: a forward and a backward pass over such inputs; returns a share of the loss, a scalar.

        Returns:
            The share of the loss that the trainer has not counted yet.

        Raises:
            torch.OutOfMemoryError: memory ran out where nothing can be done again, or in a single row.
        """
        trainer = self._trainer
        if self._step != trainer.state.global_step:
            self._step, self._done = trainer.state.global_step, 0
            self._random = _random_states(trainer.args.device)
        first = self._done
        while True:
            try:
                share = self._passes(model, inputs, learn, first)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not self._can_begin_again():
                    raise
            # only here has the error let go of the activations
            self._begin_again(model)
            first = 0
        self._done += 1
        return share

    def _can_begin_again(self) -> bool:
        if self._trainer.is_deepspeed_enabled or (self._exchanges and self._phase == "backward"):
            return False
        return self.cut.can_be_halved(self._place(self._done))

    def _place(self, number: int) -> int:
        """Where a micro-batch of this rank's share of the step is among all of the run."""
        trainer = self._trainer
        ranks, accumulation = trainer.accelerator.num_processes, trainer.args.gradient_accumulation_steps
        return (self._step * accumulation + number) * ranks + trainer.accelerator.process_index

    def _passes(self, model: Any, inputs: Any, learn: Callable[[Any], Tensor], first: int) -> Tensor:
        """Learns from the micro-batches of the step from number `first` to the current one."""
        ddp = isinstance(model, DistributedDataParallel)
        shares = []
        for number in range(first, self._done + 1):
            for place, batch in enumerate(self._batches(inputs, number)):
                last = number == self._done and place == self.cut.pieces - 1
                with nullcontext() if last else self._trainer.accelerator.no_sync(model):
                    self._phase, self._exchanges = "", ddp and model.require_backward_grad_sync
                    shares.append(learn(batch))
        return shares[0] if len(shares) == 1 else torch.stack(shares).sum()

    def _batches(self, inputs: Any, number: int) -> Iterator[Any]:
        """The inputs of a micro-batch of this step, piece by piece."""
        if self.cut.pieces == 1:
            yield inputs
            return
        for piece in self.cut.of(self._place(number)):
            yield self._trainer._train_collator([piece])

    def _begin_again(self, model: Any) -> None:
        trainer = self._trainer
        self.cut.halve()
        model.zero_grad()
        trainer._tr_loss -= trainer._step_loss
        trainer._step_loss = 0.0
        release_unreferenced(trainer.args.device.type)
        _restore_random_states(self._random, trainer.args.device)

    def agree(self, pieces: int) -> None:
        """From the next step on, cuts as all ranks do; called after each step.

        Args:
            pieces: the highest number that any rank needed.
        """
        if pieces == self._agreed:
            return
        self._agreed = pieces
        if self.cut.pieces != pieces:
            self.cut.into(pieces)
        before, self.plan = self.plan, self.own_plan()
        self._say(
            f"memory ran out in step {self._trainer.state.global_step} at micro-batch "
            f"{before.micro_batch_size}; the step was done again in smaller ones, as are all that follow: "
            f"{batch_sentence(self.plan)}"
        )
        if self._job.ranks.is_main:
            remember(self._job, before, self._meter)
        if self._job.keeps_files:
            self._job.run.write_json(self._job.run.plan, self.plan.to_json())

    def _say(self, text: str) -> None:
        self.said.append(text)
        if self._job.ranks.is_main:
            console().print(f"  [yellow]{text}[/]")

    def score(self, number: int, batch: Any, score: Callable[[Any], Tensor]) -> Tensor:
        """The sums of an evaluation batch, [3]; in smaller pieces from when memory runs out.

        Ranks exchange nothing in between, so each cuts its batches as it needs to.

        Args:
            number: of the batch among those of all ranks.
            batch: its tensors.
            score: computes the sums of a batch.
        """
        while True:
            try:
                return self._score_pieces(number, batch, score)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not self.eval_cut.can_be_halved(number):
                    raise
            self.eval_cut.halve()
            self.eval_times += 1
            release_unreferenced(self._trainer.args.device.type)

    def _score_pieces(self, number: int, batch: Any, score: Callable[[Any], Tensor]) -> Tensor:
        if self.eval_cut.pieces == 1:
            return score(batch)
        pieces = self.eval_cut.of(number)
        return torch.stack([score(self._trainer._eval_collator([piece])) for piece in pieces]).sum(dim=0)

    def evaluated(self, times: int) -> None:
        """Says that memory ran out in an evaluation.

        Args:
            times: that it has run out so far in this run, over all ranks.
        """
        if times > self._eval_said:
            self._eval_said = times
            self._say("memory ran out in the evaluation; it goes on in smaller batches, with the same result")


def cut_plan(plan: Plan, cut: Cut) -> Plan:
    """The plan with its micro-batches cut; the effective batch stays."""
    if cut.pieces == 1:
        return plan
    accumulation = plan.gradient_accumulation_steps * cut.pieces
    rows = -(-plan.rows_per_step // (accumulation * plan.world_size))
    return replace(
        plan,
        micro_batch_size=rows * (plan.max_seq_len if plan.packing else 1),
        gradient_accumulation_steps=accumulation,
        micro_batch_tokens=cut.largest_tokens,
        why=(*plan.why, f"each micro-batch cut into {cut.pieces}, since memory ran out"),
    )


def _random_states(device: torch.device) -> list[Tensor]:
    """The states of the random number generators that a forward pass draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _restore_random_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
