"""Where the files of a base model are."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

from app.errors import InvalidRequest

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
"""Endings of weights that nothing here reads."""


def fetched(source: str) -> Path:
    """The folder `source`, or that of the hub's model of this name, fetched if need be. Raises InvalidRequest."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(source, ignore_patterns=[f"*{ending}" for ending in OTHER_WEIGHTS]))
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"the base model {source!r} is neither a folder here nor to be had from the hub: {error}"
        ) from error
