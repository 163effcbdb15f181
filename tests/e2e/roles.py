"""The Procfile as a platform runs it: each line a process of its own that knows only its environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import redis
from sqlalchemy import select

from app.db import Database
from app.fleet.models import Worker
from app.up.guard import kill_group
from tests.e2e import stack
from tests.e2e.service import free_port, wait_until
from tests.services import dies_with_us

ROOT = Path(__file__).parents[2]
READY_S = 90.0
_OURS = ("DATABASE_URL", "REDIS_URL", "PORT")


def read_procfile() -> dict[str, str]:
    """The command of each role."""
    lines = [line.partition(":") for line in (ROOT / "Procfile").read_text().splitlines() if line.strip()]
    return {role.strip(): command.strip() for role, _, command in lines}


class RoleProcess:
    """One started line of the Procfile, in a process group of its own; it dies with the thread that started it."""

    def __init__(self, role: str, command: str, environment: dict[str, str], log: Path) -> None:
        self.role = role
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                dies_with_us(["/bin/sh", "-c", f"exec {command}"]),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        """SIGTERM to the process, as platforms do."""
        self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        """A signal to the process."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """The exit status. Raises TimeoutExpired."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        kill_group(self.pid)
        self._process.wait()


class Deployment:
    """All roles over one database and one Redis. Start processes from the main thread only.

    `model`: the folder of the model that is served as "tiny"; without one a tiny model that `start` makes. `commands`:
    the lines of roles that are other than in the Procfile. `ready_s`: how long `start` waits for health. `environment`
    may be changed until then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        database_url: str,
        redis_url: str,
        model: Path | None = None,
        commands: Mapping[str, str] | None = None,
        ready_s: float = READY_S,
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.database = Database(database_url)
        self.redis: Any = redis.Redis.from_url(redis_url)
        self._commands = read_procfile() | dict(commands or {})
        self._ready_s = ready_s
        self._processes: list[RoleProcess] = []
        if model is None:
            model = folder / "models" / "tiny"
            model.parent.mkdir(parents=True)
        kept = {k: v for k, v in os.environ.items() if k not in _OURS and not k.startswith("TINWORKS_")}
        self.environment = {
            **kept,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "PORT": str(self.port),
            "TINWORKS_BASE_MODEL": f"tiny={model}",
            "TINWORKS_DATA_DIR": str(folder),
            "TINWORKS_AUTH": "keys",
            "TINWORKS_TORCH_THREADS": "1",
        }
        if (servers := stack.current()) is not None:
            self.environment |= servers.new_bucket()

    def start(self) -> None:
        """Make the tiny model, release, start every other role once, wait until healthz answers 200."""
        model = self.environment["TINWORKS_BASE_MODEL"].partition("=")[2]
        maker = subprocess.Popen([sys.executable, "-m", "workers.model.tiny", "--out", model], cwd=ROOT)
        assert self.run("release").wait(READY_S) == 0, self.logs()
        assert maker.wait(READY_S) == 0
        for role in self._commands.keys() - {"release"}:
            self.run(role)
        self.wait_healthy()

    def run(self, role: str) -> RoleProcess:
        """Start a role's line once more."""
        number = sum(process.role == role for process in self._processes)
        process = RoleProcess(role, self._commands[role], self.environment, self.folder / f"{role}.{number}.log")
        self._processes.append(process)
        return process

    def alive(self, role: str) -> list[RoleProcess]:
        """The role's processes that have not ended, oldest first."""
        return [process for process in self._processes if process.role == role and process.is_alive]

    def scale(self, **counts: int) -> None:
        """Start what is missing of these roles and wait until every worker of them has registered."""
        for role, count in counts.items():
            for _ in range(count - len(self.alive(role))):
                self.run(role)
        started = [process for role in counts for process in self.alive(role)]
        wait_until(
            lambda: all(self.worker_id(process) for process in started) or not all(p.is_alive for p in started),
            timeout_s=READY_S,
            what="every worker has registered",
        )
        assert all(process.is_alive for process in started), self.logs()

    def worker_id(self, process: RoleProcess) -> str | None:
        """Under which name a process has registered; None when its row is not there (yet, or any more)."""
        with self.database.read() as session:
            return session.scalar(select(Worker.id).where(Worker.pid == process.pid))

    def process_of(self, worker_id: str) -> RoleProcess:
        """The living process that has registered under this name."""
        return next(p for p in self._processes if p.is_alive and self.worker_id(p) == worker_id)

    def health(self) -> tuple[int, str]:
        """Status and text of healthz; status 0 when nobody answers."""
        try:
            answer = httpx.get(f"{self.base_url}/api/v1/healthz", timeout=5)
        except httpx.HTTPError:
            return 0, ""
        return answer.status_code, answer.text

    def wait_healthy(self) -> None:
        """Wait for healthz 200; what it or the logs said last is in the failure."""
        try:
            wait_until(lambda: self.health()[0] == 200, timeout_s=self._ready_s, what="healthz answers 200")
        except TimeoutError as error:
            raise RuntimeError(f"{self.health()}\n{self.logs()}") from error

    def tinworks(self, *words: str) -> str:
        """Run the `tinworks` command in the deployment's environment; returns its standard output."""
        command = [str(Path(sys.executable).parent / "tinworks"), *words]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def logs(self) -> str:
        """The last lines of every process."""
        ends = [f"--- {p.log.name}\n" + "\n".join(p.log.read_text().splitlines()[-15:]) for p in self._processes]
        return "\n".join(ends)

    def close(self) -> None:
        """Kill everything that still runs."""
        for process in self._processes:
            process.kill()
        self.database.dispose()
        self.redis.close()
