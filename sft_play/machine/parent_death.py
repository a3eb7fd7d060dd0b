"""Ensures that no process outlives its parent, even if the parent is killed with SIGKILL.

CLI -> (this module, which execs accelerate launch) -> ranks

Each of them asks the kernel to kill it when its parent dies.
"""

import ctypes
import os
import signal
import sys

LAUNCHER_VARIABLE = "SFT_PLAY_LAUNCHER"  # process id of the expected parent
PR_SET_PDEATHSIG = 1


def die_with_parent(expected: int | None = None) -> None:
    """Makes the kernel kill this process when its parent dies; call it first, before anything slow.

    Args:
        expected: process id of the parent, to detect that it died before the call. Default: the launcher's
            variable; if that is not set (torchrun, plain python), there is no such check.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    expected = expected or int(os.environ.get(LAUNCHER_VARIABLE, "0"))
    if expected and os.getppid() != expected:  # it died during startup, so the kernel will not kill us
        os.kill(os.getpid(), signal.SIGKILL)


def main(command: list[str]) -> None:
    """Execs `command`, which stays tied to its parent and is the parent that the ranks expect."""
    die_with_parent()
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    os.execvp(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
