"""One run: a service starts, three scripts begin, the blows fall, the scripts end, and everything is counted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import Tensor

from app.settings import Settings
from app.storage.blobs import BlobStore, LocalBlobStore
from app.storage.s3 import open_bucket
from tests.chaos.audit import Told, audit
from tests.chaos.blows import SPAN_S, Plan
from tests.chaos.equality import ADAPTER_GAP, SHORT_OF_A_STEP, Gaps, compare, distance, download
from tests.chaos.tenant_names import LAST, SHORT, TENANTS
from tests.chaos.world import World
from tests.e2e.roles import ROOT
from tests.s3_server import s3_server
from tests.services import dies_with_us, postgres_server, redis_server

DEADLINE_S = 150.0
"""After the scripts have begun, so long at most until they end."""


@dataclass
class Outcome:
    """What came of a run. `struck`: the blows that fell and met somebody; `doorbells`: how many were lost, repeated or
    held back; `replays`: recoveries in which operations were repeated; `told`: by each tenant, of each of its runs;
    `gaps`: by tenant, to the quiet run."""

    plan: Plan
    folder: Path
    seconds: float = 0.0
    struck: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    doorbells: Counter[str] = field(default_factory=Counter)
    replays: int = 0
    told: dict[str, list[Told]] = field(default_factory=dict)
    adapters: dict[str, list[dict[str, dict[str, Tensor]]]] = field(default_factory=dict)
    gaps: dict[str, Gaps] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The summary of one seed."""
        plan, worst = self.plan, self.gaps.values()
        largest = f"{max((g.adapter for g in worst), default=0):.0e}/{max((g.logprob for g in worst), default=0):.0e}"
        place = f"{plan.database}+{plan.store} {plan.layout}{' batch-polls' if plan.batch_polls else ''}"
        verdict = "ok" if not self.wrong else "FAILED"
        counts = [f"{len(self.struck)} of {len(plan.blows)} blows", f"{self.replays} replays"]
        counts += [f"{count} x {how}" for how, count in self.doorbells.items()]
        told = f"gaps {largest}  {', '.join(counts)}: {', '.join(self.struck)}"
        return f"seed {plan.seed:>5} {verdict:<6} {place:<32} {self.seconds:5.1f} s  {told}"


class Tenants:
    """The three scripts, each a process of its own."""

    def __init__(self, folder: Path, base_url: str, span_s: float) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in TENANTS:
            command = [sys.executable, "-m", "tests.chaos.tenants", name, base_url, key_of(name)]
            command += [str(self._out(name)), str(span_s)]
            with (folder / f"{name}.log").open("wb") as log:
                self._processes[name] = subprocess.Popen(
                    dies_with_us(command), cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log
                )

    def _out(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def begin(self) -> None:
        """Let all begin."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.close()

    def still_run(self) -> bool:
        """Whether one has not ended."""
        return any(process.poll() is None for process in self._processes.values())

    def told(self) -> tuple[dict[str, list[Told]], list[str]]:
        """What those that ended were told, and how the others failed."""
        told, wrong = {}, []
        for name, process in self._processes.items():
            if process.poll() == 0 and self._out(name).exists():
                told[name] = json.loads(self._out(name).read_text())
                continue
            said = (self._folder / f"{name}.log").read_text().strip().splitlines()
            how = "did not end" if process.poll() is None else f"ended with {process.poll()}"
            wrong.append(f"{name} {how}: {' | '.join(said[-3:])}")
        return told, wrong

    def close(self) -> None:
        """Kill those that still run."""
        for process in self._processes.values():
            process.kill()
            process.wait()


def key_of(tenant: str) -> str:
    """The key of a tenant."""
    return f"tml-{tenant}-of-chaos"


def run(plan: Plan, folder: Path, model: Path, quiet: Outcome | None, *, keep: bool = False) -> Outcome:
    """Run a plan in a folder of its own. `quiet`: the same scripts when nothing happened, to compare with.

    The folder with all logs stays if something was wrong, or with `keep`. From the main thread.
    """
    folder.mkdir(parents=True)
    outcome = Outcome(plan, folder)
    begin = time.monotonic()
    try:
        _run(outcome, model, quiet)
    except Exception as error:
        outcome.wrong.append(f"the harness: {error!r:.2000}")
        (folder / "traceback.txt").write_text(traceback.format_exc())
    outcome.seconds = time.monotonic() - begin
    with (folder / "outcome.txt").open("w") as out:
        out.write("\n".join([plan.command, *outcome.events, *outcome.wrong]) + "\n")
    if not outcome.wrong and not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def quiet_run(folder: Path, model: Path) -> Outcome:
    """The scripts when nothing happens, on the simplest of services."""
    outcome = run(Plan(0, "sqlite", "local", "one", False, ()), folder, model, None)
    assert not outcome.wrong, outcome.wrong
    return outcome


def _run(outcome: Outcome, model: Path, quiet: Outcome | None) -> None:
    plan, folder = outcome.plan, outcome.folder
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder))
        postgres = stack.enter_context(postgres_server(keeps_commits=True)) if plan.database == "postgres" else None
        world = World(folder, plan, model=model, redis=redis, postgres=postgres)
        outcome.struck, outcome.events = world.struck, world.events
        stack.callback(world.close)
        if plan.store == "s3":
            s3 = stack.enter_context(s3_server(folder / "s3"))
            world.environment |= s3.environment(s3.new_bucket())
        tenants = Tenants(folder, world.base_url, SPAN_S if plan.blows else 0.0)
        stack.callback(tenants.close)
        world.start()
        tenants.begin()
        _strike(world, tenants)
        outcome.doorbells, outcome.replays = world.doorbells(), world.replays()
        outcome.told, outcome.wrong = tenants.told()
        if missed := Counter(map(str, plan.blows)) - Counter(outcome.struck):
            outcome.wrong.append(f"blows that did not fall, or met nobody: {', '.join(missed.elements())}")
        if len(outcome.told) == len(TENANTS):
            _check(outcome, world, quiet)


def _strike(world: World, tenants: Tenants) -> None:
    """Let the blows fall while the scripts run; one that has to wait falls later."""
    waiting = list(world.plan.blows)
    begin = time.monotonic()
    while tenants.still_run() and time.monotonic() < begin + DEADLINE_S:
        now = time.monotonic() - begin
        waiting = [blow for blow in waiting if now < blow.at_s or not world.strike(blow, late_s=now - blow.at_s)]
        world.supervise()
        time.sleep(0.02)
    world.calm()


def _check(outcome: Outcome, world: World, quiet: Outcome | None) -> None:
    world.bring_back()
    outcome.wrong += audit(world.database, _store(world), outcome.told)
    for name, runs in outcome.told.items():
        ends = [
            {saved: download(world.base_url, key_of(name), told["model_id"], saved) for saved in (LAST, SHORT)}
            for told in runs
        ]
        outcome.adapters[name] = ends
        if quiet is None:
            continue
        gaps = outcome.gaps[name] = compare(runs, quiet.told[name])
        for mine, theirs in zip(ends, quiet.adapters[name], strict=True):
            gaps.adapter = max(gaps.adapter, distance(mine[LAST], theirs[LAST]))
            gaps.one_step = min(gaps.one_step, distance(mine[SHORT], theirs[LAST]))
        if not gaps.adapter <= ADAPTER_GAP:
            gaps.wrong.append(f"adapters differ by {gaps.adapter:.1e}, more than {ADAPTER_GAP}")
        if gaps.one_step < SHORT_OF_A_STEP * ADAPTER_GAP:
            gaps.wrong.append(f"a step more or less would not show: it is {gaps.one_step:.1e}")
        outcome.wrong += [f"{name}: {what}" for what in gaps.wrong]


def _store(world: World) -> BlobStore:
    if "TINWORKS_S3_BUCKET" not in world.environment:
        return LocalBlobStore(world.folder / "blobs")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in world.environment.items():
            patch.setenv(name, value)
        return open_bucket(Settings())
