"""`tinworks export` and `tinworks import`: checkpoints as folders, and folders as checkpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from app.cli_sentences import DataDirOption, in_sentences, quiet_logs, use_data_dir


def export(
    path: Annotated[str, typer.Argument(help="The checkpoint, `tinker://…`, of any tenant.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="The base model with the adapter merged into it, for transformers or vLLM.")
    ] = False,
    base_model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER_OR_NAME", help="With --merged: the base model, if its workers found it elsewhere."
        ),
    ] = None,
    shard_gb: Annotated[float, typer.Option(min=0.001, help="With --merged: size of a file at most.")] = 5.0,
    data_dir: DataDirOption = None,
) -> None:
    """Write a checkpoint's weights to a folder: as PEFT has them, or merged into the base model."""
    use_data_dir(data_dir)
    if merged:
        options = ["--shard-gb", str(shard_gb), *(("--base-model", base_model) if base_model is not None else ())]
        _become("workers.export", path, str(out), *options)
    from app.checkpoints.export import find, write_adapter
    from app.db import get_database
    from app.new_folder import new_folder
    from app.storage.blobs import get_blob_store

    with in_sentences(), quiet_logs():
        checkpoint = find(get_database(), path)
        with new_folder(out) as folder:
            write_adapter(get_blob_store(), checkpoint.snapshot_id, folder)
    typer.echo(f"{out} holds the adapter of {path}, of {checkpoint.base_model}.")


def import_adapter(
    source: Annotated[str, typer.Argument(metavar="FOLDER_OR_NAME", help="What PEFT has saved: here, or on the hub.")],
    base_model: Annotated[str, typer.Option(help="The base model, by a name that clients use.")],
    name: Annotated[str, typer.Option(help="The checkpoint's name.")],
    owner: Annotated[str | None, typer.Option(help="Whose it shall be; not needed if there is one tenant.")] = None,
    key: Annotated[str | None, typer.Option(help="Whose it shall be, by an API key.")] = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make a checkpoint of a LoRA adapter that PEFT has saved. Its paths are printed: that for training, and that for
    sampling.
    """
    use_data_dir(data_dir)
    from app.accounts.key_ring import KeyRing
    from app.checkpoints.imports import find_owner
    from app.db import get_database
    from app.settings import get_settings

    with in_sentences(), quiet_logs():
        if key is not None:
            owner_id = KeyRing(get_database(), get_settings()).identify(key).owner_id
        else:
            owner_id = find_owner(get_database(), owner)
    options = ["--base-model", base_model, "--name", name, "--owner-id", owner_id]
    _become("workers.import_adapter", source, *options)


def _become(module: str, *arguments: str) -> NoReturn:
    """Go on as a process that has torch."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
