"""What the data, the model and the machine say, brought together."""

import pytest
from datasets import Dataset

from sft_play.config.schema import RunConfig
from sft_play.data.prepare import PreparedData
from sft_play.hardware import what_if
from sft_play.planning import DataFacts, memory_device, record_of
from sft_play.sizing.records import write_overhead
from sft_play.units import GIB, MIB
from tests.unit.train.plans import PLAN


def facts(rows: list[tuple[int, int]], tmp_path, *, packing: bool = False, val: list[int] | None = None) -> DataFacts:
    """Of rows given as (tokens, supervised tokens)."""
    config = RunConfig.model_validate(
        {"model": {"name": "m"}, "data": {"train_path": "t"}, "train": {"packing": packing, "effective_batch_size": 256}}
    )
    train = [{"length": n, "labels": [-100] * (n - learned) + [1] * learned} for n, learned in rows]
    validation = Dataset.from_list([{"length": n} for n in val]) if val else None
    data = PreparedData(Dataset.from_list(train), validation, None, max_seq_len=64, stats={}, cache_path=tmp_path)
    return DataFacts.of(data, config)


def test_padded_rows_are_as_long_as_the_longest_that_there_is(tmp_path):
    found = facts([(10, 8), (40, 20)], tmp_path, val=[25, 30])
    assert (found.rows, found.longest_row, found.longest_eval_row, found.mean_tokens) == (2, 40, 30, 25.0)
    assert found.supervised_share == 0.5  # the loss head sees at most 20 tokens a row


def test_packed_sequences_are_full_and_may_hold_only_rows_with_the_largest_share(tmp_path):
    found = facts([(10, 8), (40, 20)], tmp_path, packing=True)
    assert (found.rows, found.longest_row, found.longest_eval_row) == (1, 64, None)
    assert found.supervised_share == pytest.approx(0.8)


def test_what_an_earlier_probe_saw_beside_tensors_replaces_the_assumption(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    machine = what_if("A100 80GB", 2)
    assumed = memory_device(machine, 2)
    assert assumed.assumed == ("context", "communicator")
    write_overhead(machine.gpus[0].name, 2, 800 * MIB)
    measured = memory_device(machine, 2)
    assert measured.assumed == ()
    assert measured.budget_bytes - assumed.budget_bytes == assumed.context_bytes + assumed.communicator_bytes - 800 * MIB
    assert memory_device(machine, 1).assumed == ("context",)
    assert measured.budget_bytes < 80 * GIB


def test_a_record_belongs_to_a_model_and_a_kind_of_step(tiny_model):
    config = RunConfig.model_validate({"model": {"name": str(tiny_model)}, "data": {"train_path": "t"}})
    path, device = record_of(config, PLAN)
    assert path.suffix == ".json" and device
    other = RunConfig.model_validate({**config.model_dump(), "tuning": {"mode": "full"}})
    assert record_of(other, PLAN)[0] != path
