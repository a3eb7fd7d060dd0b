"""What is asked of the planner: a run, its rows and its machines.

Fewer or other GPUs, groups of processes, another method or length of rows: each is a changed request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.machine.catalogue import LARGEST_MACHINE
from sft_play.machine.gpus import Machine, with_gpus
from sft_play.parts import Sharing
from sft_play.plan import Device
from sft_play.planning.budget import memory_device, training_device
from sft_play.planning.candidates.batch import batch_for
from sft_play.planning.rows.facts import DataFacts
from sft_play.sizing.estimate.budget import DeviceBudget
from sft_play.sizing.facts.architecture import Architecture

Settings = Mapping[str, Any]  # by their dotted names
UNCHANGED: Settings = MappingProxyType({})


@dataclass(frozen=True)
class Request:
    """A run to be planned."""

    config: RunConfig
    architecture: Architecture
    facts: DataFacts  # of the training rows
    machine: Machine
    processes: int
    machines: int | None = None  # like this one, that they are on; None: as `on_machines` says
    budget_bytes: int | None = None  # of each process; None: from the machine's free memory

    @property
    def device(self) -> Device:
        """What each process trains on."""
        return training_device(self.machine)

    @property
    def on_machines(self) -> int:
        """Number of machines: as many as are said, or this one.

        Of GPUs elsewhere the fewest with up to eight each, and equally many, as a launch needs them.
        """
        if self.machines or not self.machine.what_if:
            return self.machines or 1
        fewest = -(-self.processes // LARGEST_MACHINE)
        return next(n for n in range(fewest, self.processes + 1) if self.processes % n == 0)

    @property
    def budget(self) -> DeviceBudget | None:
        """The memory of each process; None if nothing tells how much is free.

        Raises:
            ConfigError: parallel.memory_gib exceeds the memory of the device.
        """
        return memory_device(self.config, self.machine, self.processes, self.budget_bytes)

    def changed(self, settings: Settings = UNCHANGED, **fields: Any) -> "Request":
        """The request with other settings, by their dotted names, and other fields.

        Of its rows, those that are too long for another model.max_seq_len are cut or left out.

        Raises:
            ConfigError: that is to be done with rows with images.
        """
        changed = replace(self, config=self.config.changed(settings), **fields)
        longest = settings.get("model.max_seq_len")
        if longest is None:
            return changed
        return replace(changed, facts=_with_shorter_rows(changed.facts, longest, changed.config))

    def in_groups_of(self, ranks: int) -> "Request":
        """The request with groups of so many processes that divide the tokens of micro-batches."""
        return self.changed({"parallel.sequence_parallel_size": ranks})

    def in_groups_as(self, sharing: Sharing) -> "Request":
        """The request with the groups of a plan."""
        return self.in_groups_of(sharing.sequence_ranks)

    def with_offload(self, place: str) -> "Request":
        """The request that keeps what it can in this place, or nowhere, unless its config says where."""
        return self.changed({"parallel.offload": place}) if self.config.parallel.offload == "auto" else self

    def with_batch_for(self, processes: int) -> "Request":
        """The request with an effective batch of a row or more for each of so many processes, or groups."""
        train, count = self.config.train, self.config.parallel.divided(processes)
        batch = batch_for(train, count, self.facts.longest_row if train.packing else 1)
        return self if batch is None else self.changed({"train.effective_batch_size": batch})

    def on_gpus(self, count: int) -> "Request":
        """The request on so many GPUs like the first one, on machines of eight."""
        return replace(self, machine=with_gpus(self.machine, count), processes=count, machines=None)


def _with_shorter_rows(facts: DataFacts, longest: int, config: RunConfig) -> DataFacts:
    """The facts of rows of at most so many tokens; packed sequences are taken to stay as many."""
    if not facts.seen:
        return DataFacts.full_rows(longest, facts.seed)
    facts.pictures.require_none("rows with images are planned as long as they are")
    kept = facts.lengths <= longest
    if config.train.packing or config.data.overlong != "drop" or facts.shares or not kept.any():
        kept = np.ones_like(kept)
    cut = partial(np.minimum, longest)
    lengths, supervised = cut(facts.lengths[kept]), cut(facts.supervised[kept])
    return replace(
        facts,
        lengths=lengths,
        supervised=supervised,
        longest_row=longest if config.train.packing else int(lengths.max()),
        mean_tokens=float(lengths.mean()),
        mean_squared_tokens=float((lengths.astype(float) ** 2).mean()),
        eval_lengths=None if facts.eval_lengths is None else cut(facts.eval_lengths),
        eval_supervised=None if facts.eval_supervised is None else cut(facts.eval_supervised),
        parts=None if facts.parts is None else cut(facts.parts),
    )
