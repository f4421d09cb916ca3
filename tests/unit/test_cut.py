"""The tool that cuts connections of other processes, on a process that echoes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.support.cut import cut

ECHO = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
while data := connection.recv(100):
    connection.sendall(data)
"""


def test_a_connection_is_cut_for_both_ends_and_no_other(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        process = subprocess.Popen([sys.executable, "-c", ECHO, path])
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"x")
            assert connection.recv(10) == b"x"
            assert cut(process.pid, lambda peer: peer == "/elsewhere") == 0
            connection.sendall(b"y")
            assert connection.recv(10) == b"y"
            assert cut(process.pid, lambda peer: peer == path) == 1
            assert connection.recv(10) == b""
        assert process.wait(30) == 0
