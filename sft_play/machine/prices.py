"""What a GPU costs for an hour, by a table that users write: prices.yaml, of theirs and of a project.

Lines of `RTX 4090: 0.4`, in any currency. It is empty as shipped: prices change, and are the user's.
"""

import math
import os
from pathlib import Path

from sft_play.errors import ConfigError
from sft_play.machine.catalogue import SPECS_FILE, find_specs, nearest_names

FILE = "prices.yaml"


def price_files() -> tuple[Path, Path]:
    """The user's own, in XDG_CONFIG_HOME or ~/.config, and the project's, whose prices win."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return own / "sft-play" / FILE, Path("configs") / FILE


def price_of(gpu: str) -> float | None:
    """The price of a GPU for an hour, by its name; None if no table has it.

    Raises:
        ConfigError: a table has a GPU or a price that cannot be; the message names its file and line.
    """
    prices = {name: price for file in price_files() for name, price in _read(file).items()}
    specs = find_specs(gpu)
    return prices.get(specs.name) if specs else None


def _read(file: Path) -> dict[str, float]:
    """Prices by the names that drivers report; none if there is no such file."""
    import yaml

    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}, line {mark.line + 1}" if mark else file
        raise ConfigError(f"{where}: not valid YAML; expected lines such as `RTX 4090: 0.4`") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        where = f"{file}, line {root.start_mark.line + 1}"
        raise ConfigError(f"{where}: expected lines such as `RTX 4090: 0.4`, found no name and price")
    found: dict[str, float] = {}
    for key, value in root.value:
        where, gpu = f"{file}, line {key.start_mark.line + 1}", str(key.value) if key.id == "scalar" else "?"
        if (specs := find_specs(gpu)) is None:
            closest = ", ".join(nearest_names(gpu))
            raise ConfigError(f'{where}: GPU "{gpu}" is unknown; closest: {closest}. All names: {SPECS_FILE}')
        if specs.name in found:
            raise ConfigError(f"{where}: {gpu} has a price further up; keep one")
        found[specs.name] = _price(value, f"{where}: {gpu}")
    return found


def _price(node: object, where: str) -> float:
    text = getattr(node, "value", "")
    plain = isinstance(text, str) and getattr(node, "style", None) is None
    try:
        price = float(text) if plain else math.nan
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        said = f"{text!r}" if isinstance(text, str) else "a list or a table"
        raise ConfigError(
            f"{where}: expected the price of an hour, a number above 0 such as 0.4, found {said}"
        )
    return price
