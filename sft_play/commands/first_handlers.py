"""One function per command that a person starts with: the demo, and a config to write on."""

from pathlib import Path

from sft_play.commands.command_line import Arguments, arguments, command, flag
from sft_play.errors import ConfigError, StorageError
from sft_play.report.layout import ending, make_command
from sft_play.resources import CONFIGS
from sft_play.spelling import make, var
from sft_play.ui.console import console

DEMO = "configs/demo.yaml"


@command("demo", config=False, examples=["", "train.max_steps=20"])
@flag("overrides", "settings to override", nargs=-1, metavar="[section.key=value]...")
def demo(args: Arguments) -> int:
    """Train the demo, without a download or a GPU: `train --config configs/demo.yaml`."""
    return arguments("train", args.overrides, config=DEMO).run()


@command("init", config=False, examples=["", "mine.yaml"])
@flag("file", "YAML file to write (default: my.yaml)", default=Path("my.yaml"), type=Path)
def init(args: Arguments, file: Path) -> int:
    """Write a config to start from, with comments."""
    text = (CONFIGS / "starter.yaml").read_text(encoding="utf-8")
    text = text.replace("$schema=schema.json", f"$schema={CONFIGS / 'schema.json'}")
    text = text.replace("CONFIG=my.yaml", var(CONFIG=file)).replace("SHOW=3", var(SHOW=3))
    for target in ("train", "prepare", "check"):
        text = text.replace(f"make {target}", make(target))
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        found = f"{file} exists and will not be overwritten"
        raise ConfigError(f"{found}; name another file: sft-play init another.yaml") from None
    except OSError as error:
        elsewhere = f"name a file in another folder: sft-play init <folder>/{file.name}"
        raise StorageError(f"{file} cannot be written: {error.strerror}; {elsewhere}") from None
    commands = [
        make_command("prepare", file, SHOW=3),
        *(make_command(target, file) for target in ("check", "train")),
    ]
    console().print(ending({"wrote": file, "edit": "model.name and data.train_path in it"}, commands))
    return 0
