"""Saves of planned operations: a copy of the state in host memory, which a thread writes, and the rows that the
operation's commit adds once it is written (`held`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.audit import service as audit
from app.checkpoints import service as checkpoints
from app.checkpoints import uploads
from app.checkpoints.quota import NewName, release, reserve
from app.db import Database
from app.errors import InvalidRequest
from app.sampling.models import SamplingSession
from app.storage.blobs import BlobStore, new_blob_id
from workers.background import Background
from workers.model.adapter import HostCopy
from workers.model.engine import Engine
from workers.model.export import exported_files
from workers.snapshot_folders import HeldFolder
from workers.spool import Spool
from workers.threads import use_threads
from workers.train import snapshots
from workers.train.effects import Effect, state_of
from workers.train.shared import SharedSnapshots
from workers.train.slots import Slot
from workers.train.snapshots import SnapshotFiles

WRITERS = 2


@dataclass(frozen=True, slots=True)
class _Written:
    """A snapshot whose files are where readers find them. `folder`: in the shared folder."""

    id: str
    kind: str
    size_bytes: int
    folder: HeldFolder | None = None


class Saver:
    """Saves the state of one engine's runs: to a blob store, or, what samplers load, first to the folder that they
    share with us. `quota_bytes`: what the checkpoints of one tenant may have; 0: any number."""

    def __init__(
        self,
        engine: Engine,
        database: Database,
        blobs: BlobStore,
        *,
        spool: Spool,
        shared: SharedSnapshots | None = None,
        quota_bytes: int = 0,
    ) -> None:
        self._engine = engine
        self._base = engine.base
        self._database = database
        self._blobs = blobs
        self._spool = spool
        self._shared = shared
        self._quota_bytes = quota_bytes
        self._writers = Background(WRITERS, "saves", prepare=partial(use_threads, 1))
        self._wake: Callable[[], None] = lambda: None

    def on_written(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, when the files of a save are written. Said once, before the first save."""
        self._wake = wake

    def stop(self, timeout_s: float) -> None:
        """Write what waits; save no more."""
        self._writers.stop(timeout_s)

    def save(self, effect: Effect, slot: Slot, body: dict[str, Any]) -> None:
        """`save_weights`: all that training resumes from, under a name."""
        name = self._free_name(slot, checkpoints.TRAINING, body)
        self._engine.collect_gradients([state_of(slot).adapter])
        copy = snapshots.copy_state(state_of(slot), self._base, seq_id=effect.operation.seq_id)
        snapshot_id = new_blob_id()
        new = _new_name(slot, checkpoints.TRAINING, name)

        def pack(folder: Path | None) -> SnapshotFiles:
            return snapshots.state_files(copy, self._base, snapshot_id, folder=folder)

        self._write(effect, slot, pack, new=new)
        _name(effect, slot, checkpoints.TRAINING, body, snapshot_id)
        path = checkpoints.tinker_path(slot.run.id, checkpoints.TRAINING, name)
        effect.result = orjson.dumps({"path": path, "type": "save_weights"})

    def save_for_sampler(self, effect: Effect, slot: Slot, body: dict[str, Any]) -> None:
        """`save_weights_for_sampler`: the adapter, under a name or as a sampling session's target."""
        name = self._free_name(slot, checkpoints.SAMPLER, body) if body["path"] is not None else None
        new = _new_name(slot, checkpoints.SAMPLER, name) if name is not None else None
        snapshot_id = self._sampler_snapshot(effect, slot, new)
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
        copy, snapshot_id = HostCopy(state_of(slot).adapter), new_blob_id()
        path = checkpoints.tinker_path(slot.run.id, checkpoints.EXTERNAL, name)

        def export(folder: Path | None) -> SnapshotFiles:
            recipients = body["age_encryption_recipients"]
            exported = exported_files(copy, slot.run.base_model, self._base, recipients=recipients)
            files = SnapshotFiles(snapshot_id, "external", exported)
            result = {"path": path, "size_bytes": files.size_bytes, "type": "save_weights_external"}
            effect.result = orjson.dumps(result)
            return files

        self._write(effect, slot, export, new=_new_name(slot, checkpoints.EXTERNAL, name))
        _name(effect, slot, checkpoints.EXTERNAL, body, snapshot_id)

    def _sampler_snapshot(self, effect: Effect, slot: Slot, new: NewName | None) -> str:
        """The snapshot of the present weights: a new one, or the one that an earlier save of them made."""
        state = state_of(slot)
        if slot.saved_adapter is None or slot.saved_version != state.counters.version:
            copy, snapshot_id = HostCopy(state.adapter), new_blob_id()

            def pack(folder: Path | None) -> SnapshotFiles:
                return snapshots.adapter_files(copy, self._base, snapshot_id, folder=folder)

            self._write(effect, slot, pack, new=new, shared=self._shared)
            slot.saved_adapter, slot.saved_version = snapshot_id, state.counters.version
        elif new is not None:
            self._reserve(effect, new, slot.saved_adapter)
        return slot.saved_adapter

    def _write(
        self,
        effect: Effect,
        slot: Slot,
        pack: Callable[[Path | None], SnapshotFiles],
        *,
        new: NewName | None,
        shared: SharedSnapshots | None = None,
    ) -> None:
        """Let a thread make the files, for the checkpoint `new` if they get a name, and put them into the blob store,
        or into the shared folder, from where they are uploaded once the save is committed."""
        seq_id = effect.operation.seq_id

        def write() -> _Written:
            with nullcontext() if shared is not None else self._spool.folder() as folder:
                files = pack(folder)
                if new is not None:
                    self._reserve(effect, new, files.id, files.size_bytes)
                try:
                    return store(files)
                except Exception:
                    self._give_back(effect)
                    raise

        def store(files: SnapshotFiles) -> _Written:
            if shared is not None:
                return _Written(files.id, files.kind, files.size_bytes, shared.add(files))
            snapshots.write(self._blobs, files)
            return _Written(files.id, files.kind, files.size_bytes)

        def add_rows(session: Session) -> None:
            written = writing.result()
            checkpoints.add_snapshot(
                session,
                snapshot_id=written.id,
                owner_id=slot.run.owner_id,
                model_id=slot.run.id,
                seq_id=seq_id,
                kind=written.kind,
                size_bytes=written.size_bytes,
            )
            if written.folder is not None:
                uploads.expect(session, written.id)

        def upload() -> None:
            written = writing.result()
            if shared is not None and written.folder is not None:
                shared.upload(written.id, written.folder)

        writing = self._writers.submit(write)
        writing.add_done_callback(lambda _: self._wake())
        effect.write = writing
        effect.rows.append(add_rows)
        effect.then.append(upload)

    def _reserve(self, effect: Effect, new: NewName, snapshot_id: str, size_bytes: int | None = None) -> None:
        """Take the room of a checkpoint, until its commit. Raises InvalidRequest if its owner has not so much left."""
        if not (limit := self._quota_bytes):
            return
        operation = effect.operation
        with self._database.write() as session:
            reserve(
                session,
                new,
                seq_id=operation.seq_id,
                snapshot_id=snapshot_id,
                size_bytes=size_bytes,
                limit=limit,
            )
        effect.rows.append(lambda session: release(session, operation.model_id, operation.seq_id))

    def _give_back(self, effect: Effect) -> None:
        """Nothing will be named after all."""
        if self._quota_bytes:
            with suppress(SQLAlchemyError), self._database.write() as session:
                release(session, effect.operation.model_id, effect.operation.seq_id)

    def _free_name(self, slot: Slot, kind: str, body: dict[str, Any]) -> str:
        name: str = body["path"]
        with self._database.read() as session:
            taken = checkpoints.exists(session, slot.run.id, kind, name)
        if taken and not body.get("overwrite"):
            way_out = "overwrite=true replaces it" if "overwrite" in body else "delete it, or choose another name"
            raise InvalidRequest(f"path: the run has a checkpoint {kind}/{name} already; {way_out}")
        return name


def _new_name(slot: Slot, kind: str, name: str) -> NewName:
    return NewName(slot.run.owner_id, slot.run.id, kind, name)


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
