"""What two moments of a mesh say about the time between them, and how it looks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from stagemesh.shared.cli.top import _bar
from stagemesh.shared.errors import ProtocolViolation
from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.entry import Entry
from stagemesh.shared.obs.metrics import Metric, Sample
from stagemesh.shared.obs.reading import Readings, decode_readings, encode_readings
from stagemesh.shared.obs.tally import Tally
from stagemesh.shared.obs.top import Moment, view

Values = Mapping[Metric, float | Mapping[str, float]]
INSTANCE = Entry("instance", "decode-0", 9.0, "draining", details={"role": "decode", "epoch": 1})


def readings(values: Values) -> Readings:
    samples = [
        Sample(metric, number, (label,) if label else ())
        for metric, value in values.items()
        for label, number in (value.items() if isinstance(value, Mapping) else [("", value)])
    ]
    return decode_readings(encode_readings(samples))


def test_rates_are_what_counters_have_grown_by_in_that_time() -> None:
    was = {
        "router": readings({metrics.TOKENS: {"generated": 100, "prompt": 50}}),
        "decode-0/0": readings({metrics.FORWARD_SECONDS: 3.0, metrics.BUBBLE_SECONDS: 1.0, metrics.STAGE_STEPS: 10}),
    }
    now = {
        "router": readings(
            {
                metrics.TOKENS: {"generated": 180, "prompt": 50},
                metrics.LIVE_REQUESTS: 2,
                metrics.WAITING_REQUESTS: {"turn": 3, "ticket": 0},
            }
        ),
        "broker": readings({metrics.TICKETS: {"filling": 2, "opened": 0}}),
        "decode-0/0": readings(
            {
                metrics.FORWARD_SECONDS: 4.5,
                metrics.BUBBLE_SECONDS: 1.25,
                metrics.STAGE_STEPS: 50,
                metrics.RESIDENTS: 4,
                metrics.DECODED_TOKENS: 80,
                metrics.SEQUENCES: {"running": 4, "reserved": 1, "retracted": 2, "finished": 7},
                metrics.PAGES: {"used": 6, "free": 4},
                metrics.MICROBATCHES: 2,
                metrics.RETRACTIONS: 1,
                metrics.RECOMPUTED: 2,
            }
        ),
    }
    requests = [Entry("request", f"r{age}", float(age), "decoding") for age in (1, 5, 3)]
    found = view(Moment(10.0, was), Moment(12.0, now, (*requests, INSTANCE), {"prefill-0/0": "away"}), 2)
    assert (found.tokens_per_s, found.prompt_tokens_per_s, found.live) == (40.0, 0.0, 2)
    assert (found.waiting, found.tickets) == ({"turn": 3}, {"filling": 2})
    assert [entry.name for entry in found.requests] == ["r5", "r3"]
    assert dict(found.silent) == {"prefill-0/0": "away"}
    (stage,) = found.stages
    assert (stage.name, stage.steps_per_s, stage.busy, stage.bubble) == ("decode-0/0", 20.0, 0.75, 0.125)
    (instance,) = found.instances
    assert (instance.role, instance.state, instance.running, instance.waiting) == ("decode", "draining", 4, 3)
    assert (instance.microbatches, instance.tokens_per_s, instance.retractions) == (2, 40.0, 3)
    assert dict(instance.pages) == {"used": 6, "free": 4}


def test_a_process_that_was_started_again_counts_from_nothing() -> None:
    was = {"router": readings({metrics.TOKENS: {"generated": 1000}})}
    now = {"router": readings({metrics.TOKENS: {"generated": 10}})}
    assert view(Moment(0.0, was), Moment(1.0, now), 0).tokens_per_s == 0.0


def test_an_instance_whose_head_is_silent_is_shown_all_the_same() -> None:
    found = view(Moment(0.0, {}), Moment(1.0, {}, (INSTANCE,)), 0)
    assert [(i.name, i.running, i.pages) for i in found.instances] == [("decode-0", 0, {})]


def test_histograms_are_left_out_and_noise_is_refused() -> None:
    tally = Tally((1.0,))
    assert encode_readings([Sample(metrics.REQUEST_SECONDS, tally.snapshot()), Sample(metrics.SESSIONS, 2)]) == (
        b'[{"name":"sessions","labels":[],"value":2.0}]'
    )
    for noise in (b"", b"{}", b'[{"name":1}]', b"[" * 100_000):
        with pytest.raises(ProtocolViolation, match="no readings"):
            decode_readings(noise)


@pytest.mark.parametrize(
    ("busy", "bubble", "bar"),
    [(0.0, 0.0, "          "), (1.0, 0.5, "##########"), (0.5, 0.2, "#####--   "), (0.6, 0.6, "######----")],
)
def test_a_bar_is_as_long_as_the_time_is(busy: float, bubble: float, bar: str) -> None:
    assert _bar(busy, bubble, 10) == bar
