"""The meter: adds what was used to the hour's rows, one statement for however many, in the transaction of its results.

Rows are written in the order of their keys, so that two transactions that write the same ones wait and do not deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, cast

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from app.billing.models import Usage
from app.db import utc_now

UsageKind = Literal["training", "prefill", "prefill_cached", "sample", "checkpoint"]
"""`training`, the two of `prefill` and `sample` count tokens, `checkpoint` counts saves with a name."""


@dataclass(frozen=True, slots=True, order=True)
class Meter:
    """One counter: whose, in which hour, of which session and base model, of what."""

    owner_id: str
    hour: datetime
    session_id: str
    base_model: str
    kind: UsageKind


def this_hour() -> datetime:
    """The beginning of the present hour."""
    return utc_now().replace(minute=0, second=0, microsecond=0)


def summed(counts: Iterable[tuple[Meter, int]]) -> dict[Meter, int]:
    """Counts by meter, without zeros."""
    total: dict[Meter, int] = {}
    for meter, amount in counts:
        if amount:
            total[meter] = total.get(meter, 0) + amount
    return total


_usage = cast(Table, Usage.__table__)


def _adding(insert: Any) -> Any:
    statement = insert(_usage)
    total = _usage.c.amount + statement.excluded.amount
    return statement.on_conflict_do_update(index_elements=list(_usage.primary_key), set_={"amount": total})


_ADD = {"sqlite": _adding(sqlite.insert), "postgresql": _adding(postgresql.insert)}


def add(session: Session, counts: Mapping[Meter, int]) -> None:
    """Add counts to their rows: one statement, none if there are none."""
    if not counts:
        return
    rows = [
        {
            "owner_id": meter.owner_id,
            "hour": meter.hour,
            "session_id": meter.session_id,
            "base_model": meter.base_model,
            "kind": meter.kind,
            "amount": counts[meter],
        }
        for meter in sorted(counts)
    ]
    connection = session.connection()
    connection.execute(_ADD[connection.dialect.name], rows)
