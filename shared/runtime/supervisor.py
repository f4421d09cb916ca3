"""`stagemesh up`: every process of a deployment on this machine, started, watched and stopped in order.

starting the bus --> starting --all ready--> serving --SIGTERM, SIGINT, SIGHUP--> stopping --> over (exit code 0)
       |                |                       |  ^
       |                |                       |  `--a child ended, or it was asked for: its group is started again
       +----------------+--a child ended, or the time to start is up; a child ended too often
                               --> stopping --> over (exit code 1)

One thread, no asyncio and no grpc, so that forking is safe: children inherit what was imported here (torch) and
nothing that runs.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from enum import Enum
from pathlib import Path

from stagemesh.shared.errors import Retryable
from stagemesh.shared.runtime.child import Child
from stagemesh.shared.runtime.children import Children
from stagemesh.shared.runtime.control import CONTROL_SOCKET, ControlSocket
from stagemesh.shared.runtime.drain import CLOSE_GRACE_S, DrainSchedule, Stop
from stagemesh.shared.runtime.exits import EXIT_FAILED, ExitAction, describe_exit, on_exit
from stagemesh.shared.runtime.nats_server import NATS_SPEC, listen_address, says_ready, says_refusal
from stagemesh.shared.runtime.notify_socket import NotifySocket
from stagemesh.shared.runtime.options import UpOptions, preload
from stagemesh.shared.runtime.plan import STOP_ORDER
from stagemesh.shared.runtime.planned import Planned
from stagemesh.shared.runtime.ready import ReadyFile, ready_text
from stagemesh.shared.runtime.reporter import Reporter
from stagemesh.shared.runtime.reports import Reports
from stagemesh.shared.runtime.restarts import MAX_FALLS, WITHIN_S, Restarts, group_of
from stagemesh.shared.runtime.signals import STOP_SIGNALS, SignalPipe, watched_signals
from stagemesh.shared.runtime.starter import Starter
from stagemesh.shared.runtime.watch import Watch


class Phase(Enum):
    STARTING_BUS = "starting the bus"
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    OVER = "over"


def supervise(options: UpOptions, reporter: Reporter) -> int:
    """Runs the deployment until it is stopped or fails; the exit code. For the main thread, which must be the only one.

    Raises Rejected before anything is started.
    """
    with ExitStack() as stack:
        pipe = stack.enter_context(watched_signals())
        notify = NotifySocket(Path(options.config.mesh.run_dir) / "notify.sock")
        stack.callback(notify.close)
        selector = stack.enter_context(selectors.PollSelector())  # no descriptor of its own to leak into children
        stack.callback((children := Children()).kill_all)
        watch = Watch(children, selector, options.limits)
        stack.callback(watch.close)
        reports = Reports(children)
        stack.callback(reports.close)
        control = ControlSocket(Path(options.config.mesh.run_dir) / CONTROL_SOCKET, selector)
        stack.callback(control.close)
        ready_file = ReadyFile(options.ready_file, reporter.error)
        stack.callback(ready_file.remove)
        return Supervisor(
            options, reporter, pipe, notify, selector, children, watch, reports, control, ready_file
        ).run()


class Supervisor:
    """The states and what moves them. What it is given is closed by whoever made it."""

    def __init__(
        self,
        options: UpOptions,
        reporter: Reporter,
        pipe: SignalPipe,
        notify: NotifySocket,
        selector: selectors.BaseSelector,
        children: Children,
        watch: Watch,
        reports: Reports,
        control: ControlSocket,
        ready_file: ReadyFile,
    ) -> None:
        self._options, self._report = options, reporter
        self._pipe, self._notify, self._selector = pipe, notify, selector
        self._children, self._watch, self._reports = children, watch, reports
        self._control, self._ready_file = control, ready_file
        self._starter = Starter(
            options,
            children,
            reports,
            selector,
            notify.path,
            own_fds=lambda: self._own_fds,
            on_output=self._on_output,
            listen=self._on_notifications,
        )
        self._phase = Phase.STARTING_BUS
        self._drain: DrainSchedule | None = None
        self._restarts = Restarts()
        self._planned = Planned(
            control, children, self._restarts, refusal=self._refusal, stop_timeout_s=self._stop_timeout_s
        )
        self._returning: set[str] = set()  # groups that were started again and are not ready yet
        self._deadline = time.monotonic() + options.startup_timeout_s
        self._exit_code = 0

    def run(self) -> int:
        self._selector.register(self._pipe, selectors.EVENT_READ, self._on_signals)
        self._selector.register(self._notify, selectors.EVENT_READ, self._on_notifications)
        self._starter.bus()
        preload(self._options.preload)
        while True:
            self._advance(time.monotonic())
            if self._phase is Phase.OVER:
                return self._exit_code
            deadline = self._next_deadline
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(timeout):
                key.data()

    @property
    def _next_deadline(self) -> float | None:
        return min((at for at in self._deadlines(time.monotonic()) if at is not None), default=None)

    def _deadlines(self, now: float) -> Iterator[float | None]:
        if self._drain is not None:
            yield from (self._drain.deadline, self._watch.stopped_deadline_s)
            return
        yield self._watch.deadline_s()
        if self._phase is Phase.SERVING:
            yield from (self._restarts.deadline(now), self._starter.nats_files.deadline(now))
            yield from (self._control.deadline_s, self._ready_file.deadline_s)
        else:
            yield self._deadline

    @property
    def _own_fds(self) -> list[int]:
        ours = (self._pipe.read_fd, self._pipe.write_fd, self._notify.fileno())
        return [*ours, *self._watch.fds, *self._reports.fds, *self._control.fds]

    def _on_signals(self) -> None:
        numbers = self._pipe.receive()
        for number in numbers:
            if number in STOP_SIGNALS:
                self._on_stop_signal(number)
        if signal.SIGCHLD in numbers:
            self._on_notifications()  # what those have said last that have ended
            for child in self._children.reap():
                self._on_child_exit(child)
            for said in self._reports.reap():
                self._report.error(said)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._drain is None:
            self._report.info(f"{number.name}: draining; once more to stop at once")
            self._stop(exit_code=0)
        else:
            self._report.info(f"{number.name}: stopping at once")
            self._exit_code = EXIT_FAILED
            self._send(self._drain.cut_off())

    def _on_output(self, child: Child) -> None:
        fd = child.output_fd
        lines = child.read_lines()
        if fd is not None and child.output_fd is None:
            self._selector.unregister(fd)
        if child.spec is not NATS_SPEC:
            self._report.output(child.spec.name, lines)
            return
        self._report.output(child.spec.name, [line for line in lines if says_refusal(line)])
        for line in lines:
            child.address = listen_address(line) or child.address
            child.is_ready = child.is_ready or says_ready(line)

    def _on_notifications(self) -> None:
        while (received := self._notify.receive()) is not None:
            pid, lines = received
            if (child := self._children.with_pid(pid)) is not None:
                self._watch.take(child, lines, time.monotonic())
                for said in (*child.hear(lines), *self._planned.hear(child, lines)):
                    self._report.info(said)

    def _on_child_exit(self, child: Child) -> None:
        self._on_output(child)
        if child.output_fd is not None:  # something that it started still holds the pipe
            self._selector.unregister(child.output_fd)
            child.close()
        assert child.wait_status is not None
        said = f"{child.spec.name} {describe_exit(child.wait_status)}"
        said += f" ({child.status})" if child.has_cut_off else ""
        if (epoch := self._reports.ended(child)) is not None and self._phase is Phase.SERVING:
            self._starter.report_reaped(child.spec.instance or "", epoch)
        is_stopping, is_serving = self._drain is not None, self._phase is Phase.SERVING
        match on_exit(child.wait_status, is_stopping=is_stopping, is_serving=is_serving):
            case ExitAction.RESTART if self._restarts.died(group_of(child.spec), time.monotonic()):
                (self._report.info if self._planned.ended(child, said) else self._report.error)(said)
            case ExitAction.RESTART:
                self._fail(f"{said}: {MAX_FALLS} falls within {WITHIN_S:g} s are too many", child)
            case ExitAction.STOP_ALL:
                self._fail(said, child)
            case ExitAction.REPORT:
                self._report.error(f"{said} while stopping")
                self._exit_code = EXIT_FAILED
            case ExitAction.IGNORE:
                pass

    def _advance(self, now: float) -> None:
        """Whatever the events so far allow."""
        self._kill_stuck(now)
        if self._phase is Phase.STARTING_BUS and self._children.are_ready:
            self._starter.services()
            self._phase = Phase.STARTING
        elif self._phase is Phase.STARTING and self._children.are_ready:
            if not self._starter.front():
                self._serve()
        elif self._phase is Phase.SERVING:
            self._restart(now)
            self._control.look(now)
            self._ready_file.look(now)
            self._starter.nats_files.look(self._children.get(NATS_SPEC.name))
        elif self._phase in (Phase.STARTING_BUS, Phase.STARTING) and now >= self._deadline:
            late = [child for child in self._children if not child.is_ready]
            names = ", ".join(f"{child.spec.name} ({child.status})" for child in late)
            self._fail(f"not ready within {self._options.startup_timeout_s:g} s: {names}", *late)
        if self._drain is not None:
            alive = self._children.alive
            self._send(self._drain.step(now, alive))
            if not alive:
                self._phase = Phase.OVER

    def _kill_stuck(self, now: float) -> None:
        # who has been told to end has its deadline, and gives no signs while it closes
        look = self._watch.look if self._drain is None else self._watch.stopped
        for stuck in look(now, self._restarts.falling):
            self._report.error(f"{stuck.name} {stuck.why}")
            self._send([(stuck.name, signal.SIGKILL)])

    def _restart(self, now: float) -> None:
        alive = frozenset(group_of(child.spec) for child in self._children if child.is_alive)
        due = self._restarts.due(now, alive)
        for child in self._children:
            group = group_of(child.spec)
            if group in due.hanging:
                self._send([(child.spec.name, signal.SIGKILL)] if child.is_alive else [])
            elif group in due.again:
                self._returning.add(group)
                self._starter.again(child)
        for group in sorted(self._returning):
            if all(child.is_ready for child in self._children if group_of(child.spec) == group):
                self._returning.discard(group)
                self._ready_file.renew(self._starter.config, list(self._children), now)
                self._report.info(f"{group} is back, start {self._restarts.counts[group] + 1}")
                for instance, epoch in self._reports.epochs.items() if group == "broker" else ():
                    self._starter.report_reaped(instance, epoch)
                self._planned.back(group)

    def _serve(self) -> None:
        try:
            self._ready_file.write(self._starter.config, list(self._children))
        except Retryable as error:
            self._fail(f"ready_file: {error}")
            return
        self._phase = Phase.SERVING
        self._report.announce(ready_text(self._starter.config))

    def _refusal(self) -> str:
        return "" if self._phase is Phase.SERVING else f"the mesh is {self._phase.value}"

    def _fail(self, why: str, *children: Child) -> None:
        self._report.error(why)
        for child in children:
            self._report.tail(child.spec.name, list(child.tail))
        self._stop(exit_code=EXIT_FAILED)

    def _stop(self, *, exit_code: int) -> None:
        self._phase = Phase.STOPPING
        self._exit_code = exit_code
        self._drain = DrainSchedule(
            Stop(child.spec.name, STOP_ORDER[child.spec.service], self._stop_timeout_s(child))
            for child in self._children
            if child.is_alive
        )

    def _stop_timeout_s(self, child: Child) -> float:
        drains = child.is_ready and child.spec is not NATS_SPEC  # a service keeps the drain timeout by itself
        return CLOSE_GRACE_S + (self._starter.config.engine.drain_timeout_s if drains else 0.0)

    def _send(self, signals: list[tuple[str, signal.Signals]]) -> None:
        for name, number in signals:
            if number is signal.SIGKILL:
                self._report.error(f"{name} is killed")
            self._children[name].send(number)
