"""`celery -A tests.faults.worker worker -Q train`: the real worker, with a fault that its environment names.

`FAULTS_DIE`: `STEP|before|3` ends it by SIGKILL before the third call of a step (`points`). `FAULTS_DEADLY`: a pass
that holds a datum which begins with these tokens (`7,7,7`) ends it by `os._exit`. `FAULTS_HOLD`: a pass waits while
this file is there, and makes another one, named `.reached`, when it begins to.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.faults.points import Points
from workers.celery import app
from workers.model import engine
from workers.model.base import BaseModel
from workers.model.forward import Work

__all__ = ["app"]

DEADLY_EXIT_CODE = 9
RunPass = Callable[..., Any]


def _end() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def _deadly(run_pass: RunPass, marker: Sequence[int]) -> RunPass:
    def run(base: BaseModel, works: Sequence[Work], **options: Any) -> Any:
        if any(list(datum.tokens[: len(marker)]) == list(marker) for work in works for datum in work.data):
            os._exit(DEADLY_EXIT_CODE)
        return run_pass(base, works, **options)

    return run


def _held(run_pass: RunPass, gate: Path) -> RunPass:
    def run(base: BaseModel, works: Sequence[Work], **options: Any) -> Any:
        while gate.exists():
            gate.with_suffix(".reached").touch()
            time.sleep(0.01)
        return run_pass(base, works, **options)

    return run


if fatal := os.environ.get("FAULTS_DIE"):
    step, when, nth = fatal.split("|")
    Points(setattr, _end).arm(step, when, int(nth))  # type: ignore[arg-type]
if marker := os.environ.get("FAULTS_DEADLY"):
    engine.run_pass = _deadly(engine.run_pass, [int(token) for token in marker.split(",")])
if gate := os.environ.get("FAULTS_HOLD"):
    engine.run_pass = _held(engine.run_pass, Path(gate))
