"""Metrics of a process that is not scraped: packed by a worker into its row, and shown by web with the worker's name.

So one address shows the whole fleet, whatever network the workers are in, and a worker needs no port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

Packed = list[dict[str, Any]]
"""Families as JSON: `name`, `type`, `help`, and `samples`, each [name, labels, value]."""


def pack(registry: CollectorRegistry) -> Packed:
    """What a registry shows now."""
    return [
        {
            "name": family.name,
            "type": family.type,
            "help": family.documentation,
            "samples": [
                [sample.name, dict(sample.labels), sample.value]
                for sample in family.samples
                if not sample.name.endswith("_created")
            ],
        }
        for family in registry.collect()
    ]


def merged(sources: Iterable[tuple[Mapping[str, str], Sequence[Mapping[str, Any]]]]) -> list[Metric]:
    """The families of several processes, each with the labels that tell it from the others. A text that a newer or
    older worker has packed is taken as far as it can be read.
    """
    families: dict[str, Metric] = {}
    for labels, packed in sources:
        for one in packed:
            family = families.setdefault(one["name"], Metric(one["name"], one["help"], one["type"]))
            for name, its_labels, value in one["samples"]:
                family.add_sample(name, {**its_labels, **labels}, value)
    return list(families.values())
