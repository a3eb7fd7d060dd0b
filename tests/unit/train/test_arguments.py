import pytest

from sft_play.train.arguments import ddp_bucket_mib
from sft_play.units import GIB, MIB


@pytest.mark.parametrize(
    ("gradient_bytes", "mib"), [(0, 1), (10 * MIB, 1), (160 * MIB, 10), (1 * GIB, 64), (28 * GIB, 100)]
)  # adapters of a toy, of a 1B and an 8B model; all weights of a 0.3B and a 7B model
def test_buckets_leave_little_to_send_at_the_end(gradient_bytes, mib):
    assert ddp_bucket_mib(gradient_bytes) == mib
