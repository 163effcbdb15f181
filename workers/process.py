"""What a worker process consists of: one base model, the loops of its roles, and the thread that shows it is alive."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Sequence

import structlog
from redis import Redis
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.db import Database, get_database
from app.fleet import service as fleet
from app.fleet.base_models import names_to_register, pool_of
from app.settings import Settings, get_settings
from app.storage.blobs import get_blob_store
from app.up import CannotStart
from app.up.models import BaseModel as ServedModel
from app.up.models import parse_base_model
from workers.model.serving import load_engine
from workers.model.tokenizer import store_tokenizer
from workers.sample.adapters import AdapterCache
from workers.sample.engines.native import NativeEngine
from workers.sample.recorder import SampleRecorder
from workers.sample.service import SampleService
from workers.sample.usage import SampleUsage
from workers.threads import prepare_process, share_cores
from workers.train import lease
from workers.train.loop import TrainLoop

logger = structlog.get_logger(__name__)

_STOP_TIMEOUT_S = 20.0
HUNG_EXIT_CODE = 70


class Presence:
    """Renews the worker's leases and its row, on a connection of its own, and ends a process whose pass hangs."""

    def __init__(self, worker: WorkerProcess, settings: Settings) -> None:
        self._worker = worker
        self._settings = settings
        self._database = Database(settings.database_url, pool_size=1)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and delete the worker's row: it leaves on purpose."""
        self._stopping.set()
        self._thread.join(_STOP_TIMEOUT_S)
        try:
            with self._database.write() as session:
                fleet.remove_worker(session, self._worker.worker_id)
        except SQLAlchemyError as error:
            logger.warning("worker_not_removed", error=type(error).__name__)

    def _run(self) -> None:
        while not self._stopping.wait(self._settings.lease_s / 3):
            progress = self._worker.train.progress if self._worker.train else None
            if progress and progress.phase == "pass" and time.monotonic() - progress.since > self._settings.max_pass_s:
                logger.error("pass_hung", seconds=self._settings.max_pass_s)
                os._exit(HUNG_EXIT_CODE)
            try:
                with self._database.write() as session:
                    if self._worker.train:
                        lease.renew(session, worker_id=self._worker.worker_id, lease_s=self._settings.lease_s)
                    values = (
                        {
                            "phase": progress.phase,
                            "resident_runs": progress.resident_runs,
                            "queued_tokens": progress.queued_tokens,
                        }
                        if progress
                        else {}
                    )
                    if not fleet.worker_seen(session, self._worker.worker_id, **values):
                        self._worker.register(session)
            except SQLAlchemyError as error:
                logger.warning("presence_failed", error=type(error).__name__)


class WorkerProcess:
    """This process as a worker of one pool, in one or both roles."""

    def __init__(self, roles: Sequence[str], settings: Settings) -> None:
        self.roles = tuple(roles)
        self._settings = settings
        self._served = _served_model(settings)
        self.pool = pool_of(self._served)
        host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower())[:20].strip("-")
        self.worker_id = f"{host}-{uuid.uuid4().hex[:12]}"
        prepare_process()
        self._threads = share_cores(self.roles, settings.torch_threads)
        self._database = get_database()
        self._engine = load_engine(self.roles, settings, source=self._served.source, threads=self._threads)
        self._base = self._engine.base
        self.train = self._train_loop() if "train" in roles else None
        self.samples = self._sample_service() if "sample" in roles else None
        self._presence = Presence(self, settings)

    def _redis(self) -> Redis:
        return Redis.from_url(self._settings.redis_url, socket_connect_timeout=1.0, socket_timeout=5.0)

    def _train_loop(self) -> TrainLoop:
        return TrainLoop(
            worker_id=self.worker_id,
            pool=self.pool,
            engine=self._engine,
            database=self._database,
            blobs=get_blob_store(),
            redis=self._redis(),
            settings=self._settings,
            threads=max(1, self._threads["train"] // self._settings.local_ranks),
        )

    def _sample_service(self) -> SampleService:
        settings = self._settings
        return SampleService(
            worker_id=self.worker_id,
            pool=self.pool,
            engine=NativeEngine(self._base, decode=self._decode, max_rows=settings.max_running_sequences),
            adapters=AdapterCache(self._base, get_blob_store(), capacity=settings.adapter_cache),
            usage=SampleUsage(self._database),
            recorder=SampleRecorder(self._database),
            redis=self._redis(),
            settings=settings,
            threads=self._threads["sample"],
        )

    def announce(self) -> None:
        """Register model and worker, and begin to work."""
        tokenizer_blob = store_tokenizer(self._base, get_blob_store())
        with self._database.write() as session:
            fleet.register_model(
                session,
                pool=self.pool,
                source=self._served.source,
                facts=self._base.facts,
                names=names_to_register(self._served),
                tokenizer_blob=tokenizer_blob,
            )
            self.register(session)
        self._presence.start()
        if self.train:
            self.train.start()
        if self.samples:
            self.samples.start()
        logger.info("worker_ready", worker_id=self.worker_id, pool=self.pool, roles=self.roles)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._base.tokenizer().decode(list(tokens)))

    def register(self, session: Session) -> None:
        """Write this worker's row."""
        fleet.register_worker(
            session,
            worker_id=self.worker_id,
            pool=self.pool,
            roles=self.roles,
            host=socket.gethostname(),
            pid=os.getpid(),
            slots=self._settings.train_slots if self.train else 0,
        )

    def ring(self, model_id: str) -> None:
        """A run has work."""
        if self.train:
            self.train.ring()

    def take_sample(self, request_id: str) -> None:
        """A sample waits."""
        if self.samples:
            self.samples.take(request_id)

    def stop(self) -> None:
        """Finish what is computing, hand everything back, leave."""
        if self.samples:
            self.samples.stop(_STOP_TIMEOUT_S)
        if self.train:
            self.train.stop(_STOP_TIMEOUT_S)
        self._presence.stop()


def _served_model(settings: Settings) -> ServedModel:
    if not settings.base_model:
        raise SystemExit("TINWORKS_BASE_MODEL is not set: say which model this worker serves, a folder or a hub name")
    try:
        return parse_base_model(settings.base_model)
    except CannotStart as error:
        raise SystemExit(str(error)) from error


_current: WorkerProcess | None = None


def start(roles: Sequence[str]) -> WorkerProcess:
    """Load what the roles need; takes as long as the model takes to load.

    Raises SystemExit whatever goes wrong: Celery logs any other exception of its start-up signals, and goes on without
    what they should have set up.
    """
    global _current
    settings = get_settings()
    try:
        _current = WorkerProcess(roles, settings)
    except Exception as error:
        logger.exception("worker_not_started", roles=roles, base_model=settings.base_model)
        raise SystemExit(f"cannot start a {'/'.join(roles)} worker of {settings.base_model}: {error}") from error
    return _current


def current() -> WorkerProcess:
    """The worker that this process is."""
    if _current is None:
        raise RuntimeError("this process is not a worker")
    return _current


def announce() -> None:
    """Tell the fleet that the worker takes messages now."""
    if _current is not None:
        _current.announce()


def stop() -> None:
    """End the worker's loops."""
    if _current is not None:
        _current.stop()
