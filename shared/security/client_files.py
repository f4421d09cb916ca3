"""What a program that calls a mesh from outside is told: names of files, never what is in them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagemesh.shared.errors import Rejected
from stagemesh.shared.obs.log import Log
from stagemesh.shared.security.material import Material, TlsFiles
from stagemesh.shared.security.reloaded import read_secret

KEY_VARIABLE: Final = "STAGEMESH_API_KEY"
_KEY: Final = re.compile(r"[A-Za-z0-9._~+/=-]{1,256}")
_SECTION: Final = "--"


@dataclass(frozen=True, slots=True)
class ClientFiles:
    """Empty for what there is not. With `ca_file` TLS is spoken; `cert_file` and `key_file` are shown to servers that
    ask. `server_name` is what certificates of the mesh's inner processes are for, if not their hosts."""

    api_key_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""

    def material(self, log: Log) -> Material | None:
        """Raises Rejected, naming the option."""
        if bool(self.cert_file) != bool(self.key_file):
            raise Rejected("--key-file" if self.cert_file else "--cert-file", "a certificate goes with its key")
        if not self.ca_file:
            if self.cert_file:
                raise Rejected("--ca-file", "is needed where a certificate is shown")
            return None
        cert, key = (Path(self.cert_file), Path(self.key_file)) if self.cert_file else (None, None)
        return Material(TlsFiles(cert, key, Path(self.ca_file), _SECTION, _SECTION), log)

    def api_key(self) -> str:
        """From the file, else from $STAGEMESH_API_KEY; empty if there is none. Rejected never quotes it."""
        source = "--api-key-file" if self.api_key_file else KEY_VARIABLE
        said = os.environ.get(KEY_VARIABLE, "")
        if self.api_key_file:
            said = read_secret(Path(self.api_key_file), source).decode(errors="replace")
        key = said.strip()
        if key and not _KEY.fullmatch(key):
            raise Rejected(source, "is no API key: one line, as `stagemesh keys add` has printed it")
        return key
