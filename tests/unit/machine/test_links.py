"""What a link can be where nobody has measured it."""

from dataclasses import replace

import pytest

from sft_play.machine.gpus import what_if
from sft_play.machine.links import UNKNOWN_PCIE, host_link, links_of

PCIE4, PCIE5 = 16 * 2e9, 16 * 4e9  # bytes a second of 16 lanes


@pytest.mark.parametrize(
    ("name", "count", "slowest", "fastest", "either"),
    [
        ("H100 80GB", 8, 450e9, 450e9, ""),
        ("B300", 8, 900e9, 900e9, ""),
        ("RTX 3090", 2, 0.18 * PCIE4 / 2, 56.25e9, "with an NVLink bridge, or through RAM over PCIe 4.0 x 8"),
        ("RTX 3090", 4, 0.18 * PCIE4 / 2, 0.55 * PCIE4, "through RAM over PCIe 4.0 x 16, or x 8"),
        ("RTX 4090", 2, 0.18 * PCIE4 / 2, 0.55 * PCIE4, "through RAM over PCIe 4.0 x 16, or x 8"),
        ("RTX 5090", 2, 0.18 * PCIE5 / 2, 0.55 * PCIE5, "through RAM over PCIe 5.0 x 16, or x 8"),
        ("RTX 6000 Ada", 2, 0.18 * PCIE4 / 2, 0.85 * PCIE4, "over PCIe 4.0 x 16, or through RAM over PCIe 4.0 x 8"),
        ("H100 PCIe", 8, 0.18 * PCIE5 / 2, 0.85 * PCIE5, "over PCIe 5.0 x 16, or through RAM over PCIe 5.0 x 8"),
    ],
)  # fmt: skip
def test_a_link_is_what_a_card_is_known_to_have_at_best_and_at_worst(name, count, slowest, fastest, either):
    [found] = links_of(what_if(name, count), count)
    assert found == (pytest.approx(slowest), pytest.approx(fastest), either)


def test_what_the_driver_reports_leaves_less_open():
    """The lanes, and whether there is a bridge."""
    machine = what_if("RTX 3090", 2)

    def here(link):
        gpus = tuple(replace(gpu, link=link, bridge=None) for gpu in machine.gpus)
        return replace(machine, gpus=gpus, what_if=False)

    assert links_of(here("NVLink x 4"), 2) == ((56.25e9, 56.25e9, ""),)
    [lanes] = links_of(here("PCIe 4.0 x 8"), 2)
    assert (lanes.slowest, lanes.fastest) == pytest.approx((0.18 * PCIE4 / 2, 0.55 * PCIE4 / 2))
    assert lanes.either == ""
    assert host_link(here("PCIe 4.0 x 8")) == (0.85 * PCIE4 / 2, 0.85 * PCIE4 / 2, "")


def test_a_gpu_of_which_nothing_is_known_has_any_pcie():
    machine = what_if("RTX 4090", 2)
    gpus = tuple(replace(gpu, link=None, compute_capability=None) for gpu in machine.gpus)
    assert host_link(replace(machine, gpus=gpus)).either == "to RAM over {1}, or over {0}".format(
        *UNKNOWN_PCIE
    )


def test_between_machines_the_slower_of_network_and_link_counts():
    [network] = links_of(what_if("RTX 4090", 16), 16)
    assert network.slowest == 1.25e9 and "between machines" in network.either
    [dgx] = links_of(what_if("H100 80GB", 16), 16)
    assert dgx == (50e9, 50e9, "")
    assert [link.fastest for link in links_of(what_if("H100 80GB", 16), 16, replicas=2)] == [450e9, 50e9]


def test_cpus_have_none():
    assert links_of(replace(what_if("T4"), gpus=()), 2) == ()


@pytest.mark.parametrize("name", ["RTX 3060", "A100 80GB"])
@pytest.mark.parametrize(
    ("link", "lane"),
    [("PCIe 1.0 x 1", 0.25e9), ("PCIe 2.0 x 16", 8e9), ("PCIe 6.0 x 16", 128e9), ("PCIe 9.0 x 16", None)],
)
def test_a_link_that_is_old_or_new_has_a_rate_too(name, link, lane):
    machine = what_if(name, 2)
    gpus = tuple(replace(gpu, link=link, host_link=None, bridge=None) for gpu in machine.gpus)
    machine = replace(machine, gpus=gpus, what_if=False)
    ((slowest, fastest, either),) = links_of(machine, 2)
    to_ram = host_link(machine)
    assert 0 < slowest <= fastest and 0 < to_ram.slowest <= to_ram.fastest
    assert lane is None or to_ram.slowest == pytest.approx(0.85 * lane)
    assert "9.0" not in either  # a generation that nobody knows: that of such GPUs is taken
