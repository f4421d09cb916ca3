"""A router in this process against heads that compute a toy: the next token is a hash of the seed and of all tokens
before it, so that a request that is run again from the wrong tokens gives a wrong answer. Over gRPC, as in a mesh.

`disturb(request_id, num_tokens)` is asked before each token of decode: an end takes the sequence's KV away. A head that
is lost says nothing any more, and its streams end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from stagemesh.services.router.attempt import Starter
from stagemesh.services.router.directory import MeshView
from stagemesh.services.router.generator import GeneratorService
from stagemesh.services.router.opening import Tickets
from stagemesh.services.router.session import HeadSession
from stagemesh.shared.codec.arrays import to_tuple
from stagemesh.shared.codec.commands import sampling_from_pb
from stagemesh.shared.codec.mesh import instance_to_pb, request_from_pb
from stagemesh.shared.config import RouterSection
from stagemesh.shared.core.commands import TokenLogprobs
from stagemesh.shared.core.directory import InstanceInfo, Role
from stagemesh.shared.core.identity import RequestRef
from stagemesh.shared.core.sampling import SamplingParams
from stagemesh.shared.engine.schedule.output import SequenceEnd, SequenceOutput, end_after
from stagemesh.shared.errors import Retryable
from stagemesh.shared.model.source import open_model
from stagemesh.shared.obs.log import Log
from stagemesh.shared.pb import broker_pb2, instance_pb2
from stagemesh.shared.rpc.broker import BROKER, BrokerClient
from stagemesh.shared.rpc.client import Client
from stagemesh.shared.rpc.guard import Callers
from stagemesh.shared.rpc.server import Server
from stagemesh.shared.runtime.tasks import Tasks
from stagemesh.shared.stage.head import INSTANCE
from stagemesh.shared.stage.sessions import Sessions
from tests.support.doubles import Partial
from tests.support.instances import instance_of, with_last_stage

VOCAB = 320
Disturb = Callable[[str, int], SequenceEnd | None]


def next_token(seed: int, tokens: Sequence[int]) -> int:
    """Never one that ends a request by itself."""
    return zlib.crc32(repr((seed, list(tokens))).encode()) % (VOCAB - 4) + 4


def undisturbed(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(seed, tokens))
    return tokens[len(prompt) :]


class ToyHead(Partial):
    """What prefill and decode have in common. `submits` is everything that was ever submitted, in order."""

    is_lost = False

    def __init__(self, mesh: ToyMesh) -> None:
        self._mesh = mesh
        self.sessions = Sessions(self, 1, Log(logging.getLogger(__name__)))
        self.submits: list[instance_pb2.SessionUp.Submit] = []
        self.live: dict[RequestRef, instance_pb2.SessionUp.Submit] = {}

    async def Session(self, messages: Any, context: Any) -> None:  # noqa: N802
        await self.sessions.serve(messages, context)

    async def PrepareStructure(  # noqa: N802
        self, request: instance_pb2.PrepareStructureRequest, context: Any
    ) -> instance_pb2.PrepareStructureReply:
        return instance_pb2.PrepareStructureReply()

    def on_submit(self, submit: instance_pb2.SessionUp.Submit) -> None:
        self.submits.append(submit)
        self.live[request_from_pb(submit.request)] = submit
        self._mesh.changed.set()

    def on_first_token(self, request: RequestRef, token_id: int) -> None:
        raise AssertionError("not to this head")

    def on_abort(self, request: RequestRef) -> None:
        self.live.pop(request, None)
        self._mesh.changed.set()

    def say(self, request: RequestRef, sampling: SamplingParams, token_id: int, count: int, cached: int = 0) -> bool:
        """False once the sequence is over."""
        end = end_after(sampling, token_id, count)
        logprobs = () if sampling.logprobs is None else (TokenLogprobs(-float(token_id), (), ()),)
        self.sessions.deliver([SequenceOutput(request, (token_id,), end, "", logprobs, cached)])
        return end is None


class ToyPrefill(ToyHead):
    """First tokens at once, unless `paused`."""

    paused = False

    def resume(self) -> None:
        self.paused = False
        for submit in list(self.live.values()):
            self._run(submit)

    def on_submit(self, submit: instance_pb2.SessionUp.Submit) -> None:
        super().on_submit(submit)
        if not (self.paused or self.is_lost):
            self._run(submit)

    def _run(self, submit: instance_pb2.SessionUp.Submit) -> None:
        request, sampling = request_from_pb(submit.request), sampling_from_pb(submit.sampling)
        tokens = list(to_tuple(submit.token_ids))
        assert len(tokens) == submit.prompt_tokens
        token_id = next_token(sampling.seed, tokens)
        self._mesh.prompts[request] = tokens
        if not self.say(request, sampling, token_id, 1, cached=len(tokens) // 2):
            del self.live[request]
            self._mesh.changed.set()


class ToyDecode(ToyHead):
    """A token for each live sequence, step after step."""

    def __init__(self, mesh: ToyMesh, disturb: Disturb) -> None:
        super().__init__(mesh)
        self.disturb = disturb
        self._tokens: dict[RequestRef, list[int]] = {}
        self._work = asyncio.Event()

    def on_first_token(self, request: RequestRef, token_id: int) -> None:
        if request in self.live:
            self._tokens[request] = [*self._mesh.prompts[request], token_id]
            self._work.set()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            self._step()
            await asyncio.sleep(0)

    def _step(self) -> None:
        for request, tokens in list(self._tokens.items()):
            if self.is_lost:
                return
            submit = self.live.get(request)
            if submit is None or not self._decode(request, tokens, submit):
                self.live.pop(request, None)
                del self._tokens[request]
                self._mesh.changed.set()
        if self._tokens:
            self._work.set()

    def _decode(self, request: RequestRef, tokens: list[int], submit: instance_pb2.SessionUp.Submit) -> bool:
        sampling, count = sampling_from_pb(submit.sampling), len(tokens) - submit.prompt_tokens
        if (end := self.disturb(request.request_id, len(tokens))) is not None:
            self.sessions.deliver([SequenceOutput(request, end=end, error="told to")])
            return False
        tokens.append(next_token(sampling.seed, tokens))
        return self.say(request, sampling, tokens[-1], count + 1)


class ToyMesh(Partial):
    """A broker, too: tickets are open until somebody uses or fails them. Last stages are at their heads' addresses, but
    those of the instances named in `dead_stages`, where nobody answers."""

    def __init__(
        self,
        disturb: Disturb = lambda request_id, num_tokens: None,
        *,
        prefill_pages: int = 1 << 16,
        pairs: int = 1,
        dead_stages: Collection[str] = (),
    ) -> None:
        self.prefill_pages, self.dead_stages = prefill_pages, dead_stages
        self.prefills = [ToyPrefill(self) for _ in range(pairs)]
        self.decodes = [ToyDecode(self, disturb) for _ in range(pairs)]
        self.prefill, self.decode = self.prefills[0], self.decodes[0]
        self._losing: asyncio.Queue[str] = asyncio.Queue()
        self.prompts: dict[RequestRef, list[int]] = {}
        self.refusals = 0  # times that a ticket is refused: the broker knows of a loss before the router does
        self.tickets: dict[str, RequestRef] = {}
        self.failed: list[str] = []
        self.changed = asyncio.Event()
        self.placeable = asyncio.Event()  # tickets are given while it is set
        self.placeable.set()
        self.infos: list[InstanceInfo] = []

    @property
    def heads(self) -> dict[str, ToyHead]:
        prefills: dict[str, ToyHead] = {f"prefill-{at}": head for at, head in enumerate(self.prefills)}
        return {**prefills, **{f"decode-{at}": head for at, head in enumerate(self.decodes)}}

    def lose(self, name: str) -> None:
        """From now on it says nothing; its streams end in a moment."""
        self.heads[name].is_lost = True
        self._losing.put_nowait(name)

    async def run(self, servers: Mapping[str, Server]) -> None:
        while True:
            await servers[await self._losing.get()].stop()

    async def Watch(  # noqa: N802
        self, request: broker_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[broker_pb2.DirectoryUpdate]:
        yield broker_pb2.DirectoryUpdate(snapshot=True, changed=map(instance_to_pb, self.infos))
        await asyncio.get_running_loop().create_future()

    async def OpenTicket(  # noqa: N802
        self, request: broker_pb2.OpenTicketRequest, context: Any
    ) -> broker_pb2.OpenTicketReply:
        await self.placeable.wait()
        if self.refusals:
            self.refusals -= 1
            raise Retryable("decode-0@1 is not there (any more)")
        ticket_id = f"t{len(self.tickets)}"
        self.tickets[ticket_id] = RequestRef(request.request_id, request.attempt)
        return broker_pb2.OpenTicketReply(ticket_id=ticket_id)

    async def FailTicket(  # noqa: N802
        self, request: broker_pb2.FailTicketRequest, context: Any
    ) -> broker_pb2.FailTicketReply:
        self.failed.append(request.ticket_id)
        self.changed.set()
        return broker_pb2.FailTicketReply()

    @property
    def unused(self) -> set[str]:
        """Tickets that were opened, are in no submit and were not failed."""
        used = {submit.ticket_id for head in self.heads.values() for submit in head.submits}
        return set(self.tickets) - used - set(self.failed)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.changed.clear()
            await self.changed.wait()

    async def settled(self) -> None:
        """Returns when no head knows a request and no ticket is left."""
        await self.until(lambda: not any(head.live for head in self.heads.values()) and not self.unused)


@asynccontextmanager
async def toy_router(
    folder: Path,
    model: Path,
    mesh: ToyMesh,
    section: RouterSection | None = None,
    *,
    callers: Callers | None = None,
    max_ahead: int = 128,
) -> AsyncIterator[GeneratorService]:
    """A router that knows the toy's instances; `model` is for its tokenizer, of VOCAB tokens."""
    source, log, tasks = open_model(str(model)), Log(logging.getLogger(__name__)), Tasks()
    mesh.infos = [
        with_last_stage(
            dataclasses.replace(
                instance_of(name, role, num_pages=num_pages, max_context=1 << 16), address=f"unix:{folder}/{name}"
            ),
            f"unix:{folder}/{'nobody' if name in mesh.dead_stages else name}",
        )
        for role, num_pages in ((Role.PREFILL, mesh.prefill_pages), (Role.DECODE, 1 << 16))
        for name in mesh.heads
        if name.startswith(role.value)
    ]
    heads = {name: Server({INSTANCE: head}) for name, head in mesh.heads.items()}
    async with AsyncExitStack() as stack:
        for name, server in {"broker": Server({BROKER: mesh}), **heads}.items():
            await server.start(f"unix:{folder}/{name}")
            stack.push_async_callback(server.stop)
        broker = await stack.enter_async_context(Client(f"unix:{folder}/broker", BROKER))
        view = MeshView(broker, "router", lambda info, on_up: HeadSession(info, "router", tasks.spawn, log, on_up), log)
        stack.push_async_callback(view.close)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        works = (tasks.run(), view.run(), mesh.run(heads), *(decode.run() for decode in mesh.decodes))
        children = [group.create_task(work) for work in works]
        for child in children:
            stack.callback(child.cancel)
        while len(list(view)) < len(mesh.infos):
            view.changed.clear()
            await view.changed.wait()
        yield GeneratorService(
            section=section or RouterSection(),
            model="toy",
            dtype="float64",
            config=source.config,
            tokenizer=source.tokenizer(),
            mesh=view,
            start=Starter(view, Tickets(BrokerClient(broker, "router"), tasks.spawn, log), tasks.spawn),
            callers=callers,
            max_ahead=max_ahead,
            log=log,
        )
