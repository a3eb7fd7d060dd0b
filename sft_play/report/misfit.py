"""What is said of a run that fits nowhere: by how much, and the commands with which it fits."""

from collections.abc import Sequence

from sft_play.plan import HostMemory, Memory, Plan
from sft_play.units import counted, format_bytes

MISFIT = "this run does not fit"  # how the error begins


def misfit_text(smallest: Plan, *, explain: bool = True) -> str:
    """By how much the smallest plan exceeds its budget, and what it consists of."""
    memory = smallest.memory
    assert memory
    host = memory.host if memory.host and not memory.host.fits else None
    terms = host.terms if host else memory.terms
    methods = "".join(f", {method}" for method in smallest.activations.methods)
    first = (
        f"{MISFIT}: the smallest plan (micro-batch {smallest.batch.micro}{methods}) {_excess(memory, host)}"
    )
    if not explain:
        return first
    largest = sorted(terms.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
    return f"{first}\nlargest parts{' of a process' if host else ''}: {parts}"


def advice_text(ways: Sequence[tuple[str, Plan, float | None]], *, gpus: bool) -> str:
    """Commands with which a run fits, each with its plan and the tokens per second of that, if known.

    If there are none, what that means on a machine with or without `gpus`.
    """
    if not ways and gpus:
        more = "nor do 512 such GPUs; use a smaller model, or a GPU with more memory"
        return f"no single setting makes it fit, {more}"
    if not ways:
        return "no single setting makes it fit; use a smaller model, or a machine with more memory"
    lines = ["any one of these makes it fit:" if ways[1:] else "this makes it fit:"]
    for command, plan, speed in ways:
        assert plan.memory
        host = plan.memory.host
        ram = f" and {format_bytes(host.needed_bytes)} of RAM" if host else ""
        needs = f"{format_bytes(plan.memory.process_bytes)} a process{ram}"
        speed_text = f", {speed:,.0f} tokens/s" if speed else ""
        split = f"micro-batch {plan.batch.micro}, activations {plan.activations.words}"
        lines += [f"  {command}", f"    {needs}, {split}{speed_text}"]
    return "\n".join(lines)


def _excess(memory: Memory, host: HostMemory | None) -> str:
    """What is needed, and how much more than the budget that is; of RAM, if `host` has too little."""
    needed, budget = memory.decisive_bytes, memory.budget_bytes
    where, whose = f" in the {memory.peak_phase} phase", "the budget"
    if host:
        needed, budget = host.needed_bytes, host.budget_bytes or 0
        where, whose = (
            f" of RAM for {counted(host.processes, 'process')}",
            "the RAM that may be used, which is",
        )
    more = f"{format_bytes(needed - budget)} more than {whose}"
    return f"needs {format_bytes(needed)}{where}, {more}{'' if host else ' of'} {format_bytes(budget)}"
