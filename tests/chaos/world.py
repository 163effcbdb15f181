"""A whole service, each role a process of its own, with hands that kill and a supervisor that starts again."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
from sqlalchemy import select

from app.runs.log import ACCEPTED
from app.runs.models import Operation, Run
from tests.chaos.blows import LEASE_S, Blow, Plan
from tests.chaos.doorbells import Meddler, Meddling
from tests.chaos.network import Wire
from tests.e2e.roles import READY_S, Deployment, RoleProcess
from tests.faults import audit
from tests.services import PostgresServer, RedisServer

SETTINGS = {
    "TINWORKS_AUTH": "open",
    "TINWORKS_LEASE_S": str(LEASE_S),
    "TINWORKS_SAMPLE_CLAIM_S": str(LEASE_S),
    "TINWORKS_SNAPSHOT_OPERATIONS": "12",
    "TINWORKS_POLL_HOLD_S": "5",
    "OMP_NUM_THREADS": "1",
}
"""Short times, so that a run may see much in a minute, and little is replayed."""
AIM_S = 3.0
"""A blow on train workers waits so long for one of them to be at work."""
_ON_TRAIN_WORKERS = ("train", "rank", "pause", "cut", "stall")
_REPLAYED = re.compile(rb'"replayed": ?[1-9]')
POISONOUS = 2
"""No train worker dies on purpose while a run stands where so many have died: the operation at which a third dies is
taken for what kills them, and fails, as it should."""


class World(Deployment):
    """The roles of a plan over servers that may die as well."""

    def __init__(
        self, folder: Path, plan: Plan, *, model: Path, redis: RedisServer, postgres: PostgresServer | None
    ) -> None:
        url = f"sqlite:///{folder}/tinworks.db" if postgres is None else postgres.url(postgres.create())
        super().__init__(folder, database_url=url, redis_url=redis.url, model=model)
        self.plan = plan
        self.struck: list[str] = []
        """The blows that have fallen, and met somebody."""
        self.events: list[str] = []
        """These, and what was started again, and when."""
        self._redis_server, self._postgres = redis, postgres
        self._wire = Wire(postgres.port) if postgres is not None else None
        self._counts = {"web": 1, "train": 2 if plan.layout == "two" else 1, "sample": 1, "beat": 1}
        self._paused: list[tuple[float, RoleProcess]] = []
        self._well_at = 0.0
        self._begin = time.monotonic()
        self._meddler = Meddler(redis.url, self.database, plan.seed)
        self._meddlings: dict[Blow, Meddling] = {}
        self.environment |= SETTINGS
        self.environment["TINWORKS_SAMPLE_USE_RETRIEVE_FUTURES"] = str(plan.batch_polls)
        if plan.layout == "ranks":
            self.environment["TINWORKS_TRAIN_RANKS"] = "2"
        self._of_workers = dict(self.environment)
        if postgres is not None and self._wire is not None:
            self._of_workers["DATABASE_URL"] = url.replace(f":{postgres.port}/", f":{self._wire.port}/")

    def start(self) -> None:
        """Start every role, on a database that keeps an audit, and wait until all workers have registered."""
        assert self.run("release").wait(READY_S) == 0, self.logs()
        audit.begin(self.database)
        for role, count in self._counts.items():
            for _ in range(count):
                self.run(role)
        self.wait_healthy()
        self.scale(train=self._counts["train"])
        self._begin = time.monotonic()

    def run(self, role: str) -> RoleProcess:
        """Start a role; workers reach their database through the wire."""
        plain = self.environment
        if role in ("train", "sample"):
            self.environment = self._of_workers | {
                name: plain[name] for name in plain if name.startswith(("TINWORKS_S3", "AWS_"))
            }
        try:
            return super().run(role)
        finally:
            self.environment = plain

    def supervise(self) -> None:
        """Start again what has died, wake what has slept long enough. Every few milliseconds, from one thread."""
        for role, count in self._counts.items():
            for _ in range(count - len(self.alive(role))):
                self._note(f"{role} again")
                self.run(role)
        now = time.monotonic()
        for until, process in self._paused:
            if now >= until and process.is_alive:
                process.send(signal.SIGCONT)
        self._paused = [(until, process) for until, process in self._paused if now < until]
        if self._wire is not None and self._well_at and now >= self._well_at:
            self._well_at = 0.0
            self._wire.become("well")

    def bring_back(self) -> None:
        """Wait until all that died on purpose serves again."""
        self.supervise()
        self.wait_healthy()

    def calm(self) -> None:
        """End what lasts."""
        self._meddler.end()
        for _, process in self._paused:
            if process.is_alive:
                process.send(signal.SIGCONT)
        self._paused = []
        if self._wire is not None:
            self._wire.become("well")

    def strike(self, blow: Blow, *, late_s: float) -> bool:
        """Do it, `late_s` after its moment. False if it has to wait: there is nothing to be struck now, or nobody who
        is at work, or it would look like poison."""
        if blow.kind in _ON_TRAIN_WORKERS and self._looks_poisonous():
            return False
        if not self._do(blow, aim=late_s < AIM_S):
            return False
        self._note(str(blow))
        self.struck.append(str(blow))
        return True

    def _do(self, blow: Blow, *, aim: bool) -> bool:
        match blow.kind:
            case "web" | "sample" | "beat":
                processes = [p for p in self.alive(blow.kind) if blow.kind != "sample" or self.worker_id(p)]
                if not processes:
                    return False
                process = processes[int(blow.choice * len(processes))]
                process.send(signal.SIGKILL)
                process.wait(10)
            case "train" | "rank" | "pause":
                if (found := self._train_worker(blow.choice, aim=aim)) is None:
                    return False
                return self._strike_worker(found, blow)
            case "redis":
                self._redis_server.stop()
                self._redis_server.start()
            case "postgres":
                assert self._postgres is not None
                self._postgres.crash()
                self._postgres.start()
            case "cut" | "stall":
                assert self._wire is not None
                if self._well_at or not self._wire.connections or self._train_worker(blow.choice, aim=aim) is None:
                    return False
                self._wire.become("cut" if blow.kind == "cut" else "stalled")
                self._well_at = time.monotonic() + blow.for_s
            case "drop" | "repeat" | "shuffle":
                if blow not in self._meddlings:
                    self._meddlings[blow] = self._meddler.meddle(blow.kind, blow.for_s)
                return self._meddlings[blow].done > 0
        return True

    def _strike_worker(self, worker: RoleProcess, blow: Blow) -> bool:
        """False if a rank was to be killed and the worker has none."""
        if blow.kind == "pause":
            worker.send(signal.SIGSTOP)
            self._paused.append((time.monotonic() + blow.for_s, worker))
        elif blow.kind == "train":
            worker.send(signal.SIGKILL)
            worker.wait(10)
        else:
            children = psutil.Process(worker.pid).children(recursive=True)
            ranks = [child for child in children if "workers.model.ranks" in child.cmdline()]
            for rank in ranks:
                rank.kill()
            return bool(ranks)
        return True

    def _train_worker(self, choice: float, *, aim: bool) -> RoleProcess | None:
        """A train worker that is awake and holds a run with work to do: it is at it, or about to be. Not to `aim` is to
        take one that has nothing to do as well; one that is only starting has nothing to lose."""
        paused = [process for _, process in self._paused]
        awake = {self.worker_id(p): p for p in self.alive("train") if all(p is not other for other in paused)}
        awake.pop(None, None)
        query = (
            select(Run.worker_id)
            .join(Operation, (Operation.model_id == Run.id) & (Operation.seq_id == Run.applied_seq + 1))
            .where(Operation.state == ACCEPTED, Run.worker_id.in_(awake))
        )
        with self.database.read() as session:
            busy = sorted(set(session.scalars(query)))
        processes = [awake[worker_id] for worker_id in busy] or ([] if aim else list(awake.values()))
        return processes[int(choice * len(processes))] if processes else None

    def _looks_poisonous(self) -> bool:
        with self.database.read() as session:
            at_risk = select(Run.id).where(Run.crash_seq == Run.applied_seq, Run.crash_count >= POISONOUS)
            return session.scalar(at_risk.limit(1)) is not None

    def doorbells(self) -> Counter[str]:
        """How many were really lost, repeated or held back."""
        counts: Counter[str] = Counter()
        for meddling in self._meddlings.values():
            counts[meddling.how] += meddling.done
        return counts

    def replays(self) -> int:
        """How often a train worker has brought a run back by repeating operations, by the logs of all that lived."""
        told = (line for log in self.folder.glob("train.*.log") for line in log.read_bytes().splitlines())
        return sum(b'"run_restored"' in line and _REPLAYED.search(line) is not None for line in told)

    def _note(self, what: str) -> None:
        self.events.append(f"{time.monotonic() - self._begin:6.2f} {what}")

    def close(self) -> None:
        """Kill everything."""
        self.calm()
        super().close()
        if self._wire is not None:
            self._wire.close()
