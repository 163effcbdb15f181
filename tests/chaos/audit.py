"""The harness's own count: what a service has in its database and store, and what happened there on the way, held
against what its tenants asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from sqlalchemy import func, select

from app.billing.models import Usage
from app.checkpoints.models import Checkpoint, Snapshot
from app.db import Database
from app.runs.models import Operation, Run
from app.storage.blobs import BlobStore
from tests.chaos.tenant_names import END
from tests.faults.audit import violations
from workers.snapshot_files import read

Told = dict[str, Any]
"""What a tenant wrote of one run (`tenants.Ledger.told`)."""


def audit(database: Database, blobs: BlobStore, tenants: dict[str, Sequence[Told]]) -> list[str]:
    """What is wrong: whatever is not there once, in its order, done and counted once. Nothing, if all is well."""
    wrong: list[str] = []
    for name, runs in tenants.items():
        for told in runs:
            wrong += [f"{name}, {told['model_id']}: {what}" for what in _audit_run(database, blobs, told)]
        wrong += [f"{name}: {what}" for what in _audit_usage(database, runs)]
    return wrong


def _audit_run(database: Database, blobs: BlobStore, told: Told) -> Iterable[str]:
    with database.read() as session:
        run = session.get_one(Run, told["model_id"])
        query = select(Operation).where(Operation.model_id == run.id, Operation.seq_id >= 0).order_by(Operation.seq_id)
        rows = list(session.scalars(query))
        names = list(session.scalars(select(Checkpoint.name).where(Checkpoint.model_id == run.id)))
        end = session.scalar(
            select(Snapshot)
            .join(Checkpoint, Checkpoint.snapshot_id == Snapshot.id)
            .where(Checkpoint.model_id == run.id, Checkpoint.name == END)
        )
    yield from violations(database, run.id, len(rows) - 1)
    if [row.seq_id for row in rows] != list(range(len(rows))):
        yield "the log has gaps"
    if (kinds := [row.kind for row in rows]) != told["kinds"]:
        yield f"the log has {len(kinds)} operations, {len(told['kinds'])} were asked for, or they are others"
    if unfinished := [row.seq_id for row in rows if row.state != "done" or row.finished_at is None]:
        yield f"not done: {unfinished}"
    if empty := [row.seq_id for row in rows if row.result is None and row.result_blob is None]:
        yield f"without a result: {empty}"
    finished = [row.finished_at for row in rows if row.finished_at is not None]
    if finished != sorted(finished):
        yield "operations were finished out of order"
    if run.applied_seq != len(rows) - 1:
        yield f"stands at {run.applied_seq}, and its last operation is {len(rows) - 1}"
    if sum(row.tokens for row in rows) != told["tokens"]:
        yield f"the log has {sum(row.tokens for row in rows)} tokens, {told['tokens']} were sent"
    if sorted(names) != sorted(told["names"]):
        yield f"has the checkpoints {sorted(names)}, not {sorted(told['names'])}"
    if end is not None:
        facts = orjson.loads(read(blobs, end.id)["state.json"])
        if facts["step"] != told["steps"]:
            yield f"its optimizer has made {facts['step']} steps, not {told['steps']}"
    elif END in told["names"]:
        yield "its last state is gone"


def _audit_usage(database: Database, runs: Sequence[Told]) -> Iterable[str]:
    """One client made all of a tenant's runs, so its session has exactly what they used: results and usage are written
    in one transaction, and what is counted twice, or not at all, shows."""
    session_ids = {told["model_id"].partition(":train:")[0] for told in runs}
    query = select(Usage.kind, func.sum(Usage.amount)).where(Usage.session_id.in_(session_ids)).group_by(Usage.kind)
    with database.read() as session:
        made = set(session.scalars(select(Run.id).where(Run.session_id.in_(session_ids))))
        used = {kind: int(amount) for kind, amount in session.execute(query).tuples()}
    if made != {told["model_id"] for told in runs}:
        yield f"has the runs {sorted(made)}"
    asked = {"training": sum(told["tokens"] for told in runs), "checkpoint": sum(len(told["names"]) for told in runs)}
    for kind, amount in asked.items():
        if used.get(kind, 0) != amount:
            yield f"{used.get(kind, 0)} of {kind} are counted, {amount} were used"
