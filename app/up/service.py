"""The order in which `tinworks up` starts things, and what it tells the person at the terminal."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.settings import Settings
from app.up import CannotStart, commands, network
from app.up.data_dir import DataDir
from app.up.models import BaseModel, group_base_models, worker_roles
from app.up.redis_server import find_redis_server
from app.up.signals import Signals
from app.up.supervisor import Say, StopRequested, Supervisor

REDIS_START_S = 20.0
PROBE_EVERY_S = 0.25
REMIND_EVERY_S = 30.0


@dataclass(frozen=True)
class UpOptions:
    """The options of `tinworks up`. Port 0 takes a free one."""

    host: str
    port: int
    data_dir: Path
    base_models: Sequence[str] = ()


def run(options: UpOptions, *, say: Say) -> None:
    """Run the whole service until Ctrl-C or SIGTERM; return when everything has ended.

    Raises:
        CannotStart: it could not begin; the text says why and what to do.
    """
    data = DataDir(options.data_dir.expanduser().resolve())
    models = group_base_models(options.base_models) or [BaseModel(str(data.tiny_model), ("tiny",))]
    port = options.port or network.free_port(options.host)
    commands.check_working_directory(Path.cwd())
    say = _deaf(say)
    with data.locked(), Signals() as signals:
        network.check_port(options.host, port)
        supervisor = Supervisor(signals, run_dir=data.run, log_dir=data.log, say=say)
        try:
            _Service(supervisor, data, models, host=options.host, port=port, say=say).run()
        except StopRequested:
            say("Stopping (once more: at once) …")
        finally:
            supervisor.stop()
        say("Stopped.")


class _Service:
    """One start of everything."""

    def __init__(
        self, supervisor: Supervisor, data: DataDir, models: list[BaseModel], *, host: str, port: int, say: Say
    ) -> None:
        self._supervisor = supervisor
        self._data = data
        self._models = models
        self._host = host
        self._port = port
        self._url = network.base_url(host, port)
        self._say = say

    def run(self) -> None:
        """Start everything in order, say when it is ready, keep it alive. Only a signal ends it."""
        self._prepare(self._start_redis())
        self._supervisor.start(commands.web(host=self._host, port=self._port))
        for role, model in worker_roles(self._models):
            self._supervisor.start(commands.worker(role, model))
        self._supervisor.start(commands.beat())
        self._say(f"  {'web':<9} {self._url}")
        for role, model in worker_roles(self._models):
            self._say(f"  {role:<9} {model.setting}")
        self._say(f"  {'beat':<9} scheduled jobs")
        self._await_ready()
        while True:
            self._supervisor.tick(60.0)

    def _start_redis(self) -> str:
        """Start the broker unless there is one. Returns its URL."""
        self._say(f"Tinworks starts in {self._data.root} (logs: {self._data.log}).")
        if url := os.environ.get("REDIS_URL"):
            self._say(f"  {'redis':<9} {network.without_password(url)} (yours)")
            return url
        binary, port = find_redis_server(), network.free_port()
        child = self._supervisor.start(commands.redis(binary, self._data, port=port))
        if not self._supervisor.wait_until(lambda: network.answers_ping(port), timeout_s=REDIS_START_S):
            raise CannotStart(f"Redis did not start; see {child.log_path}.")
        url = f"redis://127.0.0.1:{port}/0"
        self._say(f"  {'redis':<9} {url} ({binary})")
        return url

    def _prepare(self, redis_url: str) -> None:
        """Check the settings, bring the database up to date, make the tiny model if it is wanted and missing."""
        os.environ.update(
            commands.shared_environment(
                self._data, host=self._host, port=self._port, redis_url=redis_url, own=os.environ
            )
        )
        settings = Settings()
        if settings.auth == "open" and not network.is_loopback(self._host):
            self._say("  WARNING   TINWORKS_AUTH=open: whoever reaches this address may use the service.")
        steps = [commands.migrate()]
        if self._lacks_tiny_model():
            steps.append(commands.tiny_model(self._data.tiny_model))
        self._supervisor.run_all(steps)
        self._say(f"  {'database':<9} {network.without_password(settings.database_url)}")

    def _lacks_tiny_model(self) -> bool:
        tiny = self._data.tiny_model
        return not tiny.exists() and any(model.source == str(tiny) for model in self._models)

    def _await_ready(self) -> None:
        started = reminded = time.monotonic()
        while True:
            status, missing = network.health(f"{self._url}/api/v1/healthz")
            if status == 200:
                break
            if time.monotonic() - reminded >= REMIND_EVERY_S:
                reminded = time.monotonic()
                self._say(f"Still starting after {reminded - started:.0f} s: {missing or f'healthz answers {status}'}.")
            self._supervisor.wait_until(lambda: False, timeout_s=PROBE_EVERY_S)
        names = ", ".join(name for model in self._models for name in model.names)
        self._say(f"Tinworks is ready: {self._url}  models: {names}")
        key = "tml-local"
        if os.environ["TINWORKS_AUTH"] != "open":
            key = f"$(tinworks keys create me --data-dir {self._data.root})"
        self._say(f"  export TINKER_BASE_URL={self._url} TINKER_API_KEY={key}")
        self._say("  Ctrl-C stops it.")


def _deaf(say: Say) -> Say:
    """A `say` that does not mind a terminal that is gone."""

    def quietly(line: str) -> None:
        with contextlib.suppress(OSError):
            say(line)

    return quietly
