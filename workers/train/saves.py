"""Saves of planned operations: the files, then the rows that the operation's commit writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from sqlalchemy.orm import Session

from app.audit import service as audit
from app.checkpoints import service as checkpoints
from app.db import Database
from app.errors import InvalidRequest
from app.sampling.models import SamplingSession
from app.storage.blobs import BlobStore, new_blob_id
from workers.model.engine import Engine
from workers.model.export import exported_files
from workers.train import snapshots
from workers.train.effects import Effect, state_of
from workers.train.slots import Slot
from workers.train.snapshots import SnapshotFiles


class Saver:
    """Saves the state of one engine's runs to one blob store."""

    def __init__(self, engine: Engine, database: Database, blobs: BlobStore) -> None:
        self._engine = engine
        self._base = engine.base
        self._database = database
        self._blobs = blobs

    def save(self, effect: Effect, slot: Slot, body: dict[str, Any]) -> None:
        """`save_weights`: all that training resumes from, under a name."""
        name = self._free_name(slot, checkpoints.TRAINING, body)
        self._engine.collect_gradients([state_of(slot).adapter])
        files = snapshots.state_files(state_of(slot), self._base, seq_id=effect.operation.seq_id)
        snapshots.write(self._blobs, files)
        effect.rows.append(self._snapshot_row(effect, slot, files))
        _name(effect, slot, checkpoints.TRAINING, body, files.id)
        path = checkpoints.tinker_path(slot.run.id, checkpoints.TRAINING, name)
        effect.result = orjson.dumps({"path": path, "type": "save_weights"})

    def save_for_sampler(self, effect: Effect, slot: Slot, body: dict[str, Any]) -> None:
        """`save_weights_for_sampler`: the adapter, under a name or as a sampling session's target."""
        name = self._free_name(slot, checkpoints.SAMPLER, body) if body["path"] is not None else None
        snapshot_id = self._sampler_snapshot(effect, slot)
        effect.run_values["sampler_snapshot_id"] = snapshot_id
        result: dict[str, Any] = {"type": "save_weights_for_sampler"}
        if name is not None:
            _name(effect, slot, checkpoints.SAMPLER, body, snapshot_id)
            result["path"] = checkpoints.tinker_path(slot.run.id, checkpoints.SAMPLER, name)
        else:
            row = _sampling_session(slot, body, snapshot_id)
            effect.rows.append(lambda session: _add_if_new(session, row))
            result["sampling_session_id"] = row.id
        effect.result = orjson.dumps(result)

    def save_external(self, effect: Effect, slot: Slot, body: dict[str, Any]) -> None:
        """`save_weights_external`: the adapter as files to download, which name the base model as the client did."""
        name = self._free_name(slot, checkpoints.EXTERNAL, body)
        recipients = body["age_encryption_recipients"]
        adapter = state_of(slot).adapter
        exported = exported_files(adapter, slot.run.base_model, self._base, recipients=recipients)
        files = SnapshotFiles(new_blob_id(), "external", exported)
        snapshots.write(self._blobs, files)
        effect.rows.append(self._snapshot_row(effect, slot, files))
        _name(effect, slot, checkpoints.EXTERNAL, body, files.id)
        path = checkpoints.tinker_path(slot.run.id, checkpoints.EXTERNAL, name)
        result = {"path": path, "size_bytes": files.size_bytes, "type": "save_weights_external"}
        effect.result = orjson.dumps(result)

    def _sampler_snapshot(self, effect: Effect, slot: Slot) -> str:
        """The snapshot of the present weights: a new one, or the one that an earlier save of them made."""
        state = state_of(slot)
        if slot.saved_adapter is None or slot.saved_version != state.counters.version:
            files = snapshots.adapter_files(state.adapter, self._base)
            snapshots.write(self._blobs, files)
            effect.rows.append(self._snapshot_row(effect, slot, files))
            slot.saved_adapter, slot.saved_version = files.id, state.counters.version
        return slot.saved_adapter

    def _free_name(self, slot: Slot, kind: str, body: dict[str, Any]) -> str:
        name: str = body["path"]
        with self._database.read() as session:
            taken = checkpoints.exists(session, slot.run.id, kind, name)
        if taken and not body.get("overwrite"):
            way_out = "overwrite=true replaces it" if "overwrite" in body else "delete it, or choose another name"
            raise InvalidRequest(f"path: the run has a checkpoint {kind}/{name} already; {way_out}")
        return name

    @staticmethod
    def _snapshot_row(effect: Effect, slot: Slot, files: SnapshotFiles) -> Callable[[Session], None]:
        def add(session: Session) -> None:
            checkpoints.add_snapshot(
                session,
                snapshot_id=files.id,
                owner_id=slot.run.owner_id,
                model_id=slot.run.id,
                seq_id=effect.operation.seq_id,
                kind=files.kind,
                size_bytes=files.size_bytes,
            )

        return add


def _name(effect: Effect, slot: Slot, kind: str, body: dict[str, Any], snapshot_id: str) -> None:
    """A checkpoint comes to be: its name, its entry in the audit log, its count."""
    run, seq_id = slot.run, effect.operation.seq_id

    def write(session: Session) -> None:
        path = checkpoints.name_snapshot(
            session,
            owner_id=run.owner_id,
            model_id=run.id,
            kind=kind,
            name=body["path"],
            snapshot_id=snapshot_id,
            ttl_seconds=body["ttl_seconds"],
            user_metadata=body.get("user_metadata"),
        )
        details = {"model_id": run.id, "tinker_path": path, "seq_id": seq_id, "ttl_seconds": body["ttl_seconds"]}
        audit.record(session, run.owner_id, "checkpoints", "checkpoint_save", **details)

    effect.rows.append(write)
    effect.usage["checkpoint"] = 1


def _sampling_session(slot: Slot, body: dict[str, Any], snapshot_id: str) -> SamplingSession:
    run, seq_id = slot.run, body["sampling_session_seq_id"]
    assert run.pool is not None
    return SamplingSession(
        id=f"{run.session_id}:sample:{seq_id}",
        owner_id=run.owner_id,
        session_id=run.session_id,
        seq_id=seq_id,
        base_model=run.base_model,
        pool=run.pool,
        snapshot_id=snapshot_id,
        follows_model_id=run.id if body["kind"] == "inflight" else None,
    )


def _add_if_new(session: Session, row: SamplingSession) -> None:
    if session.get(SamplingSession, row.id) is None:
        session.add(row)
