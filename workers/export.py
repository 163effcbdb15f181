"""`tinworks export --merged`: a checkpoint merged into its base model, as a folder that transformers and vLLM load.

`python -m workers.export PATH OUT`. The base model is never in memory as a whole: its files are read and written tensor
by tensor (`workers.model.merging`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer

from app.checkpoints.export import ADAPTER_FILES, Exportable, find, write_adapter
from app.cli_sentences import fail, in_sentences, quiet_logs
from app.db import get_database
from app.errors import InvalidRequest
from app.new_folder import new_folder
from app.storage.blobs import get_blob_store
from workers.base_files import OTHER_WEIGHTS, fetched
from workers.model.base import BaseModel, UnsupportedModel
from workers.model.export import BadAdapterFile, load_peft
from workers.model.merging import CannotMerge, Merged, NamesInFiles, merged
from workers.model.parallel import empty_model
from workers.model.weight_files import INDEX, BadWeightFiles, stored_tensors, write_checkpoint

_NOT_COPIED = {*OTHER_WEIGHTS, ".safetensors", ".md"}
"""Weights, which are written anew or are of other libraries, and what is said of the base model alone."""
Progress = Callable[[int, int], None]
"""Is told how many bytes have been written, and of how many."""


def export_merged(adapter_folder: Path, base_folder: Path, out: Path, *, shard_bytes: int, progress: Progress) -> None:
    """Write the model of `base_folder` with the adapter of `adapter_folder` merged into it to the new folder `out`.

    Files have at most `shard_bytes`, or one tensor. Raises ValueError that says what does not fit, or InvalidRequest.
    """
    model = empty_model(base_folder, torch.float32)
    names = NamesInFiles(model)
    base = BaseModel(model, str(base_folder), weights_come_later=True)
    base.device = torch.device("cpu")  # where adapters are put
    adapter = load_peft(base, {name: (adapter_folder / name).read_bytes() for name in ADAPTER_FILES})
    result = merged(base, names, stored_tensors(base_folder), adapter)
    done = 0

    def written(size: int) -> None:
        nonlocal done
        done += size
        progress(done, result.size)

    with new_folder(out) as folder:
        _copy_other_files(base_folder, folder, result)
        write_checkpoint(folder, result.tensors, shard_bytes=shard_bytes, written=written)


def _copy_other_files(base_folder: Path, folder: Path, result: Merged) -> None:
    """Configuration, tokenizer, generation config, templates."""
    for path in sorted(base_folder.iterdir()):
        if path.is_file() and path.suffix not in _NOT_COPIED and path.name != INDEX and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
    if result.untied:
        config = json.loads((base_folder / "config.json").read_text())
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def base_folder_of(checkpoint: Exportable, given: str | None) -> Path:
    """Where the base model's files are, fetched from the hub if that is where they are. Raises InvalidRequest."""
    source = given or checkpoint.source
    if source is None:
        raise InvalidRequest(f"no worker has registered {checkpoint.base_model!r}: say with --base-model where it is")
    return fetched(source, field="--base-model")


def main(
    path: str,
    out: Path,
    base_model: Annotated[str | None, typer.Option()] = None,
    shard_gb: Annotated[float, typer.Option(min=0.001)] = 5.0,
) -> None:
    """The command line."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with in_sentences(), quiet_logs(), TemporaryDirectory() as name:
        checkpoint = find(get_database(), path)
        adapter_folder = Path(name)
        write_adapter(get_blob_store(), checkpoint.snapshot_id, adapter_folder)
        base_folder = base_folder_of(checkpoint, base_model)
        try:
            with Progress(TextColumn("Writing"), *columns, console=Console(stderr=True)) as bar:
                task = bar.add_task("Writing", total=None)
                export_merged(
                    adapter_folder,
                    base_folder,
                    out,
                    shard_bytes=int(shard_gb * 10**9),
                    progress=lambda done, total: bar.update(task, completed=done, total=total),
                )
        except (CannotMerge, BadWeightFiles, BadAdapterFile, UnsupportedModel) as error:
            fail(f"{error}.")
    typer.echo(f"{out} holds {checkpoint.base_model} with {path} merged into it.")


if __name__ == "__main__":
    typer.run(main)
