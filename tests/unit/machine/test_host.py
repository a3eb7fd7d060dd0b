import psutil
import pytest

from sft_play.errors import ConfigError
from sft_play.machine.host import asked_threads, detect_host, oom_kills
from sft_play.units import GIB, MIB


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


@pytest.fixture
def root(tmp_path):
    write(tmp_path, proc__cpuinfo="model name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx512_bf16\n")
    return tmp_path


def test_without_groups_the_machine_itself_counts(root):
    host = detect_host(root)
    assert host.ram_total_bytes == psutil.virtual_memory().total and not host.ram_limited
    assert (host.cpu_model, host.cpu_bf16, host.ram_limit_text) == ("Some CPU @ 2 GHz", True, "")


def test_what_the_kernel_killed_for_lack_of_memory_is_counted(root):
    assert oom_kills(root) == 0
    write(root, proc__vmstat="pgfault 12\noom_kill 3\noom_kill_other 4\n")
    assert oom_kills(root) == 3


def test_an_unknown_cpu_is_none(tmp_path):
    host = detect_host(tmp_path)
    assert host.cpu_model is None and host.cpu_bf16 is None and host.cpu_cores >= 1


def test_cgroup_2_limits_the_memory_and_pages_that_can_be_dropped_are_free(root):
    group = {
        "sys__fs__cgroup__job__memoryDOTmax": GIB,
        "sys__fs__cgroup__job__memoryDOTcurrent": 512 * MIB,
        "sys__fs__cgroup__job__memoryDOTstat": f"anon 1\ninactive_file {256 * MIB}\n",
    }
    write(root, proc__self__cgroup="0::/job", **group)
    host = detect_host(root)
    assert (host.ram_total_bytes, host.ram_free_bytes, host.ram_limited) == (GIB, 768 * MIB, True)


def test_the_narrowest_group_around_this_one_decides(root):
    write(
        root,
        proc__self__cgroup="0::/outer/inner",
        sys__fs__cgroup__outer__memoryDOTmax=GIB,
        sys__fs__cgroup__outer__memoryDOTcurrent=900 * MIB,
        sys__fs__cgroup__outer__inner__memoryDOTmax="max",
        sys__fs__cgroup__outer__inner__memoryDOTcurrent=1,
    )
    assert detect_host(root).ram_free_bytes == GIB - 900 * MIB


def test_a_container_finds_its_group_at_the_top(root):
    write(
        root,
        proc__self__cgroup="0::/docker/0123",
        sys__fs__cgroup__memoryDOTmax=GIB,
        sys__fs__cgroup__memoryDOTcurrent=MIB,
    )
    assert detect_host(root).ram_total_bytes == GIB


def test_cgroup_1_is_read_too_and_its_huge_number_means_no_limit(root):
    write(
        root,
        proc__self__cgroup="4:memory:/job\n0::/",
        sys__fs__cgroup__memory__job__memoryDOTlimit_in_bytes=2 * GIB,
        sys__fs__cgroup__memory__job__memoryDOTusage_in_bytes=GIB,
        sys__fs__cgroup__memory__memoryDOTlimit_in_bytes=9223372036854771712,
        sys__fs__cgroup__memory__memoryDOTusage_in_bytes=3 * GIB,
    )
    host = detect_host(root)
    assert (host.ram_total_bytes, host.ram_free_bytes) == (2 * GIB, GIB)


@pytest.mark.parametrize(
    "files",
    [
        {"proc__self__cgroup": "0::/", "sys__fs__cgroup__cpuDOTmax": "150000 100000"},
        {
            "proc__self__cgroup": "3:cpu,cpuacct:/",
            "sys__fs__cgroup__cpu,cpuacct__cpuDOTcfs_quota_us": 50000,
            "sys__fs__cgroup__cpu,cpuacct__cpuDOTcfs_period_us": 100000,
        },
    ],
    ids=["cgroup 2", "cgroup 1"],
)
def test_a_cpu_quota_limits_the_cores(root, files):
    unlimited = detect_host(root).cpu_cores
    write(root, **files)
    assert detect_host(root).cpu_cores == min(unlimited, 2 if "0::/" in files.values() else 1)


@pytest.mark.parametrize(
    ("text", "threads"),
    [("4", 4), ("4,2", 4), (" 8 ", 8), ("1024", 1024), ("0", None), ("", None), ("two", None), ("-1", None)],
)
def test_the_threads_that_openmp_is_asked_for(text, threads):
    assert asked_threads({"OMP_NUM_THREADS": text}) == threads
    assert asked_threads({}) is None


@pytest.mark.parametrize("text", ["1025", "100000", "9" * 5000])
def test_more_threads_than_a_process_can_have_are_refused(text):
    """OpenMP ends with a segmentation fault."""
    with pytest.raises(ConfigError, match=rf"OMP_NUM_THREADS={text[:20]}: .* at most 1,024 .* usable core"):
        asked_threads({"OMP_NUM_THREADS": text})
