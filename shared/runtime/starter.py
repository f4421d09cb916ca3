"""What the supervisor forks: the NATS server, the services, and reports of reaped processes."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from pathlib import Path

import msgspec

from stagemesh.shared.config import dump_toml
from stagemesh.shared.runtime.child import Child
from stagemesh.shared.runtime.children import Children
from stagemesh.shared.runtime.gateway_plan import gateway_process
from stagemesh.shared.runtime.nats_config import NatsFiles
from stagemesh.shared.runtime.nats_server import NATS_SPEC
from stagemesh.shared.runtime.options import UpOptions
from stagemesh.shared.runtime.plan import ProcessSpec, run_entry, service_processes
from stagemesh.shared.runtime.reports import Reports
from stagemesh.shared.runtime.rundir import write_atomically


class Starter:
    """`config` is filled in as addresses become known. `own_fds` are the supervisor's descriptors, which no child must
    keep open; `on_output` is called when a child has written something, `listen` after each fork: the socket that
    children notify holds few messages."""

    def __init__(
        self,
        options: UpOptions,
        children: Children,
        reports: Reports,
        selector: selectors.BaseSelector,
        notify_path: Path,
        *,
        own_fds: Callable[[], list[int]],
        on_output: Callable[[Child], None],
        listen: Callable[[], None],
    ) -> None:
        self._options, self._children, self._reports, self._selector = options, children, reports, selector
        self._notify_path, self._own_fds = notify_path, own_fds
        self._on_output, self._listen = on_output, listen
        self.config = options.config
        self.nats_files = NatsFiles(options.config)

    def bus(self, port: str = "-1") -> None:
        """The NATS server, unless the config names one."""
        if self.config.nats.url and NATS_SPEC.name not in self._children.names:
            return
        self._fork(NATS_SPEC, self.nats_files.server(port))

    def services(self) -> None:
        """Everything else; the effective config is in the run dir from now on."""
        if (bus := self._children.get(NATS_SPEC.name)) is not None:
            nats = msgspec.structs.replace(self.config.nats, url=self.nats_files.url(bus.address))
            self.config = msgspec.structs.replace(self.config, nats=nats)
        metrics = msgspec.structs.replace(self.config.metrics, port=0)  # one port cannot serve them all
        self.config = msgspec.structs.replace(self.config, metrics=metrics)
        write_atomically(Path(self.config.mesh.run_dir) / "config.toml", dump_toml(self.config))
        for spec in service_processes(self.config):
            self._fork(spec, self._service(spec))

    def again(self, child: Child) -> None:
        """What has been reaped, where it was."""
        if child.spec is NATS_SPEC:
            self.bus(child.address.rpartition(":")[2])
        else:
            self._fork(child.spec, self._service(child.spec))

    def front(self) -> bool:
        """What stands before the router, whose address is known, and stays. True if something was started."""
        router = msgspec.structs.replace(self.config.router, listen=self._children["router"].address)
        self.config = msgspec.structs.replace(self.config, router=router)
        if (spec := gateway_process(self.config)) is None:
            return False
        if (gateway := self._children.get(spec.name)) is None:
            self._fork(spec, self._service(spec))
            return True
        openai = msgspec.structs.replace(self.config.openai, port=int(gateway.address.rpartition(":")[2]))
        self.config = msgspec.structs.replace(self.config, openai=openai)
        return False

    def report_reaped(self, instance: str, epoch: int) -> None:
        """Tells the broker, without waiting for that."""
        config, target = self.config, self._options.reaped
        if target:
            tell = lambda: run_entry(target, config, instance, epoch)  # noqa: E731 (it is imported in the child only)
            self._reports.fork(instance, tell, self._options.child_environ, self._own_fds())

    def _service(self, spec: ProcessSpec) -> Callable[[], None]:
        config, target = self.config, self._options.entries[spec.service]
        return lambda: run_entry(target, config, spec.instance, spec.pp_rank)

    def _fork(self, spec: ProcessSpec, run: Callable[[], None]) -> None:
        watchdog = {"WATCHDOG_USEC": str(round(self._options.limits.watchdog_s * 1e6))}
        environ = {**self._options.child_environ, **watchdog, "NOTIFY_SOCKET": str(self._notify_path)}
        child = self._children.fork(spec, run, environ, self._own_fds())
        assert child.output_fd is not None
        self._selector.register(child.output_fd, selectors.EVENT_READ, lambda: self._on_output(child))
        self._listen()
