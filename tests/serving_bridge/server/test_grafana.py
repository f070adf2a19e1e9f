"""The Grafana dashboard shows metrics that the node has, with labels that they have."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving_bridge.server.metrics import Metrics
from tests.serving_bridge.server.fake_node import FakeStatus, record

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/hlem-node.json").read_text())
# What Prometheus itself adds to every sample of a target.
SCRAPED_LABELS = {"instance", "job"}
WIDTH = 24
"""Columns of Grafana's grid."""


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Label names by sample name, of a node that has served requests."""
    status = FakeStatus()
    metrics = Metrics(status)
    status.records.append(record(0))
    metrics.requests.labels("rest", "served").inc()
    metrics.latency.labels("rest").observe(0.01)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[str]:
    """All PromQL of the dashboard."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    notes = [note["expr"] for note in DASHBOARD["annotations"]["list"] if "expr" in note]
    variables = [
        one["definition"] for one in DASHBOARD["templating"]["list"] if "definition" in one
    ]
    return panels + notes + variables


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_exists(expression: str, labels: dict[str, set[str]]) -> None:
    names = re.findall(r"\bhlem_\w+", expression)
    assert names and set(names) <= set(labels)
    known = set.union(*(labels[name] for name in names)) | SCRAPED_LABELS
    matched = re.findall(r'(\w+)\s*(?:=~|!=|!~|=)\s*"', expression)
    grouped = [
        one.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for one in by.split(",")
    ]
    assert {*matched, *grouped} <= known


def test_every_metric_of_the_node_is_shown(labels: dict[str, set[str]]) -> None:
    whole = " ".join(expressions())
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in labels}
    assert {name for name in families if name not in whole} == set()


def test_counters_and_histograms_are_shown_as_rates() -> None:
    for expression in expressions():
        for name in re.findall(r"hlem_\w+_(?:total|bucket)\b", expression):
            assert re.search(rf"(rate|increase)\({name}", expression), expression


def test_it_is_a_dashboard_that_can_be_imported() -> None:
    assert DASHBOARD["title"] and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 0
    # No data source of somebody's own: the variable is asked for.
    sources = [panel["datasource"]["uid"] for panel in panels]
    sources += [target["datasource"]["uid"] for panel in panels for target in panel["targets"]]
    assert set(sources) == {"${datasource}"}
    for panel in panels:
        assert panel["title"] and panel["description"] and panel["type"] in ("stat", "timeseries")
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0


def test_panels_do_not_lie_on_one_another() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(p["x"] >= 0 and p["x"] + p["w"] <= WIDTH for p in places)
    for a, b in combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        )  # fmt: skip
        assert apart, (a, b)
