"""What `sft-play plan` is asked."""

from dataclasses import dataclass

from sft_play.commands.command_line import Arguments


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
    gpu_hour: float | None
    why: bool

    @classmethod
    def of(cls, args: Arguments) -> "Asked":
        """What was typed."""
        return cls(args.config, args.overrides, args.json, **args.flags)
