"""Plans that are made and changed by the names of their JSON."""

from typing import Any

from sft_play.parts import parts_of
from sft_play.plan import Plan


def plan_of(**values: Any) -> Plan:
    """A plan of these values."""
    return Plan(**parts_of(values), **values)


def plan_with(plan: Plan, **values: Any) -> Plan:
    """The plan with other values."""
    rest = {name: getattr(plan, name) for name in ("memory", "why", "alternatives")}
    return plan_of(**plan.flat() | rest | values)
