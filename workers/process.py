"""What a worker process consists of: one base model, the loops of its roles, and what shows that it is alive."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from redis import Redis
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.db import get_database
from app.errors import Unavailable
from app.fleet import service as fleet
from app.fleet.base_models import names_to_register, pool_of
from app.settings import Settings, get_settings
from app.storage.blobs import get_blob_store
from app.telemetry.traces import configure_traces
from app.up import CannotStart
from app.up.models import BaseModel as ServedModel
from app.up.models import parse_base_model
from workers.model.engine import Engine as TrainEngine
from workers.model.serving import load_engine
from workers.model.tokenizer import store_tokenizer
from workers.presence import Presence
from workers.sample.adapter_files import adapter_files
from workers.sample.adapters import AdapterStore
from workers.sample.recorder import SampleRecorder
from workers.sample.service import SampleService
from workers.sample.start import CannotSample, EngineName, engine_name, make_engine, outline
from workers.sample.usage import SampleUsage
from workers.threads import prepare_process, share_cores, use_threads
from workers.train.loop import TrainLoop

logger = structlog.get_logger(__name__)

_STOP_TIMEOUT_S = 20.0
_ANNOUNCE_AGAIN_S = 1.0


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
        configure_traces(settings, f"tinworks-{'-'.join(roles)}")
        self._threads = share_cores(self.roles, settings.torch_threads)
        self._database = get_database()
        self._sampler = _engine_name(self.roles, settings)
        if self._sampler == "native":
            engine = load_engine(self.roles, settings, source=self._served.source, threads=self._threads)
            self._base = engine.base
            self.train = self._train_loop(engine) if "train" in roles else None
        else:
            self._base = outline(settings, self._served.source)
            self.train = None
        self.samples = self._sample_service() if "sample" in roles else None
        self._presence = Presence(self, settings)
        self.on_drain: Callable[[bool], None] = lambda draining: None
        """Called when this worker shall take nothing from its pool's queues any more, or again."""

    def _redis(self) -> Redis:
        return Redis.from_url(self._settings.redis_url, socket_connect_timeout=1.0, socket_timeout=5.0)

    def _train_loop(self, engine: TrainEngine) -> TrainLoop:
        return TrainLoop(
            worker_id=self.worker_id,
            pool=self.pool,
            engine=engine,
            database=self._database,
            blobs=get_blob_store(),
            redis=self._redis(),
            settings=self._settings,
            threads=max(1, self._threads["train"] // self._settings.local_ranks),
        )

    def _sample_service(self) -> SampleService:
        settings = self._settings
        engine = make_engine(self._sampler, self._base, settings, decode=self._decode)
        files = adapter_files(settings, get_blob_store(), self._database)
        return SampleService(
            worker_id=self.worker_id,
            pool=self.pool,
            engine=engine,
            adapters=AdapterStore(
                engine, files, capacity=settings.adapter_cache, prepare_thread=partial(use_threads, 1)
            ),
            usage=SampleUsage(self._database),
            recorder=SampleRecorder(self._database),
            redis=self._redis(),
            settings=settings,
            threads=self._threads["sample"],
            copies=settings.vllm_data_parallel_size if self._sampler == "vllm" else 1,
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
            draining=self._presence.draining,
        )

    @property
    def is_empty(self) -> bool:
        """Whether this worker holds no run and no sample."""
        return not (self.train and self.train.progress.resident_runs) and not (self.samples and self.samples.is_busy)

    def drain(self, draining: bool) -> None:
        """Give everything to others and take nothing, until this is undone."""
        self.on_drain(draining)
        if self.train:
            self.train.drain(draining)
        if self.samples:
            (self.samples.retire if draining else self.samples.resume)()

    def ring(self, model_id: str) -> None:
        """A run has work."""
        if self.train:
            self.train.ring()

    def take_samples(self, request_ids: Sequence[str]) -> None:
        """Samples wait."""
        if self.samples:
            self.samples.take(request_ids)

    def stop(self) -> None:
        """Finish what is computing, as long as the settings allow, hand everything back, leave."""
        logger.info("worker_stopping", worker_id=self.worker_id)
        began = time.monotonic()
        if self.samples:
            self.samples.retire()
        if self.train:
            self.train.stop(_STOP_TIMEOUT_S)
        if self.samples:
            drain_s = self._settings.sample_drain_s - (time.monotonic() - began)
            self.samples.stop(_STOP_TIMEOUT_S, drain_s=drain_s)
        self._presence.stop()

    def hurry(self) -> None:
        """Stop now: samples that have begun go to other workers. From a signal's handler, during `stop` or before."""
        if self.samples:
            self.samples.hurry()


def _engine_name(roles: Sequence[str], settings: Settings) -> EngineName:
    try:
        return engine_name(roles, settings)
    except CannotSample as error:
        raise SystemExit(str(error)) from error


def _served_model(settings: Settings) -> ServedModel:
    if not settings.base_model:
        raise SystemExit("TINWORKS_BASE_MODEL is not set: say which model this worker serves, a folder or a hub name")
    try:
        return parse_base_model(settings.base_model)
    except CannotStart as error:
        raise SystemExit(str(error)) from error


_current: WorkerProcess | None = None
_stopped = False


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


def announce(*, unless: Callable[[], bool] = lambda: False) -> None:
    """Tell the fleet that the worker takes messages now; while the database or the blob store is away again and again,
    `unless` the worker is to end. Raises SystemExit if it can never be: Celery would go on with a worker that nobody
    knows of.
    """
    while _current is not None and not unless():
        try:
            _current.announce()
            return
        except (SQLAlchemyError, Unavailable, OSError) as error:
            logger.warning("worker_not_announced", error=type(error).__name__)
            time.sleep(_ANNOUNCE_AGAIN_S)
        except Exception as error:
            logger.exception("worker_not_announced")
            raise SystemExit(f"the worker cannot begin: {error}") from error


def stop() -> None:
    """End the worker's loops. Doing it again does nothing."""
    global _stopped
    if _current is not None and not _stopped:
        _stopped = True
        _current.stop()


def hurry() -> None:
    """End them without waiting for samples that have begun."""
    if _current is not None:
        _current.hurry()
