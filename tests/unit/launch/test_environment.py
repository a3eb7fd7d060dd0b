import pytest

from sft_play.errors import ConfigError
from sft_play.launch.environment import RankEnvironment

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "1"
}  # fmt: skip


def test_a_process_on_its_own_is_the_main_rank_of_a_world_of_one():
    ranks = RankEnvironment.read({})
    assert (
        ranks == RankEnvironment() and ranks.is_main and not ranks.spans_machines and not ranks.launched_by_us
    )


def test_what_torchrun_says_is_read_whole():
    ranks = RankEnvironment.read(TORCHRUN)
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (5, 8, 1, 4)
    assert ranks.spans_machines and not ranks.is_main


def test_a_launcher_that_does_not_name_the_processes_of_a_machine_has_one_machine():
    assert not RankEnvironment.read({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}).spans_machines
    assert (
        RankEnvironment.read({k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"}).local_world_size
        == 8
    )


@pytest.mark.parametrize("text", ["two", "0", "-1", ""])
def test_a_world_size_that_is_no_number_is_refused(text):
    with pytest.raises(ConfigError, match=f"WORLD_SIZE={text}: expected a whole number"):
        RankEnvironment.read({"WORLD_SIZE": text})


def test_a_world_without_its_companions_is_refused_with_their_names():
    with pytest.raises(ConfigError, match="RANK, MASTER_PORT not set: start all processes with torchrun"):
        RankEnvironment.read({"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "here"})


def test_a_world_smaller_than_asked_for_is_refused():
    RankEnvironment.read({**TORCHRUN, "SFT_PLAY_PROCESSES": "8"}).require_whole_world()
    with pytest.raises(ConfigError, match=r"2 processes were requested, but the launcher started 1"):
        RankEnvironment.read({"SFT_PLAY_PROCESSES": "2"}).require_whole_world()
