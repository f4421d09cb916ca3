"""A mesh with TLS, API keys and users on NATS: who has no right to be there gets nowhere, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest

from stagemesh.shared.errors import Retryable, StagemeshError, Unauthenticated
from stagemesh.shared.pb import inspect_pb2
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.dial import PLAIN, Dial
from stagemesh.shared.rpc.inspect import INSPECT
from stagemesh.shared.security.keys import make_key
from stagemesh.shared.security.material import Material, TlsFiles
from tests.support.certificates import EXPIRED, Authority, write_files
from tests.support.client import GENERATOR, generate, token_request
from tests.support.mesh import ROOT
from tests.support.running import RunningMesh
from tests.support.secure import LOG, TIMEOUT_S, SecureMesh, shown_certificate
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow
LIMIT_S = 120.0
NEW_TOKENS = 8
PROMPT = [5, 6, 7, 8, 9]
COMMAND = "stagemesh.local.admin.decode-0.drain"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> SecureMesh:
    folder = tmp_path_factory.mktemp("secure")
    return SecureMesh(folder, make_tiny(folder / "model", num_layers=3, max_context=64))


@pytest.fixture(scope="module")
def mesh(secure: SecureMesh) -> Iterator[RunningMesh]:
    with secure.running() as running:
        yield running


class Load:
    """Clients that ask again and again: one over a connection that it keeps, one over a new one for each request."""

    def __init__(self, mesh: RunningMesh, secure: SecureMesh) -> None:
        self._mesh, self._secure = mesh, secure
        self.answers: list[list[int]] = []
        self._answered = asyncio.Event()
        self._over = False

    async def keep(self) -> None:
        async with Client(self._mesh.router, GENERATOR, dial=self._secure.client()) as client:
            while not self._over:
                await self._one(client)

    async def renew(self) -> None:
        while not self._over:
            async with Client(self._mesh.router, GENERATOR, wait=False, dial=self._secure.client("bob")) as client:
                await self._one(client)

    async def _one(self, client: Client) -> None:
        answer = await generate(client, token_request(PROMPT, NEW_TOKENS, ignore_eos=True))
        assert answer.reason == "length"
        self.answers.append(answer.token_ids)
        self._answered.set()

    async def more(self, count: int = 4) -> None:
        """Returns when so many more have been answered."""
        wanted = len(self.answers) + count
        while len(self.answers) < wanted:
            self._answered.clear()
            await self._answered.wait()

    def stop(self) -> None:
        self._over = True


@asynccontextmanager
async def under_load(mesh: RunningMesh, secure: SecureMesh) -> AsyncIterator[Load]:
    """Raises what a request of the load fails with; all have the same answer."""
    load = Load(mesh, secure)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for work in (load.keep(), load.renew()):
            group.create_task(work)
        await load.more()
        yield load
        await load.more()
        load.stop()
    assert len({tuple(answer) for answer in load.answers}) == 1
    assert len(load.answers[0]) == NEW_TOKENS


async def refused(address: str, dial: Dial) -> StagemeshError:
    """The Inspect service is on every port: it is as good as any."""
    async with Client(address, INSPECT, GENERATOR, wait=False, dial=dial) as client:
        with pytest.raises(StagemeshError) as error:
            await client.call("Peers", inspect_pb2.PeersRequest(), timeout_s=TIMEOUT_S)
        with pytest.raises(type(error.value)):
            await generate(client, token_request(PROMPT, NEW_TOKENS))
    return error.value


def strangers(secure: SecureMesh) -> dict[str, Dial]:
    """Who has no place in the mesh, by why."""
    stranger = Authority("stranger")
    mine, theirs = secure.authority.pem, stranger.pem
    for name, issued, ca_pem in (
        ("unknown", stranger.issue("peer"), mine),
        ("expired", secure.authority.issue("peer", EXPIRED), mine),
        ("wary", secure.authority.issue("peer"), theirs),
    ):
        write_files(secure.folder, issued, ca_pem, name)
    bare = Dial(Material(TlsFiles(None, None, secure.ca_file), LOG))
    return {"plain": PLAIN, "without a certificate": bare} | {
        name: secure.peer(name) for name in ("unknown", "expired", "wary")
    }


async def attack_ports(mesh: RunningMesh, secure: SecureMesh) -> None:
    """Every kind of stranger at a broker and at stages, and at the router."""
    key, wrong = secure.keys["alice"], make_key("alice")[0]
    for address in (secure.broker, secure.stages[0], secure.stages[2]):
        for name, dial in strangers(secure).items():
            assert isinstance(await refused(address, dial), Retryable), name
    for name in ("plain", "wary"):
        dial = strangers(secure)[name]
        assert isinstance(await refused(mesh.router, Dial(dial.material, api_key=key)), Retryable)
    for key in ("", wrong, "nobody.x"):
        dial = Dial(secure.client().material, api_key=key)
        said = await refused(mesh.router, dial)
        assert isinstance(said, Unauthenticated)
        assert wrong.partition(".")[2] not in str(said)


async def attack_bus(mesh: RunningMesh, secure: SecureMesh) -> None:
    """The credentials of a stage on an admin subject."""
    url, heard = str(mesh.record["nats"]), list[str]()
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error).lower())

    async def hear(message: Any) -> None:
        heard.append(message.subject)

    admin = await nats.connect(url, **secure.bus("admin").options(url))
    stage = await nats.connect(url, error_cb=note, **secure.bus("stage").options(url))
    try:
        await admin.subscribe("stagemesh.*.admin.>", cb=hear)
        for client in (admin, admin):  # a first answer may be an older one
            await client.flush()
        await stage.publish(COMMAND, b"{}")
        for client in (stage, stage, admin):
            await client.flush()
        assert [error for error in errors if "permissions violation for publish" in error and COMMAND in error]
        assert heard == []
    finally:
        await stage.close()
        await admin.close()


def test_whoever_has_no_right_is_refused_and_nobody_else_disturbed(mesh: RunningMesh, secure: SecureMesh) -> None:
    async def go() -> None:
        async with under_load(mesh, secure):
            await attack_ports(mesh, secure)
            await attack_bus(mesh, secure)
        await mesh.check_idle()

    asyncio.run(go())
    said = "".join(mesh.output)
    assert "calls are refused" in said
    for why in ("WRONG_VERSION_NUMBER", "PEER_DID_NOT_RETURN_A_CERTIFICATE", "certificate has expired", "issuer"):
        assert why in said, why
    assert re.search(rf'user:stage" - Publish Violation - Subject "{COMMAND}"', said)
    assert not [secret for secret in secure.secrets if secret in said]


def test_no_secret_is_in_any_command_line_or_in_what_the_mesh_writes_down(
    mesh: RunningMesh, secure: SecureMesh
) -> None:
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in (*mesh.pids.values(), mesh.process.pid)]
    written = [(secure.folder / "run" / "config.toml").read_text(), json.dumps(mesh.record)]
    assert not [secret for secret in secure.secrets for text in (*lines, *written) if secret in text]
    assert (secure.folder / "run" / "nats.conf").stat().st_mode & 0o777 == 0o600


def command(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("STAGEMESH_")}
    run = [sys.executable, "-m", "stagemesh.shared.cli.main", *arguments]
    environ = {**inherited, "PYTHONPATH": str(ROOT / ".ns"), **(environ or {})}
    return subprocess.run(run, capture_output=True, text=True, env=environ, timeout=LIMIT_S, cwd=ROOT)


def test_commands_take_certificates_and_the_key_from_files_or_the_environment(
    mesh: RunningMesh, secure: SecureMesh
) -> None:
    key_file = secure.folder / "alice.key"
    key_file.write_text(f"{secure.keys['alice']}\n")
    key_file.chmod(0o600)
    router, trust = ["--router", mesh.router], ["--ca-file", str(secure.ca_file), "--api-key-file", str(key_file)]
    done = command(*trust, "generate", *router, "--max-tokens", "2", "--json", "hello")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 2
    refused = command("--ca-file", str(secure.ca_file), "generate", *router, "hello")
    assert (refused.returncode, "no API key" in refused.stderr) == (2, True), refused.stderr
    own = ["--cert-file", str(secure.folder / "mesh.pem"), "--key-file", str(secure.folder / "mesh.key")]
    checked = command(*trust, *own, "check", *router, "--idle", "--json")
    assert checked.returncode == 0, checked.stderr
    assert set(json.loads(checked.stdout)) == {"router", "broker", "prefill-0/0", "prefill-0/1", "decode-0/0"}
    environ = {"STAGEMESH_TLS__CA_FILE": str(secure.ca_file), "STAGEMESH_API_KEY": secure.keys["bob"]}
    sizes = ["--num-prompts", "4", "--input-len", "4", "--output-len", "2"]
    report = secure.folder / "bench.json"
    benched = command("bench", *router, *sizes, "--json", str(report), environ=environ)
    assert benched.returncode == 0, benched.stderr
    assert not [secret for secret in secure.secrets if secret in report.read_text()]


def test_keys_and_certificates_change_under_load_and_no_request_fails(mesh: RunningMesh, secure: SecureMesh) -> None:
    """As an operator changes an authority: first both are trusted, then certificates change, then the old one goes."""
    early, later = secure.authority, Authority("later")
    write_files(secure.folder, early.issue("peer"), early.pem + later.pem, "early")
    new = later.issue("mesh")
    renewed = early.issue("mesh")

    async def shown(cert_pem: bytes) -> None:
        """Every port has it for whoever connects now."""
        files = TlsFiles(secure.folder / "mesh.pem", secure.folder / "mesh.key", None)
        for address in (mesh.router, secure.broker, *secure.stages):
            assert (await asyncio.to_thread(shown_certificate, address, files)) == cert_pem

    async def go() -> None:
        async with under_load(mesh, secure) as load:
            for issued, ca_pem in (
                (renewed, early.pem),
                (renewed, early.pem + later.pem),
                (new, early.pem + later.pem),
                (new, later.pem),
            ):
                secure.write_mesh(issued, ca_pem)
                await shown(issued.cert_pem)
                await load.more(6)
            assert isinstance(await refused(secure.broker, secure.peer("early")), Retryable)
        secure.authority = later
        before = secure.client("alice")
        secure.write_keys("alice", "bob", "carol")
        assert isinstance(await refused(mesh.router, before), Unauthenticated)
        async with Client(mesh.router, GENERATOR, dial=secure.client("carol")) as client:
            assert (await generate(client, token_request(PROMPT, NEW_TOKENS, ignore_eos=True))).reason == "length"

    asyncio.run(go())
    said = "".join(mesh.output)
    assert "changed files are taken" in said
    assert not [secret for secret in secure.secrets if secret in said]
