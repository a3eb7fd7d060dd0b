"""A fresh process that merges, exports or tests finished runs, and writes the memory that each took, in bytes.

python after_training.py <specs.json>     each spec: what, config, and arguments; leaves <specs.found>

The first specs only import what the others need.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script finds its own folder alone

from sft_play.commands.export import export  # noqa: E402
from sft_play.commands.merge import merge, merge_test  # noqa: E402
from sft_play.config.schema import RunConfig  # noqa: E402
from sft_play.engines.stored import give_back_freed_memory  # noqa: E402
from sft_play.model.layers.cpu import M_MMAP_THRESHOLD  # noqa: E402
from sft_play.model.weights.finished import release_memory  # noqa: E402
from sft_play.runlog import RunDir  # noqa: E402
from sft_play.units import KIB  # noqa: E402
from tests.integration.loading import anonymous_bytes, anonymous_peak  # noqa: E402

COMMANDS = {"merge": merge, "merge_test": merge_test, "export": export}


def measured(what: str, config: dict[str, Any], **arguments: Any) -> dict[str, int]:
    """What a command added at most, what there was before, and what it says that it needs."""
    settings = RunConfig.model_validate(config)
    run = RunDir(Path(settings.output.dir) / settings.output.name)
    release_memory()
    give_back_freed_memory()
    before = anonymous_bytes()
    with anonymous_peak() as peak:
        result = COMMANDS[what](settings, run, **arguments)
    return {"before": before, "peak": peak[0], "said": result.get("ram_bytes", 0)}


if __name__ == "__main__":
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * KIB)  # what is freed goes back to the system
    found = [measured(**spec) for spec in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[1]).with_suffix(".found").write_text(json.dumps(found))
