import json

import pytest
import yaml

from sft_play.engines.deepspeed import config_file as deepspeed_file
from sft_play.errors import ConfigError
from sft_play.launch import accelerate
from sft_play.launch.accelerate import launch_command, launch_environment
from sft_play.launch.accelerate_config import CONFIGS, config_file
from sft_play.launch.nodes import ALONE, Nodes

SCRIPT = ["train.py", "--config", "run.yaml"]


def flags(launch) -> dict[str, str]:
    argv = launch.argv[launch.argv.index("accelerate.commands.launch") + 1 : launch.argv.index("train.py")]
    return dict(zip(argv[::2], argv[1::2], strict=True))


@pytest.mark.parametrize(
    ("engine", "device", "nodes", "name"),
    [
        ("none", "cuda", 1, "single_gpu"),
        ("none", "cpu", 1, "single_gpu"),
        ("ddp", "cuda", 1, "ddp"),
        ("ddp", "cpu", 1, "ddp_cpu"),
        ("ddp", "cuda", 2, "ddp_multi_node"),
        ("ddp", "cpu", 2, "ddp_multi_node"),
        ("deepspeed_z2", "cuda", 1, "zero2"),
        ("deepspeed_z2", "cpu", 1, "zero2_cpu"),
        ("deepspeed_z2", "cuda", 2, "zero2_multi_node"),
        ("deepspeed_z3", "cuda", 1, "zero3"),
        ("deepspeed_z3", "cpu", 1, "zero3_cpu"),
        ("deepspeed_z3", "cuda", 2, "zero3_multi_node"),
    ],
)
def test_every_engine_has_its_config_file(engine, device, nodes, name):
    assert config_file(engine, device, nodes) == CONFIGS / f"{name}.yaml"
    assert config_file(engine, device, nodes).is_file()


def test_the_shipped_configs_are_the_ten_that_are_named():
    assert len(list(CONFIGS.glob("*.yaml"))) == 10


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_says_what_it_is_for_and_leaves_the_numbers_to_the_command_line(path):
    text = path.read_text()
    tree = yaml.safe_load(text)
    assert (
        text.startswith("# accelerate: ")
        and "# Use: accelerate launch --config_file configs/accelerate/" + path.name in text
    )
    several = tree["distributed_type"] != "NO"
    assert tree["num_processes"] == (-1 if several else 1)
    assert tree["use_cpu"] == ("cpu" in path.stem)
    assert tree["gpu_ids"] == "all"  # accelerate would put another value in the place of CUDA_VISIBLE_DEVICES
    zero = tree["distributed_type"] == "DEEPSPEED"
    assert zero == path.stem.startswith("zero") == ("deepspeed_config" in tree)
    assert ("mixed_precision" in tree) != zero  # accelerate refuses both
    if zero:
        given = CONFIGS.parents[1] / tree["deepspeed_config"]["deepspeed_config_file"]
        assert given == deepspeed_file(int(path.stem[4]))


def test_one_machine_gets_a_free_port_and_a_store_on_loopback():
    launch = launch_command(SCRIPT, engine="ddp", device="cpu", processes=2, cores=8)
    assert flags(launch) == {
        "--config_file": str(CONFIGS / "ddp_cpu.yaml"),
        "--num_processes": "2",
        "--num_machines": "1",
        "--num_cpu_threads_per_process": "4",
        "--main_process_port": "0",
        "--rdzv_backend": "loopback",
    }
    assert launch.argv[-3:] == tuple(SCRIPT) and launch.script == "train.py"


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_is_given_the_full_path_of_its_json(stage):
    launch = launch_command(SCRIPT, engine=f"deepspeed_z{stage}", device="cuda", processes=4)
    assert flags(launch)["--deepspeed_config_file"] == str(deepspeed_file(stage))
    assert "--num_cpu_threads_per_process" not in flags(launch)


def test_several_machines_get_the_address_of_the_first():
    nodes = Nodes(count=2, rank=1, main_address="10.0.0.1", main_port=29500)
    found = flags(launch_command(SCRIPT, engine="ddp", device="cuda", processes=8, cores=16, nodes=nodes))
    assert (found["--main_process_ip"], found["--main_process_port"], found["--machine_rank"]) == (
        "10.0.0.1",
        "29500",
        "1",
    )
    assert found["--num_cpu_threads_per_process"] == "4" and "--rdzv_backend" not in found


@pytest.mark.parametrize(("processes", "nodes"), [(0, ALONE), (3, Nodes(count=2))])
def test_processes_that_cannot_be_shared_out_are_refused(processes, nodes):
    with pytest.raises(ConfigError):
        launch_command(SCRIPT, engine="ddp", device="cuda", processes=processes, nodes=nodes)


def test_the_environment_hides_gpus_from_a_cpu_run_and_names_the_interface_to_listen_on():
    one = launch_environment("cpu", 2, "lo")
    assert (one["CUDA_VISIBLE_DEVICES"], one["GLOO_SOCKET_IFNAME"], one["NCCL_SOCKET_IFNAME"]) == (
        "",
        "lo",
        "lo",
    )
    assert "ACCELERATE_USE_CPU" not in one  # would switch DeepSpeed off
    many = launch_environment("cuda", 8, None)
    assert "CUDA_VISIBLE_DEVICES" not in many and "GLOO_SOCKET_IFNAME" not in many


def test_what_the_user_has_set_stays_but_for_what_keeps_the_world_whole(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    kept = accelerate._unset({"NCCL_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OTHER": "1"})
    assert kept == {"CUDA_VISIBLE_DEVICES": "", "OTHER": "1"}


@pytest.mark.parametrize("stage", [2, 3])
def test_the_shipped_deepspeed_file_leaves_to_the_trainer_what_the_trainer_knows(stage):
    tree = json.loads(deepspeed_file(stage).read_text())
    assert tree["zero_optimization"]["stage"] == stage
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        assert tree[key] == "auto"
