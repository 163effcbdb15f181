"""The `tinworks` command. What a command needs is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from app import cli_adapters, cli_fleet
from app.cli_sentences import DataDirOption, fail, in_sentences, use_data_dir

app = typer.Typer(
    name="tinworks",
    help="A self-hosted service that speaks the Tinker API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)
app.add_typer(keys, name="keys")
worker = typer.Typer(help="Start a worker of one model in the foreground.", no_args_is_help=True)
app.add_typer(worker, name="worker")
app.command("doctor")(cli_fleet.doctor)
app.command("runs")(cli_fleet.runs)
app.command("backup")(cli_fleet.backup)
app.command("restore")(cli_fleet.restore)
app.command("export")(cli_adapters.export)
app.command("import")(cli_adapters.import_adapter)
app.add_typer(cli_fleet.workers, name="workers")

DEFAULT_DATA_DIR = Path("tinworks-data")


@app.command()
def up(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    data_dir: Annotated[
        Path, typer.Option(envvar="TINWORKS_DATA_DIR", help="Folder of the database, checkpoints, logs and pid files.")
    ] = DEFAULT_DATA_DIR,
    base_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ALIAS[,ALIAS…]=]NAME_OR_PATH",
            help="A model to serve: a local folder or a hub name, and the names that clients use. May be repeated. "
            "Without it, a tiny model is made and served as `tiny`.",
        ),
    ] = None,
) -> None:
    """Run the whole service in the foreground: Redis, migrations, web, one worker per model, scheduled jobs.

    REDIS_URL and DATABASE_URL win over the Redis and the SQLite database that it would bring along.
    """
    from app.up.service import UpOptions, run

    with in_sentences():
        run(UpOptions(host, port, data_dir, tuple(base_model or ())), say=typer.echo)


@app.command()
def migrate(data_dir: DataDirOption = None) -> None:
    """Bring the database up to date. Safe to run again, and from several machines at once on Postgres."""
    use_data_dir(data_dir)
    from app.migrate import upgrade
    from app.settings import get_settings

    with in_sentences():
        upgrade(get_settings().database_url)
    typer.echo("The database is up to date.")


@keys.command("create")
def keys_create(
    owner: Annotated[str, typer.Argument(help="Whose key it is; a tenant of this name is made if there is none.")],
    name: Annotated[str, typer.Option(help="What the key is for.")] = "",
    data_dir: DataDirOption = None,
) -> None:
    """Make a key. It is printed once, alone on standard output, and never stored."""
    use_data_dir(data_dir)
    from app.accounts.service import create_key

    with in_sentences():
        key, secret = create_key(owner, name)
    typer.echo(f"Key {key.id} for {owner}. It is shown this once:", err=True)
    typer.echo(secret)


@keys.command("list")
def keys_list(
    owner: Annotated[str | None, typer.Option(help="Only the keys of this owner.")] = None,
    data_dir: DataDirOption = None,
) -> None:
    """List the keys: who has them, what they begin with, whether they are revoked."""
    use_data_dir(data_dir)
    from rich.console import Console
    from rich.table import Table

    from app.accounts.service import list_keys

    table = Table("id", "owner", "name", "begins with", "made", "revoked")
    with in_sentences():
        for key, holder in list_keys(owner):
            revoked = f"{key.revoked_at:%Y-%m-%d %H:%M}" if key.revoked_at else ""
            table.add_row(str(key.id), holder.name, key.name, key.prefix, f"{key.created_at:%Y-%m-%d %H:%M}", revoked)
    Console().print(table)


@keys.command("revoke")
def keys_revoke(
    key_id: Annotated[int, typer.Argument(help="The number that `tinworks keys list` shows.")],
    data_dir: DataDirOption = None,
) -> None:
    """Revoke a key: requests with it are refused from then on."""
    use_data_dir(data_dir)
    from app.accounts.service import revoke_key

    with in_sentences():
        revoked = revoke_key(key_id)
    if not revoked:
        fail(f"There is no key {key_id}, or it is revoked already.")
    typer.echo(f"Key {key_id} is revoked.")


GpusOption = Annotated[
    str | None, typer.Option(metavar="0,1,…", help="CUDA devices that it sees, over TINWORKS_GPUS; else all.")
]
ModelOption = Annotated[
    str | None,
    typer.Option(metavar="[ALIAS[,ALIAS…]=]NAME_OR_PATH", help="The model to serve, over TINWORKS_BASE_MODEL."),
]


@worker.command("train")
def worker_train(gpus: GpusOption = None, base_model: ModelOption = None) -> None:
    """Train on these devices, one rank on each (docs/scaling.md)."""
    _start_worker(gpus, base_model, "celery", "-A", "workers", "worker", "-Q", "train")


@worker.command("sample")
def worker_sample(gpus: GpusOption = None, base_model: ModelOption = None) -> None:
    """Sample."""
    _start_worker(gpus, base_model, "celery", "-A", "workers", "worker", "-Q", "sample")


@worker.command("ranks")
def worker_ranks(gpus: GpusOption = None) -> None:
    """Help a train worker on another host, which MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK name."""
    _start_worker(gpus, None, "workers.model.ranks")


def _start_worker(gpus: str | None, base_model: str | None, *module: str) -> NoReturn:
    """Become the process that people may as well start by themselves, its options in its environment."""
    from app.settings import Settings
    from app.up.models import parse_base_model

    with in_sentences():
        if gpus is not None:
            os.environ["TINWORKS_GPUS"] = gpus
        if base_model is not None:
            os.environ["TINWORKS_BASE_MODEL"] = parse_base_model(base_model).setting
        Settings()
    os.execv(sys.executable, [sys.executable, "-m", *module])


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed_version

    typer.echo(f"tinworks {installed_version('tinworks')}")


def main() -> None:
    """Entry point of the `tinworks` script."""
    app()


if __name__ == "__main__":
    main()
