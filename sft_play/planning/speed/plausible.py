"""Measured figures that no such device has are replaced by those of its data sheet. Pure.

A measurement can go wrong by orders of magnitude: another program has the GPU, a clock stands still, the time
was too short. Half or a third of the data sheet is believed: limits of power and slices of a GPU do that.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from sft_play.planning.speed.profile import Curve, DeviceProfile

# Measured seconds over those derived from the data sheet. Products at a tenth of its peak are too slow, and
# at a quarter above it too fast; the derived ones run at 0.7 of the peak.
TOO_SLOW, TOO_FAST = 7.0, 0.56


class Unit(NamedTuple):
    """Figures that are right or wrong together: those that are compared, and those that are replaced too."""

    name: str
    compared: tuple[str, ...]
    beside: tuple[str, ...] = ()


MEMORY = Unit("memory", ("elementwise", "transcendental", "update_element_s"), ("unpack_s",))
CALLS = Unit("calls", ("call_forward_s", "call_backward_s"), ("update_tensor_s", "micro_batch_s", "step_s"))
ATTENTION = Unit("attention", ("attention", "attention_backward"))
# A CPU has no data sheet; how fast its products of 16 bits and its attention may be is not known.
UNITS = {"cuda": (ATTENTION, MEMORY, CALLS), "cpu": (MEMORY, CALLS)}
TYPES = {"cuda": ("bfloat16", "float16", "float32"), "cpu": ("float32",)}


def believed(measured: DeviceProfile, sheet: DeviceProfile) -> DeviceProfile:
    """The measured profile, in which `sheet` stands in for what cannot be true.

    That is what the data sheet says, or of a CPU what is assumed. The source of the profile says what was
    replaced, and how far off it was.
    """
    products, changes, doubts = dict(measured.products), dict[str, Any](), list[str]()
    for dtype in (each for each in TYPES[measured.kind] if each in products):
        times = products[dtype].seconds[-1] / sheet.products[dtype].seconds[-1]
        if times > TOO_SLOW or (times < TOO_FAST and measured.kind == "cuda" and dtype != "float32"):
            products[dtype] = sheet.products[dtype]
            doubts.append(f"{dtype} products ({_off(times)})")
    for unit in UNITS[measured.kind]:
        times = max(_times(getattr(measured, name), getattr(sheet, name)) for name in unit.compared)
        if times > TOO_SLOW:
            changes |= {name: getattr(sheet, name) for name in unit.compared + unit.beside}
            doubts.append(f"{unit.name} ({_off(times)})")
    if not doubts:
        return measured
    source = f"{measured.source}, implausible figures replaced by those {sheet.source}: {', '.join(doubts)}"
    return replace(measured, products=products, source=source, **changes)


def _times(found: Curve | float, expected: Curve | float) -> float:
    """How many times as long as expected it takes, at the largest size that was measured."""
    if isinstance(found, Curve) and isinstance(expected, Curve):
        return found.seconds[-1] / float(expected.at(np.array(found.sizes[-1])))
    return float(found) / float(expected)  # type: ignore[arg-type]


def _off(times: float) -> str:
    return f"{times:,.0f} times too slow" if times > 1 else f"{1 / times:.1f} times too fast"
