"""Arguments of pip, beside `torch==...`, for a build of PyTorch that this machine's driver and GPUs can use.

None where PyPI's build is one, where no GPU is seen (a login node, an image), and where pip is told of an
index already, since who has one of their own chooses there.
"""

import subprocess
import sys

from sft_play.machine.cuda import HOW_TO_INSTALL, PUBLISHED, how_to_use_gpus, wheels_for
from sft_play.machine.gpus import Machine, detect

INDEX = "https://download.pytorch.org/whl/"


def answer(machine: Machine, has_index: bool) -> tuple[list[str], str]:
    """The arguments of pip, and what to tell the person who waits ("" if nothing); pure."""
    wheels = wheels_for(machine)
    if not machine.gpus or wheels is PUBLISHED[0]:
        return [], ""
    if wheels is None:
        return [], f"PyTorch cannot use these GPUs: {how_to_use_gpus(machine)}"
    chosen = f"CUDA {wheels.version}, for driver {machine.driver} and {machine.gpus[0].name}"
    if has_index:
        return [], f"pip is told of an index: it must have the build for {chosen} ({HOW_TO_INSTALL})"
    return ["--extra-index-url", INDEX + wheels.tag], f"the build for {chosen}"


def main() -> int:
    """Prints the arguments, and on stderr why."""
    settings = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    arguments, says = answer(detect(), "index-url" in settings.stdout)
    if says:
        sys.stderr.write(f"    {says}\n")
    print(*arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
