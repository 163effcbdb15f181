"""Folders that appear whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import InvalidRequest


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """An empty folder beside `out` to write into; at the end of the block it is `out`. If the block raises, nothing is
    left. Raises InvalidRequest if `out` is there and not empty."""
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidRequest(f"OUT: there is something at {out} already")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
