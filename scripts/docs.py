"""`make docs`: writes the pages that are generated, and configs/schema.json."""

import json
from pathlib import Path

from sft_play.config.load import json_schema
from sft_play.config.reference import reference

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    (ROOT / "docs" / "reference" / "config.md").write_text(reference(), encoding="utf-8")
    (ROOT / "configs" / "schema.json").write_text(
        json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8"
    )
