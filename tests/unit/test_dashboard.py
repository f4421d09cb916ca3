"""The dashboard and the alerts name metrics that are declared, as their kind is shown, with labels that they have."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from stagemesh.shared.obs import metrics
from stagemesh.shared.obs.metrics import PREFIX, Kind, Metric
from tests.support.queries import FOLDER, alerts, names, panels, queries, selected

SHOWN = {
    Kind.COUNTER: ("_total",),
    Kind.GAUGE: ("",),
    Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}
DECLARED = {
    f"{PREFIX}{metric.name}{suffix}": metric
    for metric in vars(metrics).values()
    if isinstance(metric, Metric)
    for suffix in SHOWN[metric.kind]
}
GROUPED = re.compile(r"by \(([^)]*)\) \((?:rate\()?(stagemesh_\w+)")


def test_the_committed_dashboard_is_what_its_table_makes() -> None:
    done = subprocess.run([sys.executable, FOLDER / "make.py", "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("where", "expression"), list(queries()), ids=lambda text: text[:40])
def test_a_query_names_metrics_that_are_declared_and_labels_that_they_have(where: str, expression: str) -> None:
    assert names(expression) <= set(DECLARED), where
    for metric, label, _ in selected(expression):
        assert label in (*DECLARED[metric].scope.value, *DECLARED[metric].labels), where
    for labels, metric in GROUPED.findall(expression):
        known = {"le", *DECLARED[metric].scope.value, *DECLARED[metric].labels}
        assert set(labels.split(", ")) <= known, where


def test_panels_do_not_overlap_and_alerts_say_what_to_do() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels())
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) > 0
    assert max(x for x, _ in cells) < 24
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]
        assert rule["annotations"]["description"], rule["alert"]
