"""Fixtures of every suite: real servers that start when a test first asks for one, and databases of a test's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import redis
import structlog
from hypothesis import settings as hypothesis_settings

from app.db import Database, get_database
from app.migrate import upgrade
from app.settings import Settings, get_settings
from app.storage.blobs import BlobStore, LocalBlobStore, get_blob_store
from tests.s3_server import S3Server, s3_server
from tests.services import PostgresServer, RedisServer, postgres_server, redis_server

hypothesis_settings.register_profile("tinworks", deadline=None)  # a busy machine is no failure
hypothesis_settings.load_profile("tinworks")


def _configure_anew(configure: Callable[..., None], **options: object) -> None:
    configure(**{**options, "cache_logger_on_first_use": False})


structlog.configure = partial(_configure_anew, structlog.configure)  # a process of ours configures it once, tests often


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The test run's Redis."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(shared_redis: RedisServer) -> str:
    """URL of an empty Redis."""
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
    return shared_redis.url


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that the test may stop and start."""
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[PostgresServer]:
    """The test run's Postgres."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file, to be copied."""
    path = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgres(shared_postgres: PostgresServer) -> str:
    """Name of a migrated Postgres database, to be copied."""
    name = shared_postgres.create()
    upgrade(shared_postgres.url(name))
    return name


@pytest.fixture
def sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    """URL of a migrated SQLite database of the test's own."""
    return f"sqlite:///{shutil.copy(migrated_sqlite, tmp_path / 'tinworks.db')}"


@pytest.fixture
def postgres_url(shared_postgres: PostgresServer, migrated_postgres: str) -> Iterator[str]:
    """URL of a migrated Postgres database of the test's own."""
    name = shared_postgres.create(migrated_postgres)
    yield shared_postgres.url(name)
    shared_postgres.drop(name)


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """URL of a migrated database of each kind."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A migrated, empty database, on SQLite and on Postgres."""
    own = Database(database_url)
    yield own
    own.dispose()


@pytest.fixture(scope="session")
def shared_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The test run's S3."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["local", "s3"])
def blob_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BlobStore:
    """An empty blob store of each kind."""
    if request.param == "local":
        return LocalBlobStore(tmp_path / "blobs")
    from app.storage.s3 import open_bucket

    server: S3Server = request.getfixturevalue("shared_s3")
    for name, value in server.environment(server.new_bucket()).items():
        monkeypatch.setenv(name, value)
    return open_bucket(Settings(s3_prefix="some/where"))


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Set this process's environment and forget what was made of the old one."""

    def forget() -> None:
        if get_database.cache_info().currsize:
            get_database().dispose()
        for cached in (get_settings, get_database, get_blob_store):
            cached.cache_clear()

    def set_environment(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        forget()

    yield set_environment
    forget()
