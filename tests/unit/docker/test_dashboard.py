"""The dashboard asks only for metrics and labels that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from app.fleet.overview import PoolQueue
from app.telemetry import fleet
from app.telemetry.metrics import WebMetrics
from tests.unit.docker.dockerfile import ROOT
from workers import metrics

NAME = re.compile(r"\btinworks_\w+")
SUFFIXES = ("_total", "_bucket", "_count", "_sum")
EVERYWHERE = {"instance", "job", "le"}


def panels() -> list[dict[str, Any]]:
    loaded: dict[str, Any] = json.loads((ROOT / "docker" / "grafana" / "tinworks.json").read_text())
    return [panel for panel in loaded["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """Every family that a web process shows, and its labels."""
    found: dict[str, set[str]] = {}
    for registry, extra in ((metrics.REGISTRY, {"worker", "pool"}), (WebMetrics().registry, set())):
        for collector in registry._collector_to_names:
            family = next(iter(collector.collect()))
            found[family.name] = set(getattr(collector, "_labelnames", ())) | extra
    for family in fleet._of_queues([PoolQueue("p", 1, 1.0, 1, 1)]):
        found[family.name] = {"pool"}
    found["tinworks_workers"] = {"pool", "role", "state"}
    for name in ("tinworks_unfinished_samples", "tinworks_sample_age_seconds"):
        found[name] = {"pool"}
    return found | {"tinworks_database_up": set(), "tinworks_redis_up": set()}


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_panels_ask_for_what_exists(panel: dict[str, Any], known: dict[str, set[str]]) -> None:
    for target in panel["targets"]:
        query = target["expr"]
        labels: set[str] = set()
        for name in NAME.findall(query):
            family = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
            assert family in known or name in known, name
            labels |= known.get(name, known.get(family, set()))
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
        matched = {label for group in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)=~?\"", group)}
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert grouped | matched <= labels | EVERYWHERE, query
        assert shown <= grouped | {"worker"}, target["legendFormat"]
        assert query.count("(") == query.count(")")


def test_every_figure_of_a_worker_is_on_the_dashboard(known: dict[str, set[str]]) -> None:
    text = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    missing = [name for name in known if name not in text]
    assert missing == []


def test_ids_are_unique() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
