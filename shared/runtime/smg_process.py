"""`python -m stagemesh.shared.runtime.smg_process PARENT ...`: the gateway, with the arguments that follow, in a
process that ends with its parent, whatever that dies of.

Its control plane, which could send requests elsewhere, is closed: the key for it is made here, and told nobody.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main(parent: int, *arguments: str) -> None:
    """Does not return before the gateway ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    from smg.cli import main as run

    key = f"stagemesh:stagemesh:admin:{secrets.token_hex(32)}"
    sys.argv[0] = "smg"
    run(["launch", *arguments, "--control-plane-api-keys", key])


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
