"""`python -m tests.soak`: a whole service under steady work for an hour, and whether anything in it grows.

Web, trainer, sampler and beat run as the `Procfile` says, on Postgres and Redis, with times short enough that all that
they keep for a while is forgotten before the warm-up ends. Exits with 1, and says what grew, if something did.
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
from pathlib import Path

from tests.e2e.roles import ROOT, Deployment
from tests.services import dies_with_us, postgres_server, redis_server
from tests.soak.growth import Finding, judge, judge_latency
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
_EVERY_S = 10.0
_JUDGED_AT_LEAST = 4
"""Minutes: a third of them must be more than one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="in all")
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
    print(f"{len(findings) - len(grown)} of {len(findings)} are flat; logs and measurements: {folder}", flush=True)
    return 1 if grown else 0


def soak(folder: Path, *, seconds: float, warm_up_s: float) -> list[Finding]:
    """What was found of each process and each script. Raises RuntimeError if a process or a script ended early."""
    (folder / "data").mkdir()
    with postgres_server(vacuums=True) as postgres, redis_server(folder) as redis:
        running = Deployment(folder / "data", database_url=postgres.url(postgres.create()), redis_url=redis.url)
        running.environment |= SETTINGS
        scripts: dict[str, subprocess.Popen[bytes]] = {}
        try:
            running.start()
            begin = time.monotonic()
            scripts = {name: _script(name, running, folder, seconds) for name in TENANTS}
            looks: list[Look] = []
            while (now := time.monotonic() - begin) < seconds:
                _all_alive(running, scripts)
                looks.append(look_at(now, {role: running.alive(role)[0].pid for role in ROLES}, postgres, redis.url))
                _note(folder / "looks.jsonl", looks[-1])
                time.sleep(max(0.0, begin + len(looks) * _EVERY_S - time.monotonic()))
            for name, script in scripts.items():
                if script.wait(120) != 0:
                    raise RuntimeError(f"the script {name} failed: {(folder / f'{name}.log').read_text()[-2000:]}")
        finally:
            for script in scripts.values():
                script.kill()
                script.wait()
            running.close()
    latencies = {name: _steps(folder / f"{name}.steps", after_s=warm_up_s) for name in TENANTS}
    return judge([look for look in looks if look.at_s >= warm_up_s]) + judge_latency(latencies)


def _script(name: str, running: Deployment, folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tests.soak.tenants", name, running.base_url, str(folder), str(seconds)]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(dies_with_us(words), cwd=ROOT, stdout=log, stderr=log)


def _all_alive(running: Deployment, scripts: dict[str, subprocess.Popen[bytes]]) -> None:
    for role in ROLES:
        if not running.alive(role):
            raise RuntimeError(f"{role} has ended\n{running.logs()}")
    for name, script in scripts.items():
        if script.poll() not in (None, 0):
            raise RuntimeError(f"the script {name} ended early, with {script.poll()}")


def _note(file: Path, look: Look) -> None:
    with file.open("a") as opened:
        opened.write(json.dumps(look.values | {"at_s": round(look.at_s, 1)}) + "\n")


def _steps(file: Path, *, after_s: float) -> list[tuple[float, float]]:
    """When a script's steps ended, and how long they took; seconds."""
    rows = [line.split() for line in file.read_text().splitlines()]
    return [(float(at), float(took)) for at, took in rows if float(at) >= after_s]


if __name__ == "__main__":
    raise SystemExit(main())
