"""Database, broker and blobs, asked as the processes will ask them."""

from __future__ import annotations

import shutil
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import redis
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from celery import Celery
from redis.exceptions import RedisError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from app.db import Database, database_clock
from app.doctor.findings import Finding, cause, failed, ok, warning
from app.errors import StorageUnavailable
from app.fleet.queues import celery_settings
from app.fleet.service import missing_roles
from app.migrate import migration_config
from app.settings import Settings
from app.storage.blobs import BlobExists, BlobStore, LocalBlobStore, get_blob_store
from app.up.network import without_password

_SKEW_S = 2.0
_BAD_SKEW_S = 60.0
_LITTLE_DISK_BYTES = 5 * 2**30


def check_database(settings: Settings) -> Iterator[Finding]:
    """Is it there, are all migrations applied, do clocks agree, who serves."""
    database = Database(settings.database_url, pool_size=1)
    try:
        yield from _database(database, settings)
    except SQLAlchemyError as error:
        shown = without_password(settings.database_url)
        todo = "Is DATABASE_URL right, does the server run, and may this user connect?"
        yield failed("database", f"{shown}: {cause(error)}", todo)
    finally:
        database.dispose()


def _database(database: Database, settings: Settings) -> Iterator[Finding]:
    with database.engine.connect() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
    shown = without_password(settings.database_url)
    if database.is_sqlite:
        todo = "Right for one machine; use Postgres for web, workers and beat on several."
        yield warning("database", shown, todo) if settings.s3_bucket else ok("database", shown)
    else:
        yield ok("database", shown)
    newest = ScriptDirectory.from_config(migration_config()).get_current_head()
    if current != newest:
        yield failed("migrations", f"at {current or 'none'}, newest is {newest}", "Run `tinworks migrate`.")
        return
    yield ok("migrations", f"at {current}")
    with database.read() as session:
        before = time.time()
        theirs = float(session.scalar(select(database_clock())) or 0.0)
        ours = (before + time.time()) / 2
    yield _clock("clock", theirs - ours, "the database's")
    missing = missing_roles(database, silence_s=settings.worker_silence_s)
    if missing:
        yield warning("fleet", "; ".join(missing), "Start the workers that are missing (docs/operating.md).")
    else:
        yield ok("fleet", "every model has a train and a sample worker")


def _clock(name: str, ahead_s: float, whose: str) -> Finding:
    seen = f"{whose} is {abs(ahead_s):.2f} s {'ahead of' if ahead_s > 0 else 'behind'} ours"
    todo = "Keep all hosts' clocks in step (chrony, systemd-timesyncd): tokens and signed links have times in them."
    if abs(ahead_s) > _BAD_SKEW_S:
        return failed(name, seen, todo)
    return warning(name, seen, todo) if abs(ahead_s) > _SKEW_S else ok(name, seen)


def check_broker(settings: Settings) -> Iterator[Finding]:
    """Redis as redis-py and as Celery reach it, and whether it may throw our keys away."""
    shown = without_password(settings.redis_url)
    try:
        with redis.Redis.from_url(settings.redis_url, socket_connect_timeout=3.0, socket_timeout=5.0) as client:
            client.ping()
            yield ok("broker", shown)
            yield from _redis_settings(client)
        with Celery(set_as_current=False) as app:
            app.conf.update(celery_settings(settings))
            with app.connection_for_write() as connection:
                connection.ensure_connection(max_retries=0, timeout=5)
        yield ok("broker of celery", "answers")
    except Exception as error:  # redis-py, kombu and ssl each have errors of their own
        todo = "Is REDIS_URL right, and does Redis run?"
        if "CERTIFICATE" in str(error).upper():
            todo = "Its certificate is not trusted: TINWORKS_REDIS_CERT_REQS=none takes one that it has signed itself."
        yield failed("broker", f"{shown}: {cause(error)}", todo)


def _redis_settings(client: redis.Redis) -> Iterator[Finding]:
    try:
        memory: Any = client.info("memory")
        persistence: Any = client.info("persistence")
    except RedisError:
        return
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        todo = "Set `maxmemory-policy noeviction`: else Redis drops samples that clients wait for."
        yield failed("redis memory", f"maxmemory-policy is {policy}", todo)
    else:
        yield ok("redis memory", "maxmemory-policy is noeviction")
    if persistence.get("aof_enabled"):
        yield ok("redis persistence", "append-only file")
    else:
        todo = "`appendonly yes` keeps samples in flight over a restart; without it clients send them again."
        yield warning("redis persistence", "none that keeps the last second", todo)


def check_blobs(settings: Settings) -> Iterator[Finding]:
    """Write, read, list, write once, presign, delete."""
    try:
        store = get_blob_store()
        yield from _blobs(store, settings)
    except (StorageUnavailable, OSError, ValueError) as error:
        todo = "May this user write there? Is it mounted?"
        if settings.s3_bucket:
            todo = "Check TINWORKS_S3_BUCKET, TINWORKS_S3_ENDPOINT_URL and the credentials (AWS_ACCESS_KEY_ID, …)."
        yield failed("blobs", cause(error), todo)


def _blobs(store: BlobStore, settings: Settings) -> Iterator[Finding]:
    where = f"bucket {settings.s3_bucket}" if settings.s3_bucket else str((settings.data_dir / "blobs").resolve())
    key, data = f"doctor/{uuid.uuid4().hex}", uuid.uuid4().bytes
    try:
        store.put(key, data)
        read = store.get(key)
        if read != data or store.size(key) != len(data) or key not in store.list("doctor"):
            yield failed("blobs", f"{where}: what was written is not what is read", "Use another store.")
            return
        yield ok("blobs", f"{where}: writes, reads and lists")
        yield _write_once(store, key)
        yield from _presigned(store, key, data)
    finally:
        store.delete(key)
    if isinstance(store, LocalBlobStore):
        free = shutil.disk_usage(settings.data_dir).free
        seen = f"{free / 2**30:.1f} GiB free"
        todo = "Make room, give checkpoints a life (`tinker checkpoint set-ttl`), or use a bucket."
        yield warning("disk", seen, todo) if free < _LITTLE_DISK_BYTES else ok("disk", seen)


def _write_once(store: BlobStore, key: str) -> Finding:
    try:
        store.put_new(key, b"again")
    except BlobExists:
        return ok("conditional put", "a key that is taken is refused")
    todo = "The bucket does not know `If-None-Match`: use a store that does (S3, MinIO, SeaweedFS, R2)."
    return failed("conditional put", "a key that is taken was written again", todo)


def _presigned(store: BlobStore, key: str, data: bytes) -> Iterator[Finding]:
    url = store.signed_url(key, filename="doctor.bin", expires_in_s=60)
    if url is None:
        yield ok("download links", "signed by web, at TINWORKS_PUBLIC_URL or the address that clients use")
        return
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            same = answer.read() == data
    except (urllib.error.URLError, OSError) as error:
        todo = "Clients fetch checkpoints there: set TINWORKS_S3_PUBLIC_URL to the address by which they reach it."
        yield warning("download links", f"cannot be fetched from here: {cause(error)}", todo)
        return
    yield ok("download links", "signed by the bucket") if same else failed("download links", "other bytes", "")
