"""Metrics without a mesh: counting, exposition over HTTP, sampling, and where the time of a stage goes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.config import MetricsSection
from stagemesh.shared.errors import Bug, Rejected
from stagemesh.shared.obs import exposition as exposition_module
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.exposition import Exposition, serve_metrics
from stagemesh.shared.obs.log import configure
from stagemesh.shared.obs.metrics import Identity, Kind, Metric, Sample, Scope, by_label
from stagemesh.shared.obs.tally import INFINITY, Tally
from stagemesh.shared.runtime.loop import LagSampler
from stagemesh.shared.runtime.monitor import BUSY_CHECK_S, CHECK_SHARE, IDLE_CHECK_S, MOST_PAUSE_S, Monitor
from stagemesh.shared.runtime.notify import Notifier
from stagemesh.shared.runtime.notify_socket import NotifySocket
from stagemesh.shared.security.material import Material
from stagemesh.shared.stage.occupancy import Activity, Occupancy
from tests.support.certificates import EXPIRED, Authority, write_files
from tests.support.scrape import Scrape, fetch

DECLARED = [value for value in vars(metrics).values() if isinstance(value, Metric)]


@given(st.lists(st.floats(-1, 20)))
def test_a_tally_counts_each_value_under_every_bound_that_is_not_below_it(values: list[float]) -> None:
    tally = Tally((0.5, 1.0, 10.0))
    for value in values:
        tally.record(value)
    seen = tally.snapshot()
    assert seen.buckets == tuple(
        (bound, sum(value <= bound for value in values)) for bound in (0.5, 1.0, 10.0, INFINITY)
    )
    assert seen.count == tally.count == sum(tally.counts) == len(values)
    assert seen.total == pytest.approx(sum(values))


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0)])
def test_bounds_must_rise(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must rise"):
        Tally(bounds)


def test_every_metric_is_declared_once_and_says_its_unit() -> None:
    names = [metric.name for metric in DECLARED]
    assert len(set(names)) == len(names) > 30
    for metric in DECLARED:
        assert not metric.name.endswith("_total"), "it is added when the metric is shown"
        assert metric.help.endswith(".") or ":" in metric.help
        assert not {"request_id", "ticket_id", *metric.scope.value} & set(metric.labels)


def scrape(exposition: Exposition) -> Scrape:
    async def serve() -> str:
        async with AsyncExitStack() as stack:
            address = await serve_metrics(stack, exposition.registry, "127.0.0.1", 0)
            return await asyncio.to_thread(fetch, address)

    return Scrape(asyncio.run(serve()))


@pytest.mark.parametrize("said", [b"", b"GET /metrics HT", b"GET /metrics HTTP/1.1\r\nHost: x\r\n", b"\x16\x03\x01\n"])
def test_who_says_nothing_more_is_let_go_without_a_word(
    said: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exposition_module, "SILENT_S", 0.05)

    def visit(address: str) -> None:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as stream:
            stream.sendall(said)
            while stream.recv(1 << 16):
                pass

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            address = await serve_metrics(stack, Exposition(Identity("router")).registry, "127.0.0.1", 0)
            await asyncio.to_thread(visit, address)

    asyncio.run(serve())
    assert capfd.readouterr().err == ""


def test_samples_are_shown_with_the_labels_of_their_process() -> None:
    exposition, tally = Exposition(Identity("decode", "decode-0", 1)), Tally((1.0, 2.0))
    tally.record(1.5)
    exposition.publish([Sample(metrics.STAGE_STEPS, 1)])
    exposition.publish(  # in place of all that was published before
        [
            *by_label(metrics.PAGES, {"free": 3, "used": 4}),
            Sample(metrics.FORWARD_SECONDS, 2.5),
            Sample(metrics.STEP_ROWS, tally.snapshot()),
            Sample(metrics.WATCHERS, 5),
        ]
    )
    seen = scrape(exposition)
    assert seen.of("pages", "state") == {"free": 3, "used": 4}
    assert seen.labels("forward_seconds_total") == [{"role": "decode", "instance": "decode-0", "pp_rank": "1"}]
    assert seen.value("forward_seconds_total") == 2.5
    assert seen.of("step_rows_bucket", "le") == {"1.0": 0, "2.0": 1, "+Inf": 1}
    assert (seen.value("step_rows_sum"), seen.value("step_rows_count")) == (1.5, 1)
    assert seen.labels("watchers") == [{}]
    assert seen.process_value("resident_memory_bytes") > 0
    with pytest.raises(KeyError):
        seen.value("stage_steps_total")


def test_every_declared_metric_can_be_shown() -> None:
    exposition, empty = Exposition(Identity("router")), Tally((1.0,)).snapshot()
    exposition.publish(
        Sample(metric, empty if metric.kind is Kind.HISTOGRAM else 0, ("x",) * len(metric.labels))
        for metric in DECLARED
    )
    seen, suffix = scrape(exposition), {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_count", Kind.GAUGE: ""}
    assert all(seen.value(metric.name + suffix[metric.kind]) == 0 for metric in DECLARED)
    assert seen.labels("sampled_timestamp_seconds") == [{"role": "router", "instance": "", "pp_rank": ""}]


def test_an_identity_gives_as_many_labels_as_the_scope_has() -> None:
    stage = Identity("prefill", "prefill-0", 0)
    assert [stage.values(scope) for scope in Scope] == [
        (),
        ("prefill", "prefill-0"),
        ("prefill", "prefill-0", "0"),
    ]


def test_a_port_that_is_taken_is_refused_by_name_and_nothing_is_left() -> None:
    before = {thread.ident for thread in threading.enumerate()}
    registry = Exposition(Identity("router")).registry

    async def serve_twice() -> None:
        async with AsyncExitStack() as stack:
            address = await serve_metrics(stack, registry, "127.0.0.1", 0)
            port = int(address.rpartition(":")[2])
            with pytest.raises(Rejected, match=rf"metrics.port: cannot listen on 127.0.0.1:{port}: .*in use"):
                await serve_metrics(stack, registry, "127.0.0.1", port)
        async with AsyncExitStack() as stack:  # it is free again
            assert await serve_metrics(stack, registry, "127.0.0.1", port) == address

    asyncio.run(serve_twice())
    assert {thread.ident for thread in threading.enumerate()} <= before


class Subject:
    """A process whose invariant holds or not, as a test says."""

    def __init__(self) -> None:
        self.violated = False
        self.num_checks = self.num_held = 0

    def check_integrity(self) -> None:
        self.num_checks += 1
        if self.violated:
            raise Bug("a page is lost")

    @property
    def held(self) -> Mapping[str, int]:
        return {"things": self.num_held}

    def measure(self) -> Iterable[Sample]:
        return [Sample(metrics.WATCHERS, 7)]


def monitor_of(subject: Subject, **section: object) -> Monitor:
    return Monitor(MetricsSection(**section), Identity("broker"), subject, LagSampler(), {})  # type: ignore[arg-type]


def test_a_monitor_tells_where_it_serves_and_what_it_samples(tmp_path: Path) -> None:
    listener = NotifySocket(tmp_path / "notify.sock")
    subject, notifier = Subject(), Notifier(str(listener.path))
    subject.violated = True
    before_s = time.time()

    async def run() -> tuple[str, Scrape]:
        monitor = monitor_of(subject)
        async with AsyncExitStack() as stack:
            await monitor.start(stack, notifier, configure("broker"))
            monitor.sample(0.0)
            return monitor.address, Scrape(await asyncio.to_thread(fetch, monitor.address))

    address, seen = asyncio.run(run())
    received = listener.receive()
    assert received is not None
    assert received[1] == {"X_METRICS": address}
    assert (seen.value("watchers"), seen.value("integrity_violation")) == (7, 1)
    assert before_s <= seen.value("sampled_timestamp_seconds") <= time.time()
    assert seen.value("loop_lag_seconds_count") == 0
    notifier.close()
    listener.close()


def test_a_monitor_tells_until_when_certificates_are_good_also_of_those_that_come_later(tmp_path: Path) -> None:
    authority = Authority("mesh", timedelta(days=9))
    files = write_files(tmp_path, authority.issue("first", timedelta(days=3)), authority.pem)
    certificates = {"mesh": Material(files, configure("broker")), "public": None}
    monitor = Monitor(MetricsSection(), Identity("broker"), Subject(), LagSampler(), certificates)

    async def days_left() -> dict[str, int]:
        async with AsyncExitStack() as stack:
            await monitor.start(stack, Notifier(None), configure("broker"))
            monitor.sample(0.0)
            seen = Scrape(await asyncio.to_thread(fetch, monitor.address))
        ends = seen.of("certificate_expiry_timestamp_seconds", "side")
        return {side: round((end_s - time.time()) / 86400) for side, end_s in ends.items()}

    assert asyncio.run(days_left()) == {"mesh": 3}
    write_files(tmp_path, authority.issue("second", timedelta(days=20)), authority.pem)
    assert asyncio.run(days_left()) == {"mesh": 9}, "then the authority is the first to go"
    older = Authority("mesh", EXPIRED)
    write_files(tmp_path, authority.issue("third", timedelta(days=2)), older.pem + authority.pem)
    assert asyncio.run(days_left()) == {"mesh": 2}, "of several authorities one is enough"


def test_integrity_is_checked_often_when_idle_and_seldom_when_busy() -> None:
    subject = Subject()
    monitor = monitor_of(subject)
    for now_s, num_held, num_checks in (
        (0.0, 1, 1),
        (IDLE_CHECK_S, 1, 1),
        (IDLE_CHECK_S + 0.5, 0, 2),
        (2 * IDLE_CHECK_S, 0, 2),
        (IDLE_CHECK_S + BUSY_CHECK_S, 1, 2),
        (IDLE_CHECK_S + BUSY_CHECK_S + 0.5, 1, 3),
    ):
        subject.num_held = num_held
        monitor.sample(now_s)
        assert subject.num_checks == num_checks, now_s


def test_what_takes_long_to_check_is_checked_less_often() -> None:
    class Large(Subject):
        def check_integrity(self) -> None:
            super().check_integrity()
            until_s = time.thread_time() + 0.02
            while time.thread_time() < until_s:
                pass

    subject = Large()
    monitor = monitor_of(subject)
    pause_s = 0.02 / CHECK_SHARE
    for now_s, num_checks in ((0.0, 1), (IDLE_CHECK_S, 1), (pause_s - 1, 1), (MOST_PAUSE_S, 2)):
        monitor.sample(now_s)
        assert subject.num_checks == num_checks, now_s


def test_a_process_that_stood_still_in_a_check_is_checked_again_soon() -> None:
    class Stopped(Subject):
        def check_integrity(self) -> None:
            super().check_integrity()
            time.sleep(0.5)

    subject = Stopped()
    monitor = monitor_of(subject)
    for now_s, num_checks in ((0.0, 1), (2 * IDLE_CHECK_S, 2)):
        monitor.sample(now_s)
        assert subject.num_checks == num_checks, now_s


def test_switched_off_it_serves_nothing() -> None:
    async def run() -> str:
        monitor = monitor_of(Subject(), enabled=False)
        async with AsyncExitStack() as stack:
            await monitor.start(stack, Notifier(None), configure("broker"))
            await monitor.run()
        return monitor.address

    assert asyncio.run(run()) == ""


@given(st.lists(st.tuples(st.sampled_from(Activity), st.integers(0, 10**9))))
def test_the_times_of_a_stage_add_up(moves: list[tuple[Activity, int]]) -> None:
    occupancy, now_ns = Occupancy(5), 5
    for activity, delta_ns in moves:
        now_ns += delta_ns
        occupancy.move(activity, now_ns)
    end_ns = now_ns + 7
    spent = {activity: occupancy.seconds(activity, end_ns) for activity in Activity}
    steps = [(Activity.IDLE, 0), *moves, (Activity.IDLE, 7)]
    expected = dict.fromkeys(Activity, 0)
    for (activity, _), (_, delta_ns) in pairwise(steps):
        expected[activity] += delta_ns
    assert {activity: round(seconds * 1e9) for activity, seconds in spent.items()} == expected
