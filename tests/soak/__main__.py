"""`python -m tests.soak`: a whole service under steady work for an hour, and whether anything in it grows.

Web, trainer, sampler and beat run as the `Procfile` says, on Postgres and Redis, with times short enough that all that
they keep for a while is forgotten before the warm-up ends. In the end a new service is started beside the old one, and
both do the same work in turns: a machine that is shared becomes slower and faster by itself, but for both.

Exits with 1, and says what grew, if something did.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.roles import ROOT, Deployment
from tests.services import PostgresServer, dies_with_us, postgres_server, redis_server
from tests.soak.growth import Finding, Step, Window, judge, judge_latency, steps_within, tell_latency
from tests.soak.look import Look, look_at
from tests.soak.tenants import TENANTS

SETTINGS = {
    "TINWORKS_AUTH": "open",
    "TINWORKS_TRAIN_SLOTS": "8",
    "TINWORKS_RESULT_TTL_S": "60",
    "TINWORKS_SAMPLE_TTL_S": "60",
    "TINWORKS_SAMPLED_SEQUENCE_TTL_S": "60",
    "TINWORKS_SESSION_SILENCE_S": "30",
    "TINWORKS_SESSION_RETENTION_S": "60",
    "TINWORKS_AUTO_LAST_TTL_S": "60",
    "TINWORKS_ADAPTER_CACHE": "8",
    "OMP_NUM_THREADS": "1",
}
ROLES = ("web", "train", "sample", "beat")
ROUNDS = 15
"""Turns of the old and the new service that count; about eight minutes."""
_WARM_ROUNDS = 3
_TURN_S = 15.0
"""Shorter than a session's silence."""
_EVERY_S = 10.0
_JUDGED_AT_LEAST = 4
"""Minutes: a third of them must be more than one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="before the comparison")
    parser.add_argument("--warm-up", type=float, default=15.0, help="minutes of these that are not judged")
    parser.add_argument("--folder", type=Path, help="where to put data, logs and the table of what was seen")
    given = parser.parse_args(arguments)
    if given.warm_up < 0 or given.minutes - given.warm_up < _JUDGED_AT_LEAST:
        parser.error(f"--minutes: {_JUDGED_AT_LEAST} more than --warm-up at least")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = given.folder or Path(tempfile.mkdtemp(prefix="tinworks-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    findings = soak(folder, seconds=60 * given.minutes, warm_up_s=60 * given.warm_up)
    for finding in findings:
        print(finding.line(), flush=True)
    grown = [finding for finding in findings if finding.grew]
    judged = [finding for finding in findings if finding.bound is not None]
    print(f"{len(judged) - len(grown)} of {len(judged)} are flat; logs and measurements: {folder}", flush=True)
    return 1 if grown else 0


def soak(folder: Path, *, seconds: float, warm_up_s: float, rounds: int = ROUNDS) -> list[Finding]:
    """What was found of each process and each script. Raises RuntimeError if a process or a script ended early."""
    with ExitStack() as stack:
        postgres = stack.enter_context(postgres_server(vacuums=True))
        begin = time.monotonic()
        old = stack.enter_context(Service(folder, postgres))
        looks: list[Look] = []
        while (now := time.monotonic() - begin) < seconds:
            old.check()
            looks.append(look_at(now, old.processes(), postgres, old.redis_url))
            _note(folder / "looks.jsonl", looks[-1])
            time.sleep(max(0.0, begin + len(looks) * _EVERY_S - time.monotonic()))
        hour = {name: [(at - begin, took) for at, took in steps] for name, steps in old.steps().items()}
        (folder / "new").mkdir()
        new = stack.enter_context(Service(folder / "new", postgres))
        by_round = in_turns(old, new, rounds)
    return [
        *judge([look for look in looks if look.at_s >= warm_up_s]),
        *tell_latency({name: [row for row in steps if row[0] >= warm_up_s] for name, steps in hour.items()}),
        *judge_latency(by_round),
    ]


class Service:
    """All roles over a Redis and a database of their own, and the tenants' scripts, which work until the end."""

    def __init__(self, folder: Path, postgres: PostgresServer) -> None:
        self._folder = folder
        self._scripts: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        (folder / "data").mkdir()
        redis = self._stack.enter_context(redis_server(folder))
        self.redis_url = redis.url
        database_url = postgres.url(postgres.create())
        self._running = Deployment(folder / "data", database_url=database_url, redis_url=redis.url)
        self._running.environment |= SETTINGS

    def __enter__(self) -> Service:
        self._stack.callback(self._running.close)
        self._stack.callback(self._end_scripts)
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            self._running.start()
            self._scripts.update({name: self._script(name) for name in TENANTS})
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _script(self, name: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tests.soak.tenants", name, self._running.base_url, str(self._folder)]
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(dies_with_us(words), cwd=ROOT, stdout=log, stderr=log)

    def _end_scripts(self) -> None:
        for script in self._scripts.values():
            script.kill()
            script.wait()

    def processes(self) -> dict[str, int]:
        """Role → process id."""
        return {role: self._running.alive(role)[0].pid for role in ROLES}

    def check(self) -> None:
        """Raises RuntimeError if a process or a script has ended."""
        for role in ROLES:
            if not self._running.alive(role):
                raise RuntimeError(f"{role} has ended\n{self._running.logs()}")
        for name, script in self._scripts.items():
            if script.poll() is not None:
                said = (self._folder / f"{name}.log").read_text()[-2000:]
                raise RuntimeError(f"the script {name} ended, with {script.poll()}: {said}")

    def work_for(self, seconds: float) -> Window:
        """Let the scripts, which are paused, work for a while, and pause them again."""
        began = time.monotonic()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        ended = time.monotonic()
        self.signal(signal.SIGSTOP)
        self.check()
        return began, ended

    def signal(self, number: int) -> None:
        """To all scripts."""
        for script in self._scripts.values():
            script.send_signal(number)

    def steps(self) -> dict[str, list[Step]]:
        """Of each script."""
        return {name: _steps(self._folder / f"{name}.steps") for name in TENANTS}


def in_turns(old: Service, new: Service, rounds: int) -> list[dict[str, tuple[list[float], list[float]]]]:
    """Let two services work in turns, so that what the machine does meets both, and collect what steps took."""
    for service in (old, new):
        service.signal(signal.SIGSTOP)
    windows: list[tuple[Window, Window]] = []
    for number in range(_WARM_ROUNDS + rounds):
        if number % 2:
            its, mine = new.work_for(_TURN_S), old.work_for(_TURN_S)
        else:
            mine, its = old.work_for(_TURN_S), new.work_for(_TURN_S)
        windows.append((mine, its))
    olds, news = old.steps(), new.steps()
    return [
        {name: (steps_within(olds[name], mine), steps_within(news[name], its)) for name in TENANTS}
        for mine, its in windows[_WARM_ROUNDS:]
    ]


def _note(file: Path, look: Look) -> None:
    with file.open("a") as opened:
        opened.write(json.dumps(look.values | {"at_s": round(look.at_s, 1)}) + "\n")


def _steps(file: Path) -> list[Step]:
    """What a script has noted so far."""
    rows = [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(float(at), float(took)) for at, took in rows]


if __name__ == "__main__":
    raise SystemExit(main())
