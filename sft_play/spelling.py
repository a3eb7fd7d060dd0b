"""How commands are spelled: a message names a target and variables of make, and its reader sees what to type.

`make("train", NGPU=2)` is "make train NGPU=2"; for who did not come through make, it is
"sft-play train --processes 2". Who calls a function of Python reads its keywords: "processes=2".
"""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

BY_MAKE = "SFT_PLAY_MAKE"  # which the Makefile sets
RUNS = "runs"  # the folder in which a run is named by its name alone

SAME = [  # targets of make that are commands of sft-play
    "gpu-info", "memory-check", "device-profile", "check", "setup-accelerate", "prepare", "process", "style",
    "render", "dapt-docx", "plan", "probe", "train", "tensorboard", "eval", "eval-lm", "infer", "merge",
    "merge-test", "report", "compare", "export", "push", "studio", "runs", "clean-cache",
]  # fmt: skip
TARGETS = dict(zip(SAME, SAME, strict=True)) | {
    "train-distributed": "train --engine ddp",
    "train-deepspeed": "train --engine deepspeed_z2",
    "train-fsdp": "train --engine fsdp2",
    "train-multinode": "train",
    "train-slurm": "slurm",
    "resume": "train --resume",
    "infer-batch": "infer",
    "tb-stop": "tensorboard --stop",
}
for name in ("train", "train-distributed", "train-deepspeed", "train-fsdp"):
    TARGETS[f"{name}-tb"] = f"{TARGETS[name]} --tensorboard"
FLAGS = {
    "CONFIG": "--config",
    "NGPU": "--processes",
    "ENGINE": "--engine",
    "NODES": "--nodes",
    "RANK": "--node-rank",
    "MASTER_ADDR": "--master-addr",
    "MASTER_PORT": "--master-port",
    "PARTITION": "--partition",
    "TIME": "--time",
    "ACCOUNT": "--account",
    "SBATCH": "--sbatch",
    "MODEL": "--model",
    "GPU": "--gpu",
    "SHOW": "--show",
    "SPLIT": "--split",
    "LIMIT": "--limit",
    "SHOTS": "--shots",
    "TASKS": "--tasks",
    "WHAT": "--what",
    "IN": "--input",
    "OUT": "--output",
    "DTYPE": "--dtype",
    "FORMAT": "--format",
    "STYLE": "--style",
    "REPO": "--repo",
    "RUNS": "--runs",
    "CONTEXT": "--context",
    "ROWS": "--rows",
    "TOKENS": "--tokens",
    "LENGTHS": "--lengths",
    "IMAGES": "--images",
    "PIXELS": "--pixels",
    "GPU_HOUR": "--gpu-hour",
}
SWITCHES = {"AUTO": "--auto", "CHAT": "--chat", "FORCE": "--force", "PUBLIC": "--public", "WHY": "--why"}
OVERRIDES = {
    "RUN": "output.name={}",
    "MODE": "tuning.mode={}",
    "OFFLOAD": "parallel.offload={}",
    "PROBE": "train.probe={}",
    "ALLOW": "train.allow_changed=[{}]",
    "ZERO": "parallel.engine=deepspeed_z{}",
}
OF_TARGET = {("plan", "NGPU"): "--gpus", ("train-slurm", "NGPU"): "--gpus", ("report", "RUN"): ""}
# After training RUN names a run, with the settings that it was trained with.
AFTER = ("eval", "eval-lm", "infer", "infer-batch", "merge", "merge-test", "export", "push", "resume")


_called = False  # whether a block of `in_python` is open


@contextmanager
def in_python() -> Iterator[None]:
    """In the block, settings are named as keywords of a function."""
    global _called
    before, _called = _called, True
    try:
        yield
    finally:
        _called = before


def by_make() -> bool:
    """Whether make has started this process."""
    return bool(os.environ.get(BY_MAKE))


def either(with_make: str, without: str) -> str:
    """What is there for who has the repository, or what is there for who installed the package."""
    return with_make if by_make() else without


def login() -> str:
    """The command that asks for an access token of the Hub and keeps it."""
    return either(".venv/bin/hf auth login", "hf auth login")


def settings_page() -> str:
    """What lists all settings."""
    return either("docs/reference/config.md", "`sft-play config-schema`")


def make(target: str, /, **settings: object) -> str:
    """The command of a target, for a shell; `settings` as in `var`."""
    if by_make():
        return " ".join([f"make {target}", var(**settings)]).rstrip()
    if target == "install":
        return "pip install <the wheel of SFT-Play>"
    words = TARGETS[target]
    if "--engine" in words and "NGPU" not in settings:
        words += " --processes 0"
    return " ".join(["sft-play", words, *(_flag(target, *each) for each in settings.items())])


def var(**settings: object) -> str:
    """Variables of make as they are typed, or the flags and overrides that they are without it.

    The values are quoted already; the overrides of ARGS are not. None: only the name.
    """
    return " ".join(_setting(*each) for each in settings.items())


def typed(name: str, flag: str, value: object) -> str:
    """A variable of make with its value, or the flag or keyword that it is without make."""
    if _called:
        return f"{flag.removeprefix('--').replace('-', '_')}={value}"
    return either(f"{name}={value}", f"{flag} {value}")


def variable_of(setting: str) -> str | None:
    """The variable of make that overrides a setting: MODE of "tuning.mode"."""
    return next((name for name, form in OVERRIDES.items() if form == f"{setting}={{}}"), None)


def quoted(words: str) -> str:
    """Words as one argument; in double quotes if they need no more, since a line can be continued there."""
    return shlex.quote(words) if set(words) & set("'\"$`\\!") else f'"{words}"'


def _setting(name: str, value: object) -> str:
    if _called and name in FLAGS and value is not None:
        return typed(name, FLAGS[name], value)
    return _variable(name, value) if by_make() else _flag("", name, value)


def _variable(name: str, value: object) -> str:
    return name if value is None else f"{name}={quoted(str(value)) if name == 'ARGS' else value}"


def _flag(target: str, name: str, value: object) -> str:
    if name == "ARGS":
        return str(value)
    if name in SWITCHES:
        return SWITCHES[name]
    if name == "RUN" and target in AFTER:  # a run is named by itself or in the folder of runs
        folder = str(value)
        if "/" not in folder:
            folder = f"{RUNS}/{value}"
        return f"{FLAGS['CONFIG']} {folder}/config.resolved.yaml"
    if name in OVERRIDES and (target, name) not in OF_TARGET:
        return OVERRIDES[name].format(value) if value is not None else OVERRIDES[name].partition("=")[0]
    flag = OF_TARGET.get((target, name), FLAGS.get(name, ""))
    return flag if value is None else f"{flag} {value}".strip()
