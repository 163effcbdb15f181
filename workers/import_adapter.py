"""`tinworks import`: an adapter that PEFT has saved becomes a checkpoint.

`python -m workers.import_adapter SOURCE --base-model NAME --name NAME --owner-id ID`. Only the base model's
configuration is read, unless the adapter brings copies of its weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from app.checkpoints.imports import Imported, add_imported, find_base
from app.cli_sentences import fail, in_sentences, quiet_logs
from app.db import Database, get_database
from app.errors import InvalidRequest
from app.settings import Settings, get_settings
from app.storage.blobs import BlobStore, get_blob_store, new_blob_id
from workers import snapshot_files
from workers.base_files import fetched
from workers.model.base import BaseModel, UnsupportedModel
from workers.model.export import CONFIG_FILE, WEIGHTS_FILE, BadAdapterFile, write_peft
from workers.model.foreign import Converted, convert
from workers.model.weight_files import BadWeightFiles, read_tensor, stored_tensors

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


def import_adapter(
    database: Database,
    blobs: BlobStore,
    settings: Settings,
    *,
    source: str,
    base_model: str,
    name: str,
    owner_id: str,
) -> tuple[list[str], Converted]:
    """Make the adapter in the folder (or the hub's repository) `source` a checkpoint of `base_model`. Returns its
    paths, that for training first. Raises InvalidRequest, or ValueError that says what does not fit.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"--name: {name!r} must consist of letters, digits, dots, underscores and dashes")
    pool, base_source = find_base(database, base_model)
    config, weights = _read(fetched(source, field="SOURCE", only=[CONFIG_FILE, WEIGHTS_FILE]))
    base = BaseModel.outline(base_source, dtype=torch.float32)
    base.device = torch.device("cpu")  # where adapters are put

    def is_base(weight: str, tensor: Tensor) -> bool:
        return _is_weight_of(fetched(base_source, field="--base-model"), base, weight, tensor)

    converted = convert(base, config, weights, max_rank=settings.max_lora_rank, is_base=is_base)
    snapshot_id = new_blob_id()
    with TemporaryDirectory() as folder:
        files = write_peft(converted.adapter, base_source, base, Path(folder))
        size_bytes = sum(map(snapshot_files.size_of, files.values()))
        snapshot_files.write(blobs, snapshot_id, files)
    imported = Imported(
        owner_id=owner_id,
        name=name,
        base_model=base_model,
        pool=pool,
        lora=converted.adapter.config,
        source=source,
        snapshot_id=snapshot_id,
        size_bytes=size_bytes,
    )
    return add_imported(database, imported, quota_bytes=settings.tenant_storage_bytes), converted


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise BadAdapterFile(f"{name} is missing")
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        weights = load_file(folder / WEIGHTS_FILE)
    except SafetensorError as error:
        raise BadAdapterFile(f"{WEIGHTS_FILE}: {error}") from error
    except ValueError as error:
        raise BadAdapterFile(f"{CONFIG_FILE}: {error}") from error
    if not isinstance(config, dict):
        raise BadAdapterFile(f"{CONFIG_FILE}: not an object")
    return config, weights


def _is_weight_of(folder: Path, base: BaseModel, name: str, tensor: Tensor) -> bool:
    """Whether `tensor` is the base model's weight of that name, as far as the coarser of their dtypes tells."""
    names = {name}
    if base.tied and name == "lm_head.weight":
        names |= {f"{path}.weight" for path, module in base.model.named_modules() if module is _embedding(base)}
    for stored in stored_tensors(folder):
        if stored.name in names and stored.shape == tuple(tensor.shape):
            mine = read_tensor(stored)
            coarse = min(mine.dtype, tensor.dtype, key=lambda dtype: dtype.itemsize)
            return torch.equal(mine.to(coarse), tensor.to(coarse))
    return False


def _embedding(base: BaseModel) -> torch.nn.Module:
    module: torch.nn.Module = base.model.get_input_embeddings()
    return module


def main(
    source: str,
    base_model: Annotated[str, typer.Option()],
    name: Annotated[str, typer.Option()],
    owner_id: Annotated[str, typer.Option()],
) -> None:
    """The command line."""
    with in_sentences(), quiet_logs():
        database, blobs = get_database(), get_blob_store()
        try:
            paths, converted = import_adapter(
                database, blobs, get_settings(), source=source, base_model=base_model, name=name, owner_id=owner_id
            )
        except (BadAdapterFile, BadWeightFiles, UnsupportedModel) as error:
            fail(f"SOURCE: {error}.")
    config = converted.adapter.config
    typer.echo(f"Rank {config.rank}, alpha {config.alpha:g}.", err=True)
    if converted.fresh:
        kinds = sorted({path.rpartition(".")[2] for path in converted.fresh})
        typer.echo(f"{len(converted.fresh)} layers begin anew, with nothing added: {', '.join(kinds)}.", err=True)
    for path in paths:
        typer.echo(path)


if __name__ == "__main__":
    typer.run(main)
