"""The queries of the dashboard and of the alerts, and the names that are in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

from tests.support.mesh import ROOT

FOLDER: Final = ROOT / "deploy" / "grafana"
ALERTS: Final = FOLDER / "alerts.yml"
_NAME: Final = re.compile(r"\bstagemesh_\w+")
_SELECTOR: Final = re.compile(r"(stagemesh_\w+)\{([^}]*)\}")


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((FOLDER / "stagemesh.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """(where it is, the expression)"""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for rule in alerts():
        yield rule["alert"], rule["expr"]


def names(expression: str) -> set[str]:
    """Of our metrics, as in a scrape."""
    return set(_NAME.findall(expression))


def selected(expression: str) -> Iterator[tuple[str, str, str]]:
    """(metric, label, value) of each condition on a label of ours."""
    for metric, conditions in _SELECTOR.findall(expression):
        for label, value in re.findall(r'(\w+)="([^"]*)"', conditions):
            yield metric, label, value
