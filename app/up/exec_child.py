"""Runs between fork and exec of each child: `python exec_child.py PARENT_PID PROGRAM [ARGUMENT …]`.

Asks Linux to kill this process when `tinworks up` dies, whatever it dies of, then becomes PROGRAM. Done here and not in
a `preexec_fn`, which would run Python in a forked copy of the parent. Imports the standard library only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent's life, then exec."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main()
