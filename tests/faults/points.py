"""The steps of a train worker, and a way to end it just before or after one of them.

The worker's own code knows nothing of this: its functions are wrapped from outside, in the test's process or in that of
a real worker (`tests.faults.worker`).
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, NoReturn

When = Literal["before", "after"]
Patch = Callable[[Any, str, Any], None]

POINTS = {
    # claim
    "claim: which runs have work": "app.runs.log.pending_runs",
    "claim: which are free": "workers.train.lease.free_runs",
    "claim: take the leases": "workers.train.lease.take",
    "claim: rebuild the state": "workers.train.residency.restore",
    # restore, and what is noted of runs at which a worker has died
    "restore: read the snapshot": "workers.train.snapshots.read_state",
    "restore: which operations": "app.runs.log.applied_operations",
    "restore: repeat them": "workers.train.recovery.Replay.run",
    "restore: note a trial": "workers.train.lease.try_",
    # plan
    "plan: what is ready": "app.runs.log.ready_operations",
    "plan": "workers.train.loop.plan",
    "plan: load the bodies": "app.runs.log.load_bodies",
    # execute
    "execute": "workers.train.loop.TrainLoop._execute",
    "execute: creations, loads, saves": "workers.train.execute.Executor.control",
    "execute: a pass": "workers.train.execute.Executor.forward",
    "execute: steps": "workers.train.execute.Executor.step",
    # saves
    "save: copy the state": "workers.train.saves.Saver.save",
    "save: copy the adapter": "workers.train.saves.Saver.save_for_sampler",
    # blobs, of results, saves and snapshots
    "blobs: a file": "app.storage.blobs.LocalBlobStore.put",
    "blobs: a manifest": "app.storage.blobs.LocalBlobStore.put_new",
    # commit
    "commit": "workers.train.commits.Committer.commit",
    "commit: store the results": "workers.train.commits.store_results",
    "commit: move the position": "workers.train.lease.advance",
    "commit: add a snapshot's row": "app.checkpoints.service.add_snapshot",
    "commit: name a checkpoint": "app.checkpoints.service.name_snapshot",
    "commit: write the results": "app.runs.log.finish",
    "commit: count what was used": "app.billing.meter.add",
    "commit: note it in memory": "workers.train.commits.Committer._moved",
    # notify
    "notify": "workers.train.commits.Committer._notify",
    # leaving
    "evict: save and give back": "workers.train.residency.Residents.evict",
    "evict: give the lease back": "workers.train.lease.release",
    # recovery snapshots
    "snapshot: is it due": "workers.train.residency.Residents.snapshot_where_due",
    "snapshot: copy to the host": "workers.train.snapshots.copy_state",
    "snapshot: make the files": "workers.train.snapshots.state_files",
    "snapshot: write the files": "workers.train.snapshots.write",
    "snapshot: name it in the run's row": "workers.train.lease.set_recovery_snapshot",
    "snapshot: forget bodies": "app.runs.log.prune_bodies",
    "snapshot: delete what nobody needs": "app.storage.blobs.LocalBlobStore.delete",
}
"""What each step is, and the function that does it, by the name under which its caller finds it."""


class Points:
    """Wraps the steps, counts their calls, and calls `end` at one of them. `end` does not return; once it was called,
    every other step calls it too, in whatever thread: the worker is dead."""

    def __init__(self, patch: Patch, end: Callable[[], NoReturn]) -> None:
        self.calls: Counter[str] = Counter()
        self.dead = False
        self._end = end
        self._fatal: tuple[str, When, int] | None = None
        for name, path in POINTS.items():
            owner, attribute = _owner(path)
            patch(owner, attribute, self._wrapped(name, getattr(owner, attribute)))

    def arm(self, name: str, when: When, nth: int) -> None:
        """End the worker at the `nth` call of a step from now on, counted from 1."""
        assert name in POINTS, name
        self.calls.clear()
        self._fatal = (name, when, nth)

    def disarm(self) -> None:
        """The worker is gone; others live."""
        self._fatal, self.dead = None, False

    def _wrapped(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def call(*args: Any, **options: Any) -> Any:
            self._check(name, "before", counted=True)
            result = step(*args, **options)
            self._check(name, "after")
            return result

        return call

    def _check(self, name: str, when: When, *, counted: bool = False) -> None:
        self.calls[name] += counted
        if self.dead or self._fatal == (name, when, self.calls[name]):
            self.dead = True
            self._end()


def _owner(path: str) -> tuple[Any, str]:
    """The module or class that has the attribute of that name."""
    parent, _, attribute = path.rpartition(".")
    try:
        return importlib.import_module(parent), attribute
    except ModuleNotFoundError:
        module, _, cls = parent.rpartition(".")
        return getattr(importlib.import_module(module), cls), attribute
