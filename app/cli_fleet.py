"""The commands for who operates Tinworks: `tinworks doctor`, `runs`, `workers`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli_sentences import DataDirOption, fail, in_sentences, quiet_logs, use_data_dir

workers = typer.Typer(help="List workers; empty one, and fill it again.")
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]
_STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}


def doctor(as_json: JsonOption = False, data_dir: DataDirOption = None) -> None:
    """Look at settings, database, broker, blobs, GPUs, model files and clocks, and say what to mend.

    Exit status 1 when something will not work.
    """
    from app.doctor.service import examine
    from app.settings import get_settings

    use_data_dir(data_dir)
    with in_sentences(), quiet_logs():
        findings = list(examine(get_settings()))
    if as_json:
        _print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        table = _table("", "what", "seen", "what to do")
        for finding in findings:
            grade = f"[{_STYLES[finding.grade]}]{finding.grade}[/]"
            table.add_row(grade, finding.name, _plain(finding.seen), _plain(finding.todo))
        _print(table)
    if any(finding.grade == "failed" for finding in findings):
        raise typer.Exit(1)


def runs(
    owner: Annotated[str | None, typer.Option(help="Only those of this tenant.")] = None,
    idle: Annotated[bool, typer.Option("--all", help="Also runs that have no work and no slot.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 200,
    as_json: JsonOption = False,
    data_dir: DataDirOption = None,
) -> None:
    """Which runs train, which wait, and why."""
    use_data_dir(data_dir)
    from app.db import get_database
    from app.fleet.overview import seen_runs
    from app.settings import get_settings

    with in_sentences(), quiet_logs(), get_database().read() as session:
        settings = get_settings()
        found = seen_runs(
            session,
            silence_s=settings.worker_silence_s,
            owner=owner,
            idle=idle,
            limit=limit,
            runs_per_tenant=settings.runs_per_tenant,
        )
    if as_json:
        _print_json([dataclasses.asdict(run) for run in found])
        return
    table = _table("run", "tenant", "model", "rank", "state", "at", "waiting", "since", "worker", "why")
    for run in found:
        since = _duration(run.age_s) if run.operations else ""
        numbers = (str(run.lora_rank), run.state, str(run.applied_seq), str(run.operations or ""), since)
        table.add_row(run.id, _plain(run.owner), _plain(run.base_model), *numbers, run.worker_id or "", _plain(run.why))
    _print(table)


@workers.callback(invoke_without_command=True)
def list_workers(
    context: typer.Context,
    pool: Annotated[str | None, typer.Option(help="Only those of this base model's pool.")] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = None,
) -> None:
    """Which workers there are, what they do and hold."""
    use_data_dir(data_dir)
    if context.invoked_subcommand is not None:
        return
    from app.db import get_database
    from app.fleet.overview import seen_workers
    from app.settings import get_settings

    with in_sentences(), quiet_logs(), get_database().read() as session:
        found = seen_workers(session, pool, silence_s=get_settings().worker_silence_s)
    if as_json:
        _print_json([_without(dataclasses.asdict(worker), "packed") for worker in found])
        return
    table = _table("worker", "pool", "roles", "state", "runs", "queued tokens", "seen", "host", "pid", "up")
    for worker in found:
        runs_held = f"{worker.resident_runs}/{worker.slots}" if worker.slots else ""
        up = _duration((datetime.now(worker.started_at.tzinfo) - worker.started_at).total_seconds())
        table.add_row(
            worker.id,
            worker.pool,
            ",".join(worker.roles),
            worker.state,
            runs_held,
            str(worker.queued_tokens or ""),
            f"{_duration(worker.silent_s)} ago",
            worker.host,
            str(worker.pid),
            up,
        )
    _print(table)


NameArgument = Annotated[str, typer.Argument(help="Its id, how its id begins, or its host: then all workers there.")]


@workers.command()
def drain(name: NameArgument) -> None:
    """Empty a worker: its runs go to others with their state, it takes nothing new. `tinworks workers` says when it is
    `drained`; then it can be stopped, and nobody notices."""
    _set_draining(name, True)


@workers.command()
def undrain(name: NameArgument) -> None:
    """Let a worker take work again."""
    _set_draining(name, False)


def _set_draining(name: str, draining: bool) -> None:
    from app.db import get_database
    from app.fleet.service import set_draining

    with in_sentences(), quiet_logs(), get_database().write() as session:
        told = set_draining(session, name, draining)
    if not told:
        fail(f"There is no worker {name!r}; `tinworks workers` lists them.")
    for worker_id in told:
        typer.echo(f"{worker_id} {'is being emptied' if draining else 'takes work again'}")


FolderArgument = Annotated[Path, typer.Argument(help="The folder of the backup.")]


def backup(folder: FolderArgument, data_dir: DataDirOption = None) -> None:
    """Copy tables and blobs into a folder, while everything works. Again into the same folder: only what is new."""
    from app.backup.service import backup

    _with_stores(backup, folder, data_dir)


def restore(folder: FolderArgument, data_dir: DataDirOption = None) -> None:
    """Fill a new installation with a backup, whatever database and blob store it has; after `tinworks migrate`."""
    from app.backup.service import restore

    _with_stores(restore, folder, data_dir)


def _with_stores(act: Callable[..., None], folder: Path, data_dir: Path | None) -> None:
    use_data_dir(data_dir)
    from app.backup.service import BackupFailed
    from app.db import get_database
    from app.errors import StorageUnavailable
    from app.storage.blobs import get_blob_store

    with in_sentences(), quiet_logs():
        try:
            act(get_database(), get_blob_store(), folder, say=typer.echo)
        except BackupFailed as error:
            fail(f"{error}.")
        except StorageUnavailable as error:
            fail(f"The blob store: {error}.")


def _print_json(data: object) -> None:
    sys.stdout.write(json.dumps(data, indent=2, default=lambda value: value.isoformat()) + "\n")


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print(table: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _plain(text: str) -> str:
    """A text that may hold square brackets, which rich would read as its own."""
    from rich.markup import escape

    return escape(text)


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
