"""The command line and environment of each process that `tinworks up` runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from app.up import CannotStart
from app.up.child import ChildSpec
from app.up.data_dir import DataDir
from app.up.models import BaseModel
from app.up.network import is_loopback
from app.up.redis_server import redis_command

PACKAGES = ("app", "workers")


def shared_environment(
    data: DataDir, *, host: str, port: int, redis_url: str, own: Mapping[str, str]
) -> dict[str, str]:
    """What every process is told. What the person has set in `own` wins.

    Without a setting, any key is good (`open`) where only this machine can connect, and only made keys elsewhere.
    """
    return {
        "DATABASE_URL": own.get("DATABASE_URL") or data.database_url,
        "REDIS_URL": redis_url,
        "PORT": str(port),
        "TINWORKS_DATA_DIR": str(data.root),
        "TINWORKS_AUTH": own.get("TINWORKS_AUTH") or ("open" if is_loopback(host) else "keys"),
        "PYTHONUNBUFFERED": "1",
    }


def redis(binary: str, data: DataDir, *, port: int) -> ChildSpec:
    """The broker."""
    return ChildSpec("redis", redis_command(binary, port=port, folder=data.redis), stops_last=True)


def migrate() -> ChildSpec:
    """The database, brought up to date."""
    return ChildSpec("migrate", _python("app.cli", "migrate"))


def tiny_model(folder: Path) -> ChildSpec:
    """The model that is made on the spot."""
    return ChildSpec("tiny-model", _python("workers.model.tiny", "--out", str(folder)))


def web(*, host: str, port: int) -> ChildSpec:
    """The HTTP service.

    Clients keep many connections and polls open: the backlog is large, requests are not logged, and polls that are
    held are cut before the supervisor loses patience.
    """
    options = {
        "--host": host,
        "--port": str(port),
        "--backlog": "4096",
        "--timeout-graceful-shutdown": "3",
        "--timeout-keep-alive": "75",
    }
    flags = [part for option in options.items() for part in option]
    return ChildSpec("web", _python("uvicorn", "--factory", "app.main:create_app", "--no-access-log", *flags))


def worker(role: str, model: BaseModel) -> ChildSpec:
    """A worker that trains and samples one model. When it stops, all stop: its samples have nobody to hear of them."""
    command = _python("celery", "-A", "workers", "worker", "-Q", "train,sample")
    return ChildSpec(role, command, {"TINWORKS_BASE_MODEL": model.setting, "TINWORKS_SAMPLE_DRAIN_S": "0"})


def beat() -> ChildSpec:
    """The scheduled jobs."""
    return ChildSpec("beat", _python("celery", "-A", "workers", "worker", "-B", "-Q", "janitor", "--pool", "solo"))


def check_working_directory(folder: Path) -> None:
    """uvicorn and celery import from the working directory first: it must not hide our packages.

    Raises:
        CannotStart: it has an `app` or `workers` of its own.
    """
    home = Path(__file__).resolve().parents[2]
    for name in PACKAGES:
        hiding = [path for path in (folder / name, folder / f"{name}.py") if path.exists()]
        if hiding and folder.resolve() != home:
            raise CannotStart(f"{hiding[0]} would hide a package of Tinworks; start it from another folder.")


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)
