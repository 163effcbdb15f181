"""An audit that the database keeps by itself (SQLite): every change of an operation's state and of a run's position.

Triggers write it in the transaction that they watch, so it holds what was committed, by whomever, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import text

from app.db import Database

_SCHEMA = (
    "CREATE TABLE audit (id INTEGER PRIMARY KEY, model_id TEXT, what TEXT, before TEXT, after TEXT, worker TEXT)",
    """CREATE TRIGGER audit_states AFTER UPDATE OF state ON operations
    BEGIN INSERT INTO audit (model_id, what, before, after, worker)
    VALUES (NEW.model_id, 'state ' || NEW.seq_id, OLD.state, NEW.state, NULL); END""",
    """CREATE TRIGGER audit_results AFTER UPDATE OF result, result_blob, error ON operations
    WHEN OLD.state != 'accepted'
    BEGIN INSERT INTO audit (model_id, what, before, after, worker)
    VALUES (NEW.model_id, 'changed ' || NEW.seq_id, NULL, NULL, NULL); END""",
    """CREATE TRIGGER audit_positions AFTER UPDATE OF applied_seq ON runs
    BEGIN INSERT INTO audit (model_id, what, before, after, worker)
    VALUES (NEW.id, 'position', OLD.applied_seq, NEW.applied_seq, NEW.worker_id || '/' || NEW.epoch); END""",
)


def begin(database: Database) -> None:
    """Audit from now on."""
    with database.write() as session:
        for statement in _SCHEMA:
            session.execute(text(statement))


def assert_exactly_once(database: Database, model_id: str, last: int, *, refused: Collection[int] = ()) -> None:
    """Operations 0 to `last` have taken effect: each once, in their order, and none was told again or otherwise.
    `refused`: those that had failed on arrival."""
    with database.read() as session:
        query = text("SELECT what, before, after FROM audit WHERE model_id = :model_id ORDER BY id")
        entries = [tuple(row) for row in session.execute(query, {"model_id": model_id})]
    moves = [(int(before), int(after)) for what, before, after in entries if what == "position"]
    assert [before for before, _ in moves] == [-1, *(after for _, after in moves[:-1])], moves
    assert all(before < after for before, after in moves) and moves[-1][1] == last, moves
    told = [int(what.split()[1]) for what, _, _ in entries if what.startswith("state")]
    assert told == [seq_id for seq_id in range(last + 1) if seq_id not in refused]
    assert not [what for what, _, _ in entries if what.startswith("changed")]
