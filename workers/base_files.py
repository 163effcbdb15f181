"""Where the files of a model or an adapter are."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

from app.errors import InvalidRequest

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
"""Endings of weights that nothing here reads."""


def fetched(source: str, *, field: str, only: list[str] | None = None) -> Path:
    """The folder `source`, or that of the hub's repository of this name, fetched if need be: of that the files `only`,
    or all but weights that nothing here reads. Raises InvalidRequest, which names `field`."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    try:
        ignored = [f"*{ending}" for ending in OTHER_WEIGHTS]
        return Path(snapshot_download(source, allow_patterns=only, ignore_patterns=ignored))
    except (OSError, ValueError) as error:
        text = f"{field}: {source!r} is neither a folder here nor to be had from the hub: {error}"
        raise InvalidRequest(text) from error
