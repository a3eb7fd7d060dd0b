import json

import pytest

from sft_play.engines.deepspeed import OF_STAGE, config_file, configuration


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
