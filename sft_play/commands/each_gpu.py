"""`sft-play plan --model` without a GPU: the plan on each of the common ones."""

from functools import partial
from typing import Any

from sft_play.commands.plan_flags import Asked
from sft_play.config.load import ResolvedConfig
from sft_play.errors import ConfigError
from sft_play.machine.prices import price_of
from sft_play.planning.answers.kept import kept
from sft_play.planning.answers.other_machines import MODES, on_each_gpu, plans_by_mode
from sft_play.planning.answers.other_methods import cheapest_ways
from sft_play.planning.request import Request
from sft_play.report.layout import apart, stopped
from sft_play.report.ways import card_heads, card_line, gpus_report
from sft_play.results import Planned
from sft_play.spelling import quoted, var
from sft_play.ui.console import console
from sft_play.ui.progress import PLANNING, progress_bar


def each_gpu_answer(
    asked: Asked, resolved: ResolvedConfig, request: Request, notes: list[str], *, batch_grows: bool
) -> Planned:
    """The plans for so many of each common GPU, or the fewest that are enough, as JSON and as a report.

    On a terminal, a line for each GPU appears when it is planned. Ctrl-C keeps what was found until then.

    Raises:
        ConfigError: a price is given, which is that of one kind of GPU.
    """
    if asked.gpu_hour:
        add = var(GPU=quoted("H100 80GB"))
        raise ConfigError(f"{var(GPU_HOUR=None)} is the price of one kind of GPU: add {add}")
    modes = MODES if resolved.origins["tuning.mode"] == "default" else (request.config.tuning.mode,)
    on_gpus, cards, complete = on_each_gpu(request), list[dict[str, Any]](), True
    cheapest: list[dict[str, Any]] = []
    appear = console().is_terminal and not asked.json
    try:
        with progress_bar(PLANNING, len(on_gpus)) as planned:
            if appear:
                console().print(card_heads(modes))
            for name, run in on_gpus.items():
                find = partial(plans_by_mode, run, modes, asked.gpus, batch_grows=batch_grows)
                plans = kept("plans by mode", run, modes, asked.gpus, batch_grows, find=find)
                cards.append({"gpu": name, "total_bytes": run.machine.gpus[0].total_bytes, "plans": plans})
                planned(1)
                if appear:
                    console().print(card_line(cards[-1]))
            if not asked.gpus:
                prices, ways = [*map(price_of, on_gpus)], partial(cheapest_ways, request, modes, cards)
                cheapest = kept("cheapest ways", request, modes, cards, prices, find=ways)
    except KeyboardInterrupt:
        complete = False
    tree = {
        "model": request.config.model.name,
        "gpus": asked.gpus,
        "row_tokens": request.facts.longest_row,
        "seen": request.facts.seen,
        "cheapest": cheapest,
        "cards": cards,
        "why": notes,
        "complete": complete,
    }
    if appear:
        console().print()
    if complete:
        return Planned(tree, gpus_report(tree))
    shown = [gpus_report(tree)] if cards else []
    ended = stopped(f"{len(cards)} of {len(on_gpus)} GPUs were planned", asked.command)
    return Planned(tree, apart(*shown, ended))
