"""This host: open files, GPUs, the model's files, and settings that go badly together."""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from app.doctor.findings import Finding, failed, ok, warning
from app.settings import Settings
from app.up import CannotStart
from app.up.models import parse_base_model

_FEW_FILES = 4096
_TORCH_START_S = 120.0


def check_settings(settings: Settings) -> Iterator[Finding]:
    """What is allowed and still unwise. Settings that are wrong end the doctor before it begins."""
    if settings.auth == "open":
        todo = "TINWORKS_AUTH=keys, and `tinworks keys create`, wherever others can reach the port."
        yield warning("keys", "any `tml-…` key is good", todo)
    else:
        yield ok("keys", "only those that were made")
    if not settings.s3_bucket and not settings.database_url.startswith("sqlite"):
        todo = "Every web, train and sample process has to see this folder; TINWORKS_S3_BUCKET frees you from that."
        yield warning("blob folder", f"{settings.data_dir.resolve()} is of this host", todo)
    most = settings.session_retention_s
    if settings.session_silence_s >= most:
        yield failed("sessions", "TINWORKS_SESSION_SILENCE_S is not below TINWORKS_SESSION_RETENTION_S", "Swap them.")


def check_open_files(settings: Settings) -> Iterator[Finding]:
    """Each poll that web holds is an open connection."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= _FEW_FILES:
        yield ok("open files", f"{'any number' if limit == resource.RLIM_INFINITY else limit} per process")
        return
    todo = f"`ulimit -n {min(65536, most)}`, LimitNOFILE= of systemd, `ulimits:` of compose: polls are connections."
    yield warning("open files", f"{limit} per process", todo)


def check_gpus(settings: Settings) -> Iterator[Finding]:
    """What the driver shows, and what torch makes of it where torch is installed."""
    query = shutil.which("nvidia-smi")
    shown: list[str] = []
    if query is not None:
        answer = subprocess.run([query, "-L"], capture_output=True, text=True, timeout=30, check=False)
        shown = [line for line in answer.stdout.splitlines() if line.startswith("GPU")]
    named = [device for device in settings.gpus.split(",") if device]
    if importlib.util.find_spec("torch") is None:
        if named or settings.base_model:
            yield failed("torch", "is not installed", "Workers need `tinworks[worker]`; web and beat do not.")
        else:
            yield ok("gpus", f"{len(shown)}; torch is not installed, so this host runs web or beat")
        return
    yield from _torch(shown, named)


def _torch(shown: list[str], named: list[str]) -> Iterator[Finding]:
    command = [sys.executable, "-m", "workers.devices"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_START_S, check=False)
        seen = json.loads(answer.stdout)
    except (ValueError, subprocess.TimeoutExpired):
        yield failed("torch", "cannot be imported", f"`{' '.join(command)}` says why.")
        return
    gpus = [f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in seen["gpus"]]
    yield ok("torch", f"{seen['torch']}, {', '.join(gpus) or 'CPU only'}")
    if shown and not gpus:
        todo = f"The driver shows {len(shown)}; install the CUDA build of torch {seen['torch'].partition('+')[0]}."
        yield failed("gpus", "torch sees none", todo)
    if missing := [device for device in named if device.isdigit() and int(device) >= len(gpus)]:
        yield failed(
            "gpus", f"TINWORKS_GPUS names {', '.join(missing)}, torch sees {len(gpus)}", "Correct TINWORKS_GPUS."
        )


def check_model(settings: Settings) -> Iterator[Finding]:
    """Are all files of the model there, and as long as they say."""
    if not settings.base_model:
        yield ok("model", "TINWORKS_BASE_MODEL is not set: no worker on this host")
        return
    try:
        served = parse_base_model(settings.base_model)
    except CannotStart as error:
        yield failed("model", str(error), "Correct TINWORKS_BASE_MODEL.")
        return
    if not Path(served.source).is_dir():
        todo = "Workers fetch it from the hub at their start; for no surprise then, fetch it now: `hf download`."
        yield warning("model", f"{served.source} is no folder", todo)
        return
    folder = Path(served.source)
    wrong = list(_wrong_files(folder))
    if wrong:
        yield failed("model", f"{folder}: {'; '.join(wrong)}", "Fetch it again.")
    else:
        yield ok("model", f"{folder}, as {', '.join(served.names)}")


def _wrong_files(folder: Path) -> Iterator[str]:
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            yield f"{name} is missing"
    index = folder / "model.safetensors.index.json"
    names = {path.name for path in folder.glob("*.safetensors")}
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            yield f"{index.name} cannot be read"
    if not names:
        yield "there are no safetensors files"
    for name in sorted(names):
        if (problem := _wrong_length(folder / name)) is not None:
            yield f"{name} {problem}"


def _wrong_length(path: Path) -> str | None:
    """A safetensors file begins with the length of its header, which says where its last tensor ends."""
    if not path.is_file():
        return "is missing"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            return "is cut off or no safetensors file"
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            return "has no readable header"
    missing = 8 + length + end - path.stat().st_size
    return f"lacks {missing} bytes" if missing > 0 else None
