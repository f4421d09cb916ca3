"""`python leftovers.py MARK PID`: the processes that the tests left behind, by the mark in their environment.

Process PID, which ran the tests, and this one carry the mark too. Exits with 1 if there are others.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def leftovers(mark: str, known: frozenset[int]) -> dict[int, str]:
    """Command lines by pid of the living processes that were started with STAGEMESH_TEST_MARK=`mark`."""
    wanted = f"STAGEMESH_TEST_MARK={mark}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) in known:
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended meanwhile, or is not ours
    return found


if __name__ == "__main__":
    left = leftovers(sys.argv[1], frozenset({int(sys.argv[2]), os.getpid()}))
    for pid, command in left.items():
        print(f"left behind by the tests: {pid} {command}", file=sys.stderr)
    sys.exit(bool(left))
