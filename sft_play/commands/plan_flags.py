"""What `sft-play plan` is asked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sft_play.commands.command_line import Arguments
from sft_play.errors import ConfigError
from sft_play.report.layout import make_command
from sft_play.spelling import quoted, var

COUNTED = re.compile(r"\s*([1-9]\d{0,3})\s*[x\u00d7*]\s*(.+)", re.IGNORECASE)  # GPUs, as people write them


@dataclass(frozen=True)
class Asked:
    """The flags of the command, beside what every command takes."""

    config: str  # "" without one
    overrides: tuple[str, ...]
    json: bool
    model: str | None
    gpu: str | None
    gpus: int | None
    context: str | None
    rows: int | None
    tokens: int | None
    lengths: str | None
    images: int | None
    pixels: str | None
    gpu_hour: float | None
    why: bool

    @classmethod
    def of(cls, args: Arguments) -> "Asked":
        """What was typed; "2x RTX 3090" is two of them.

        Raises:
            ConfigError: the number before the GPU is not the one that NGPU says.
        """
        flags = dict(args.flags)
        if found := COUNTED.fullmatch(flags["gpu"] or ""):
            count, gpu = int(found[1]), found[2]
            if flags["gpus"] not in (None, count):
                asked, other = var(GPU=quoted(flags["gpu"])), var(NGPU=flags["gpus"])
                raise ConfigError(
                    f"{asked} asks for {count} and {other} for {flags['gpus']}; give the number once: "
                    f"{var(GPU=quoted(gpu), NGPU=count)}"
                )
            flags |= {"gpu": gpu, "gpus": count}
        return cls(args.config, args.overrides, args.json, **flags)

    @property
    def command(self) -> str:
        """What to type to ask the same."""
        return self.command_with(self.overrides)

    def command_with(self, overrides: Sequence[str], **changed: object) -> str:
        """What to type to ask the same with these overrides, and settings of make that are `changed`."""
        named: dict[str, object] = {"MODEL": self.model, "GPU": self.gpu, "NGPU": self.gpus}
        named |= {"CONTEXT": self.context, "ROWS": self.rows, "TOKENS": self.tokens}
        named |= {"LENGTHS": self.lengths, "IMAGES": self.images, "PIXELS": self.pixels}
        named |= {"GPU_HOUR": self.gpu_hour, "WHY": "1" if self.why else None}
        return make_command("plan", self.config, overrides, **named | changed)
