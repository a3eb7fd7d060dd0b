"""docs/reference/config.md lists what the schema knows."""

from typing import get_origin

from scripts.docs.config_reference import reference
from sft_play.config.load import section_of
from sft_play.config.schema import RunConfig


def keys_of(model, prefix=""):
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner:
            is_list = get_origin(field.annotation) is tuple
            yield from keys_of(inner, f"{prefix}{name}{'[].' if is_list else '.'}")
        else:
            yield f"{prefix}{name}"


def test_every_key_has_a_type_a_default_and_a_meaning():
    rows = [line.strip("| ").split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    cells = {row[0].strip("`"): row[1:] for row in rows}
    keys = set(keys_of(RunConfig))
    assert keys | {"data.sources", "model.rope_scaling"} == set(cells) and len(rows) == len(cells)
    assert all(len(row) == 3 and all(row) for row in cells.values())


def test_limits_defaults_and_choices_are_in_words():
    text = reference()
    assert "| `model.name` | text | required |" in text
    assert "| `train.learning_rate` | number > 0 <= 1 | `0.0002` |" in text
    assert "| `train.seed` | integer >= 0 < 2^32 | `0` |" in text
    assert "| `tuning.mode` | `full`, `lora`, `qlora` | `lora` |" in text
    assert "| `data.sources` | list of sections, see below | `[]` |" in text
    assert "| `model.rope_scaling` | section, see below | `null` |" in text
    assert "| `train.max_steps` | integer > 0 < 2^31 | `null` |" in text
