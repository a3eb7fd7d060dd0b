"""Which training methods exclude each other, or need a setting that is not there; no torch here."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sft_play.config.schema import RunConfig

# ZeRO-2 joins the weights of a process to one vector. These update each element on its own.
ELEMENTWISE = ("adamw", "adamw_8bit")
SCHEDULE_FREE = "schedule_free_adamw"
EXTRAS = {"schedulefree": "install it: .venv/bin/python -m pip install 'schedulefree>=1.4,<2'"}
PAGED = "paged_"  # how the names of optimizers begin whose states may leave the GPU


def module_name(value: str) -> str:
    """The end of a module's name, which is a regular expression, as it is.

    Raises:
        ValueError: it cannot be compiled.
    """
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


def lighter_modes(config: "RunConfig") -> list[str]:
    """The values of tuning.mode that need less memory and agree with the other settings."""
    decomposes = config.tuning.lora.init != "default"
    lighter = {"full": ["lora", "qlora"], "lora": [] if decomposes else ["qlora"], "qlora": []}
    return lighter[config.tuning.mode]


def require_compatible(config: "RunConfig") -> None:
    """Checks the methods of a run against each other.

    Raises:
        ValueError: two of them exclude each other; says which, and what to set.
    """
    for problem in (_initialization_problem(config), _optimizer_problem(config)):
        if problem:
            raise ValueError(problem)


def _initialization_problem(config: "RunConfig") -> str | None:
    lora = config.tuning.lora
    setting = f"tuning.lora.init={lora.init}"
    if lora.init == "default":
        return None
    if config.tuning.mode == "qlora":
        return f"{setting} changes the base weights, which are 4-bit with tuning.mode=qlora; set it to lora"
    if lora.use_dora:
        return f"{setting} and tuning.lora.use_dora=true both decompose the base weights; use one of them"
    return None


def _optimizer_problem(config: "RunConfig") -> str | None:
    optimizer, engine = config.train.optimizer, config.parallel.engine
    if engine == "deepspeed_z2" and optimizer not in ELEMENTWISE:
        return (
            f"train.optimizer={optimizer} does not work with parallel.engine=deepspeed_z2, which supports "
            f"{' and '.join(ELEMENTWISE)}; use one of them, or parallel.engine=ddp"
        )
    if optimizer == SCHEDULE_FREE and config.train.lr_schedule != "constant":
        return (
            f"train.optimizer={optimizer} keeps the learning rate after the warmup; set "
            "train.lr_schedule=constant"
        )
    return None
