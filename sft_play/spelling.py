"""How commands are spelled: messages are written with the targets and variables of make, and shown as typed.

Who did not come through make reads the commands and flags of `sft-play` instead: "run `make train NGPU=2`"
becomes "run `sft-play train --processes 2`".
"""

import os
import re
import shlex

BY_MAKE = "SFT_PLAY_MAKE"  # which the Makefile sets
RUNS = "runs"  # the folder in which a run is named by its name alone

SAME = [  # targets of make that are commands of sft-play
    "gpu-info", "memory-check", "device-profile", "check", "setup-accelerate", "prepare", "process", "style",
    "render", "dapt-docx", "plan", "probe", "train", "tensorboard", "eval", "eval-lm", "infer", "merge",
    "merge-test", "report", "compare", "export", "push", "studio", "runs",
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
WORDS = {
    "make install": "pip install <the wheel of SFT-Play>",
    ".venv/bin/hf": "hf",
    ".venv/bin/accelerate launch scripts/train_distributed.py": (
        "accelerate launch --module sft_play.scripts.train_distributed"
    ),
    "docs/reference/config.md lists": "`sft-play config-schema` lists",
}
# After training RUN names a run, with the settings that it was trained with.
AFTER = ("eval", "eval-lm", "infer", "infer-batch", "merge", "merge-test", "export", "push", "resume")
NAMES = "|".join((*FLAGS, *SWITCHES, *OVERRIDES, "ARGS"))
VALUE = r"""(?:"[^"]*"|'(?:[^']|'\\'')*'|<[^<>]*>|[^\s"'`,;:()<>]|[:;,](?=\S))*"""
KNOWN = "|".join(sorted(TARGETS, reverse=True))
COMMAND = re.compile(rf"(?<![\w./-])make ({KNOWN})\b(?!-)((?: (?:{NAMES})={VALUE})*)")
SETTING = re.compile(rf"(?<![\w./-])(?<!variable )({NAMES})=({VALUE})")
BARE = re.compile(r"\b(?:CONFIG|NGPU|NODES|CONTEXT|ROWS|TOKENS|LENGTHS|GPU_HOUR)\b")


RUN = re.compile(rf"\bRUN=({VALUE})")


def by_make() -> bool:
    """Whether make has started this process."""
    return bool(os.environ.get(BY_MAKE))


def as_typed(text: str) -> str:
    """A message with commands as its reader types them: of make, as they are, or of sft-play."""
    if by_make():
        return text
    for typed, meant in WORDS.items():
        text = text.replace(typed, meant)
    text = SETTING.sub(lambda found: _flag("", *found.groups()), COMMAND.sub(_command, text))
    return BARE.sub(lambda found: FLAGS[found[0]], text)


def _command(found: re.Match[str]) -> str:
    target, settings = found.groups()
    words = TARGETS[target]
    if target in AFTER and "CONFIG=" not in settings:
        settings = RUN.sub(lambda run: f"CONFIG={_folder(run[1])}/config.resolved.yaml", settings)
    if "--engine" in words and "NGPU=" not in settings:
        words += " --processes 0"
    return f"sft-play {words}{SETTING.sub(lambda each: _flag(target, *each.groups()), settings)}"


def _folder(run: str) -> str:
    """The folder of a run, which is named by itself or in the folder of runs."""
    return run if "/" in run else f"{RUNS}/{run}"


def _flag(target: str, name: str, value: str) -> str:
    """A variable of make as a flag, or as an override."""
    if name == "ARGS":
        return " ".join(shlex.split(value)) if value[:1] in "\"'" else value
    if name in SWITCHES:
        return SWITCHES[name]
    if name in OVERRIDES and (target, name) not in OF_TARGET:
        return OVERRIDES[name].format(value)
    return f"{OF_TARGET.get((target, name), FLAGS.get(name, ''))} {value}".lstrip()
