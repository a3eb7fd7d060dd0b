"""`sft-play plan --context`: the longest row that fits, for each method and number of GPUs."""

from functools import partial
from typing import Any

from sft_play.commands.plan_flags import Asked
from sft_play.config.load import ResolvedConfig
from sft_play.data.length import require_positions
from sft_play.errors import ConfigError, DoesNotFitError
from sft_play.machine.gpus import detect, what_if, with_freest
from sft_play.planning.answers.context import LONGEST, longest_rows, places_of
from sft_play.planning.answers.other_machines import MODES
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.report.context import context_report, problem_of, row_line
from sft_play.report.layout import apart, stopped
from sft_play.results import Planned
from sft_play.sizing.facts.architecture import Architecture
from sft_play.spelling import quoted, var
from sft_play.ui.console import console
from sft_play.ui.progress import progress_bar

COUNTS = (1, 8)  # of GPUs elsewhere: one, and a machine of them
LEAST = 2  # tokens of a row: of a single one, nothing is predicted


def asked_tokens(typed: str) -> int | None:
    """The tokens of CONTEXT; None for "max".

    Raises:
        ConfigError: it is neither.
    """
    if typed.lower() == LONGEST:
        return None
    digits = typed.replace("_", "").replace(",", "")
    if digits.isdigit() and int(digits) >= LEAST:
        return int(digits)
    raise ConfigError(
        f"{var(CONTEXT=typed)}: expected max, for the longest row that fits, or the tokens of a row, "
        f"at least {LEAST}: {var(CONTEXT=32768)}"
    )


def context_answer(
    asked: Asked, resolved: ResolvedConfig, architecture: Architecture, notes: list[str]
) -> Planned:
    """The longest rows as JSON and as a report; on a terminal, each is said when it is found.

    Raises:
        ConfigError: CONTEXT is no length, or more than the model has positions; or nothing says which GPU.
        DoesNotFitError: rows of the asked length fit nowhere; says how long they may be.
    """
    config, length = resolved.config, asked_tokens(asked.context or LONGEST)
    if asked.model and not asked.gpu:
        add = f"{var(GPU=quoted('H100 80GB'))} (and {var(NGPU=8)})"
        raise ConfigError(f"{var(CONTEXT=asked.context)} needs one kind of GPU: add {add}")
    if config.train.packing and config.train.effective_batch_size:
        raise ConfigError(
            f"{var(CONTEXT=None)} varies the length of rows, but with train.packing, "
            "train.effective_batch_size counts their tokens: leave it out"
        )
    positions = architecture.facts.position_limit
    if length is not None:
        require_positions(var(CONTEXT=length), length, config.model, positions)
    unsaid = not asked.config and resolved.origins["tuning.mode"] == "default"
    modes = MODES if unsaid else (config.tuning.mode,)
    here = what_if(asked.gpu, 1) if asked.gpu else detect()
    unnamed = COUNTS if asked.gpu else (len(here.gpus) or 1,)
    counts = (asked.gpus,) if asked.gpus else unnamed
    facts = DataFacts.full_rows(length or LEAST, config.train.seed)
    on = partial(what_if, asked.gpu) if asked.gpu else partial(with_freest, here)
    requests = [Request(config, architecture, facts, on(count), count) for count in counts]
    machine = requests[0].machine
    total = len(modes) * len(counts) * len(places_of(config, machine))
    rows, searches, complete = list[dict[str, Any]](), 0, True
    try:
        with progress_bar("looking for the longest rows", total) as advance:
            for found in longest_rows(requests, modes, length):
                rows += found
                searches += 1
                advance(1)
                for row in found if console().is_terminal and not asked.json else ():
                    console().print(row_line(row, gpu=bool(machine.gpus)))
    except KeyboardInterrupt:
        complete = False
    tree = {
        "model": config.model.name,
        "gpu": machine.gpus[0].name if machine.gpus else None,
        "asked": length or LONGEST,
        "positions": positions,
        "rows": rows,
        "why": notes,
        "complete": complete,
    }
    if not complete:
        shown = [context_report(tree)] if rows else []
        ended = stopped(f"{searches} of {total} searches were made", asked.command)
        return Planned(tree, apart(*shown, ended))
    if length is not None and not any(row.get("fits") for row in rows):
        raise DoesNotFitError(problem_of(tree))
    return Planned(tree, context_report(tree))
