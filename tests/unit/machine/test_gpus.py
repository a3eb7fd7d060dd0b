import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from sft_play.errors import ConfigError
from sft_play.machine import catalogue, gpus
from sft_play.machine.gpus import GpuProcess, Machine, detect_host, memory_report, what_if
from sft_play.report.machine import gpu_info_table, memory_table
from sft_play.units import GIB, MIB

ENTRIES = yaml.safe_load(catalogue.SPECS_FILE.read_text())["gpus"]
NUMBERS = (
    "memory_mib",
    "compute_capability",
    "bf16_tflops",
    "fp16_tflops",
    "matmul_tflops",
    "bandwidth_gb_s",
    "link",
    "bridge",
    "host_link",
    "network_gb_s",
)


def test_there_are_facts_about_more_than_thirty_gpus_with_memory():
    assert sum(entry["memory_mib"] is not None for entry in ENTRIES) >= 30


def test_every_number_has_its_source_and_nothing_else_has():
    wrong = []
    for entry in ENTRIES:
        given = {key for key in NUMBERS if entry.get(key) is not None}
        wrong += [f"{entry['name']}: {key}: no source" for key in given - set(entry["sources"])]
        wrong += [f"{entry['name']}: {key}: no number" for key in set(entry["sources"]) - given]
        links = entry["sources"].items()
        wrong += [f"{entry['name']}: {key}: {url}" for key, url in links if not url.startswith("https://")]
    assert not wrong, "\n".join(wrong)


def test_bf16_follows_from_the_compute_capability():
    wrong = [
        entry["name"]
        for entry in ENTRIES
        if entry["bf16"] != (float(entry["compute_capability"]) >= 8)
        or (entry.get("bf16_tflops") and entry.get("fp16_tflops"))
    ]
    assert not wrong, wrong


def test_what_was_measured_is_less_than_the_data_sheet_says():
    measured = [entry for entry in ENTRIES if entry.get("matmul_tflops")]
    assert len(measured) >= 8
    assert all(0.7 < entry["matmul_tflops"] / entry["bf16_tflops"] < 0.9 for entry in measured)


def test_no_two_names_or_aliases_mean_the_same():
    words = [
        catalogue.model_words(name)
        for entry in ENTRIES
        for name in (entry["name"], *entry.get("aliases", []))
    ]
    assert len(set(words)) == len(words)


# what a driver or a person says -> the entry
SAID = {
    "NVIDIA GeForce RTX 4090": "NVIDIA GeForce RTX 4090",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "4090": "NVIDIA GeForce RTX 4090",
    "RTX 4090 24GB": "NVIDIA GeForce RTX 4090",
    "RTX 4090 48 GB": None,  # no such card: a wrong size is a wrong card
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 3070 Ti": "NVIDIA GeForce RTX 3070 Ti",
    "rtx 3070ti": "NVIDIA GeForce RTX 3070 Ti",
    "NVIDIA RTX A1000": None,  # nor an A100, nor anything else
    "NVIDIA RTX A6000": "NVIDIA RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "NVIDIA RTX 6000 Ada Generation",
    "Quadro RTX 6000": "Quadro RTX 6000",
    "NVIDIA L4": "NVIDIA L4",
    "NVIDIA L40": "NVIDIA L40",
    "NVIDIA L40S": "NVIDIA L40S",
    "NVIDIA A10": "NVIDIA A10",
    "NVIDIA A10G": "NVIDIA A10G",
    "NVIDIA A100-SXM4-40GB": "NVIDIA A100-SXM4-40GB",
    "NVIDIA A100 80GB PCIe": "NVIDIA A100 80GB PCIe",
    "A100": "NVIDIA A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3": "NVIDIA H100 80GB HBM3",
    "H100": "NVIDIA H100 80GB HBM3",
    "NVIDIA H100 PCIe": "NVIDIA H100 PCIe",
    "NVIDIA H100 NVL": "NVIDIA H100 NVL",
    "NVIDIA GH200 480GB": "NVIDIA GH200 480GB",
    "Tesla T4": "Tesla T4",
    "T4": "Tesla T4",
    "Tesla V100-SXM2-16GB": "Tesla V100-SXM2-16GB",
    "NVIDIA T400": None,
    "AMD Radeon RX 7900 XTX": None,
    "": None,
}


def test_device_strings_are_matched_by_whole_words():
    specs = {said: catalogue.find_specs(said) for said in SAID}
    found = {said: each.name if each else None for said, each in specs.items()}
    wrong = [f"{said!r} is {found[said]}, not {name}" for said, name in SAID.items() if found[said] != name]
    assert not wrong, "\n".join(wrong)


def test_a_what_if_machine_has_the_memory_that_the_driver_reports():
    machine = gpus.what_if("RTX 3090", 2)
    assert [gpu.total_bytes for gpu in machine.gpus] == [24576 * MIB] * 2
    assert machine.what_if and machine.gpus[0].bf16 and machine.gpus[0].tflops == 71
    turing = gpus.what_if("T4").gpus[0]
    assert (turing.bf16, turing.fp16, turing.tflops) == (False, True, 65)


def test_an_unknown_gpu_is_refused_with_the_nearest_names():
    with pytest.raises(ConfigError, match=r"RTX 4900.*closest: NVIDIA GeForce RTX 4090"):
        gpus.what_if("RTX 4900")
    assert catalogue.nearest_names("H100 SXM 94GB")[0].startswith("NVIDIA H100")


def test_memory_that_was_not_sourced_is_not_guessed():
    with pytest.raises(ConfigError, match="add memory_mib"):
        gpus.what_if("RTX 3080")


def test_no_machine_has_less_than_one_gpu():
    with pytest.raises(ConfigError, match="positive integer"):
        gpus.what_if("H100", 0)


class Driver:
    """Answers like nvidia-ml-py; what is not set is not supported by this card."""

    class NVMLError(Exception):
        pass

    def __init__(self, *devices, init_error=None):
        self.devices, self.init_error, self.closed = devices, init_error, False

    def nvmlInit(self):
        if self.init_error:
            raise self.NVMLError(self.init_error)

    def nvmlShutdown(self):
        self.closed = True

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.devices[index] is None:
            raise self.NVMLError("Insufficient Permissions")
        return self.devices[index]

    def nvmlSystemGetDriverVersion(self):
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 13000

    def __getattr__(self, function):
        def ask(device, *arguments):
            try:
                answer = device[function]
            except KeyError:
                raise self.NVMLError("Not Supported") from None
            return answer(*arguments) if callable(answer) else answer

        return ask


def card(uuid="GPU-aaaa", name="NVIDIA L40S", **answers):
    return {
        "nvmlDeviceGetName": name,
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=46068 * MIB, free=40000 * MIB),
        "nvmlDeviceGetCudaComputeCapability": (8, 9),
        "nvmlDeviceGetMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        **answers,
    }


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_gpu_is_described_as_the_driver_knows_it():
    process = SimpleNamespace(pid=1, usedGpuMemory=None)
    ours = SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 * MIB)
    driver = Driver(
        card(
            nvmlDeviceGetComputeRunningProcesses=[process, ours],
            nvmlDeviceGetGraphicsRunningProcesses=[process],
        )
    )
    machine = gpus.detect(driver)
    (gpu,) = machine.gpus
    assert (machine.driver, machine.cuda, driver.closed) == ("580.95.05", "13.0", True)
    assert (gpu.name, gpu.free_bytes, gpu.bf16, gpu.link, gpu.tflops) == (
        "NVIDIA L40S",
        40000 * MIB,
        True,
        "PCIe 4.0 x 16",
        362,
    )
    assert [other.pid for other in gpu.processes] == [1]  # named twice by the driver
    assert gpu.own_bytes == 5 * MIB


def test_nvlink_is_the_link_where_it_is_active():
    driver = Driver(card(nvmlDeviceGetNvLinkState=lambda link: int(link < 12)))
    assert gpus.detect(driver).gpus[0].link == "NVLink x 12"


@pytest.mark.parametrize(
    ("system", "said"), [("Linux", "no NVIDIA driver that works"), ("Darwin", "a Mac (MPS) is not used")]
)
def test_a_machine_without_a_driver_says_why_its_gpu_is_not_used(monkeypatch, system, said):
    class NVMLError(Exception):
        pass

    def fail():
        raise NVMLError("NVML Shared Library Not Found")

    monkeypatch.setattr(gpus.platform, "system", lambda: system)
    machine = gpus.detect(SimpleNamespace(nvmlInit=fail, NVMLError=NVMLError))
    assert not machine.gpus and said in machine.note


def test_what_a_driver_does_not_tell_is_not_available_rather_than_guessed():
    (gpu,) = gpus.detect(Driver({"nvmlDeviceGetName": "NVIDIA Thing"})).gpus
    unknown = (
        gpu.total_bytes,
        gpu.free_bytes,
        gpu.compute_capability,
        gpu.bf16,
        gpu.fp16,
        gpu.link,
        gpu.tflops,
    )
    assert set(unknown) == {None}
    text = printed(gpus.Machine(gpus=(gpu,), note="", host=gpus.detect_host()))
    (row,) = (line.split() for line in text.splitlines() if "NVIDIA Thing" in line)
    assert row[3:] == ["n/a"] * 6 and "driver n/a" in text


@pytest.mark.parametrize(
    ("setting", "uuids"),
    [
        (None, ["GPU-aaaa", "GPU-bbbb"]),
        ("1", ["GPU-bbbb"]),
        ("1,0", ["GPU-bbbb", "GPU-aaaa"]),
        ("GPU-bb", ["GPU-bbbb"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["GPU-aaaa"]),  # CUDA stops at the first that does not exist
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(monkeypatch, setting, uuids):
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    machine = gpus.detect(Driver(card(), card("GPU-bbbb")))
    assert [gpu.uuid for gpu in machine.gpus] == uuids
    assert [gpu.index for gpu in machine.gpus] == list(range(len(uuids)))
    assert bool(machine.note) == (len(uuids) < 2)


@pytest.mark.parametrize(("setting", "uuids"), [(None, ["GPU-aaaa", "GPU-bbbb"]), ("1", ["GPU-bbbb"])])
def test_gpus_that_the_control_group_of_a_job_denies_are_not_there(monkeypatch, setting, uuids):
    """SLURM's, with ConstrainDevices; CUDA numbers those that are left."""
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    machine = gpus.detect(Driver(None, card(), None, card("GPU-bbbb")))
    assert [gpu.uuid for gpu in machine.gpus] == uuids


def test_of_mig_instances_one_is_used_and_the_others_are_told_of(monkeypatch):
    memory = SimpleNamespace(total=20 * 1024 * MIB, free=19 * 1024 * MIB)
    name = "NVIDIA H100 80GB HBM3"
    instances = [
        {
            "nvmlDeviceGetName": f"{name} MIG 1g.20gb",
            "nvmlDeviceGetUUID": f"MIG-{i}",
            "nvmlDeviceGetMemoryInfo": memory,
        }
        for i in range(2)
    ]
    whole = card(
        name=name,
        nvmlDeviceGetMigMode=(1, 1),
        nvmlDeviceGetMaxMigDeviceCount=2,
        nvmlDeviceGetMigDeviceHandleByIndex=instances.__getitem__,
        nvmlDeviceGetCudaComputeCapability=(9, 0),
    )
    for instance in instances:
        instance["nvmlDeviceGetDeviceHandleFromMigDeviceHandle"] = whole
    machine = gpus.detect(Driver(whole))
    assert [gpu.uuid for gpu in machine.gpus] == ["MIG-0"] and "2 MIG instances" in machine.note
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    (gpu,) = gpus.detect(Driver(whole)).gpus
    assert (gpu.uuid, gpu.mig, gpu.bf16, gpu.tflops, gpu.free_bytes) == (
        "MIG-1",
        True,
        True,
        None,
        memory.free,
    )


def printed(machine) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(gpu_info_table(machine))
    return console.export_text()


def test_without_a_driver_the_cpu_and_the_ram_are_shown_instead():
    text = printed(gpus.detect(Driver(init_error="NVML Shared Library Not Found")))
    assert "No GPU found" in text and "NVML Shared Library Not Found" in text
    assert re.search(r"RAM: [\d,.]+ GiB free of [\d,.]+ GiB", text) and "usable cores" in text


def test_processes_stand_below_the_table_so_that_their_paths_stay_whole():
    user = gpus.GpuProcess(pid=4, name="/usr/lib/xorg/a-program-with-a-long-name", used_bytes=None)
    (gpu,) = gpus.what_if("H100", 1).gpus
    text = printed(gpus.Machine(gpus=(replace(gpu, processes=(user,)),), note="", host=gpus.detect_host()))
    assert "processes on GPU 0: 4 /usr/lib/xorg/a-program-with-a-long-name n/a" in text


def test_everything_can_be_printed_as_json():
    tree = json.loads(json.dumps(gpus.to_json(gpus.detect(Driver(card())))))
    assert tree["gpus"][0]["bf16"] is True and tree["host"]["cpu_cores"] >= 1


def test_gpu_info_loads_no_library_that_takes_seconds():
    code = (
        "import sys; from sft_play.cli import main; main(['gpu-info']);"
        "print({'torch', 'transformers', 'datasets'} & set(sys.modules) or 'none of them')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.endswith("none of them\n")


@pytest.mark.parametrize(
    ("link", "capability", "speed"),
    [
        ("NVLink x 18", (9, 0), 450),
        ("NVLink x 18", (10, 0), 900),
        ("NVLink x 12", (8, 0), 300),
        ("NVLink x 4", (8, 6), 56.25),
        ("NVLink x 4", (12, 9), None),
        ("PCIe 4.0 x 16", (8, 9), 32),
        ("PCIe 5.0 x 8", None, 32),
        ("PCIe 9.0 x 16", (8, 9), None),
        (None, (9, 0), None),
    ],
)
def test_the_speed_of_a_link_follows_from_what_it_is(link, capability, speed):
    assert catalogue.link_speed(link, capability) == speed


def test_machines_that_are_not_here_know_their_link_where_it_is_sourced():
    assert gpus.what_if("H100").gpus[0].link_gb_s == 450
    assert gpus.what_if("RTX 4090", 2).gpus[1].link == "PCIe 4.0 x 16"
    assert gpus.what_if("A10").gpus[0].link_gb_s is None
    links = yaml.safe_load(catalogue.SPECS_FILE.read_text())["links"]
    assert set(links["sources"]) == set(links) - {"sources"}


def test_the_fullest_gpu_decides_what_is_left():
    machine = what_if("H100", 2)
    busy = replace(machine.gpus[1], free_bytes=10 * GIB, processes=(GpuProcess(7, "python", 60 * GIB),))
    machine = replace(machine, gpus=(machine.gpus[0], busy))
    assert memory_report(machine)["left_per_process_bytes"] == 10 * GIB
    console = Console(width=100, record=True)
    console.print(memory_table(machine, 10 * GIB))
    text = console.export_text()
    assert "Available to a run on all GPUs: 10.00 GiB per GPU" in text and "7 python 60.00 GiB" in text
    assert "Available to one process: 79.65 GiB" in text


def test_without_a_gpu_the_ram_is_what_is_left():
    machine = Machine(gpus=(), note="no driver", host=detect_host())
    assert memory_report(machine)["left_per_process_bytes"] == machine.host.ram_free_bytes


def test_memory_that_the_driver_does_not_tell_leaves_the_answer_open():
    machine = what_if("H100")
    machine = replace(machine, gpus=(replace(machine.gpus[0], free_bytes=None),))
    assert memory_report(machine)["left_per_process_bytes"] is None
