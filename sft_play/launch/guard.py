"""No process outlives the one that started it, also when that one is killed with -9.

CLI -> (this module, which becomes accelerate launch) -> ranks: each asks the kernel to be killed with its parent.
"""

import ctypes
import os
import signal
import sys

LAUNCHER_VARIABLE = "SFT_PLAY_LAUNCHER"  # process id of the parent that a guarded process expects
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ties this process to its parent; called first thing, before anything slow.

    Without the launcher's variable (torchrun, plain python) there is no check for a parent that died before the call.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    expected = os.environ.get(LAUNCHER_VARIABLE)
    if expected and os.getppid() != int(expected):  # it died while we started: the kernel will not tell us any more
        os.kill(os.getpid(), signal.SIGKILL)


def main(command: list[str]) -> None:
    """Becomes `command`, tied to the parent (exec keeps the tie), as the parent that the ranks expect."""
    die_with_parent()
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    os.execvp(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
