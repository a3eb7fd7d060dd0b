import json

import pytest

from sft_play.config.schema import RunConfig
from sft_play.engines.deepspeed import OF_STAGE, config_file, configuration
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError
from tests.plans import plan_with
from tests.unit.train.plans import PLAN


@pytest.mark.parametrize("stage", OF_STAGE)
def test_the_shipped_file_is_the_config_of_a_run(stage):
    assert json.loads(config_file(stage).read_text()) == configuration(stage)


def test_buckets_are_no_larger_than_what_is_trained():
    zero = configuration(2, 1000)["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"], zero["stage"]) == (1000, 1000, 2)
    assert not zero["overlap_comm"]  # there is nothing to overlap with, and it would cost a second bucket
    assert (
        configuration(2, 10**12) == configuration(2) and configuration(2)["zero_optimization"]["overlap_comm"]
    )


def test_what_bitsandbytes_cannot_count_is_refused():
    """8B on two processes: its kernels would be given a negative number of elements."""
    run = {"model": {"name": "x"}, "data": {"train_path": "x"}, "train": {"optimizer": "adamw_8bit"}}
    config, engine = RunConfig.model_validate(run), engine_of("deepspeed_z2")

    def arguments(processes: int, config: RunConfig = config) -> dict:
        plan = plan_with(PLAN, world_size=processes, engine=engine.name)
        return engine.trainer_arguments(config, plan, trained_parameters=8_030_261_248, shared=True)

    with pytest.raises(
        ConfigError, match=r"2,147,483,647 elements at once.*on 2 processes each has 4,015,130,624 .*4 pro"
    ):
        arguments(2)
    assert arguments(4) and arguments(2, config.changed({"train.optimizer": "adamw"}))
