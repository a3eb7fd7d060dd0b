"""How fast bytes leave a GPU: to another one, to RAM, to a disk, to another machine.

Where nobody has measured it, a data sheet says what a link can be, not what a machine has: a bridge that may
have been bought, PCIe with 16 lanes or 8. So a link is two rates, and what it is at each of them.
"""

from collections.abc import Iterable
from typing import NamedTuple

from sft_play.machine.catalogue import LARGEST_MACHINE, generation_of_pcie, link_speed
from sft_play.machine.gpus import Gpu, Machine

# Of the data sheet's PCIe: copies between two cards. 54 to 57 of 64 GB/s between RTX PRO 6000
# (github.com/voipmonitor/rtx6kpro, hardware/pcie-bandwidth.md), 26 of 32 in an all-reduce of four RTX 4090
# whose driver was changed to let them (github.com/tinygrad/open-gpu-kernel-modules/issues/36). Copies to RAM
# are taken to be as fast.
DIRECT = 0.85
# Through RAM, where all cards write and read at once: at best 35 of 64 GB/s (four RTX 5090; eight: 28;
# github.com/NVIDIA/nccl/issues/1639). At worst 18% of 8 lanes: 2.9 GB/s of two RTX 3090 whose FSDP gathered
# the 13.5 GB of a 7B model twice in 4.6 s (github.com/AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md).
THROUGH_RAM = (0.18, 0.55)
# GeForce cards may not read each other's memory over PCIe: 30 (github.com/NVIDIA/nccl/issues/1127), 40
# (purepc.pl, nvidia-geforce-rtx-4090-amerykanska-firma-potwierdza) and 50
# (github.com/tinygrad/open-gpu-kernel-modules/issues/29); NCCL goes through RAM.
NO_PEERS = "GeForce"
NETWORKS = (1.25, 12.5)  # GB/s of 10 and 100 Gbit/s, where the vendor's system says nothing


class LinkRange(NamedTuple):
    """Bytes per second in one direction that a link can have, and what it is: its best, or its worst."""

    slowest: float
    fastest: float
    either: str  # "with an NVLink bridge, or through RAM over PCIe 4.0 x 8"; "" where it is known


# SATA: 6 Gbit/s, of which 8 of 10 bits are data. NVMe: data sheets of drives on PCIe 4.0 x 4.
DISK = LinkRange(0.55e9, 7e9, "on an NVMe disk, or on one on SATA")


def links_of(machine: Machine, processes: int, replicas: int = 1) -> tuple[LinkRange, ...]:
    """The link from one device to another by the data sheet; () for CPUs.

    With several replicas of a divided model: inside a machine, and to another one.
    """
    if not machine.gpus:
        return ()
    inside = _slowest(_peer_link(gpu, processes // replicas, machine.what_if) for gpu in machine.gpus)
    if replicas == 1 and processes <= max(LARGEST_MACHINE, len(machine.gpus)):
        return (inside,)
    network = _slowest(_network(gpu) for gpu in machine.gpus)
    across = min(network, inside)  # a ring is as slow as its slowest link
    return (inside, across) if replicas > 1 else (across,)


def host_link(machine: Machine) -> LinkRange:
    """The link between a GPU and RAM, by the data sheet."""
    return _slowest(_host_link(gpu, machine.what_if) for gpu in machine.gpus)


def rate_of(link: LinkRange, best: bool) -> float:
    """Bytes per second of the link at its best, or at its worst."""
    return link.fastest if best else link.slowest


def _slowest(links: Iterable[LinkRange]) -> LinkRange:
    return min(links, key=lambda link: (link.slowest, link.fastest))


def _network(gpu: Gpu) -> LinkRange:
    if gpu.network_gb_s:
        return LinkRange(1e9 * gpu.network_gb_s, 1e9 * gpu.network_gb_s, "")
    slowest, fastest = (1e9 * speed for speed in NETWORKS)
    return LinkRange(slowest, fastest, "with 100 Gbit/s between machines, or 10")


def _peer_link(gpu: Gpu, processes: int, what_if: bool) -> LinkRange:
    if gpu.link_gb_s and not gpu.link_is_pcie:
        return LinkRange(1e9 * gpu.link_gb_s, 1e9 * gpu.link_gb_s, "")
    worst, best = _pcie(gpu, what_if)
    slowest = THROUGH_RAM[0] * _rate(worst), f"through RAM over {worst}"
    fastest = THROUGH_RAM[1] * _rate(best), f"through RAM over {best}"
    if NO_PEERS not in gpu.name:
        fastest = DIRECT * _rate(best), f"over {best}"
    if processes <= 2 and (bridged := link_speed(gpu.bridge, gpu.compute_capability)):  # it joins two
        fastest = 1e9 * bridged, "with an NVLink bridge"
    return LinkRange(slowest[0], fastest[0], _either(fastest[1], slowest[1]))


def _host_link(gpu: Gpu, what_if: bool) -> LinkRange:
    worst, best = _pcie(gpu, what_if)
    either = "" if worst == best else f"to RAM {_either(f'over {best}', f'over {worst}')}"
    return LinkRange(DIRECT * _rate(worst), DIRECT * _rate(best), either)


def _pcie(gpu: Gpu, what_if: bool) -> tuple[str, str]:
    """The GPU's PCIe at its worst and at its best; a machine may connect 8 of its 16 lanes."""
    if gpu.host_link:
        return gpu.host_link, gpu.host_link
    if gpu.link and gpu.link_is_pcie and gpu.link_gb_s:  # of a known generation
        best, lanes = gpu.link, int(gpu.link.rpartition(" ")[2])
        return (best.rpartition(" ")[0] + f" {min(8, lanes)}" if what_if else best), best
    generation = generation_of_pcie(gpu.compute_capability)
    return (f"PCIe {generation}.0 x 8", f"PCIe {generation}.0 x 16") if generation else UNKNOWN_PCIE


UNKNOWN_PCIE = ("PCIe 3.0 x 8", "PCIe 5.0 x 16")


def _rate(pcie: str) -> float:
    """Bytes per second of the data sheet."""
    return 1e9 * (link_speed(pcie, None) or 0.0)


def _either(best: str, worst: str) -> str:
    """`_either("over PCIe 4.0 x 16", "over PCIe 4.0 x 8")` is "over PCIe 4.0 x 16, or x 8"."""
    what, _, lanes = worst.rpartition(" x ")
    if best == worst:
        return ""
    return f"{best}, or x {lanes}" if best.startswith(f"{what} x ") else f"{best}, or {worst}"
