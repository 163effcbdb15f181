"""Write `requirements/*.lock` anew: `python scripts/lock.py`. Needs `uv`, and the environment that runs the tests.

uv resolves for the images' platform, whatever this machine is, and reads metadata only: no CUDA library is fetched.
Versions are those of this environment where it has the package, so that the images hold what was tested; all but
sample's, in which vLLM has a say.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
PYTHON, PLATFORM = "3.11", "x86_64-manylinux_2_28"
GPU_LIBRARIES = ("nvidia-", "cuda-", "triton")
OPTIONS = ("--python-version", PYTHON, "--python-platform", PLATFORM, "--no-annotate", "--no-header", "--quiet")


def compile_lock(uv: str, *arguments: str, constraints: str = "") -> str:
    """The lock file of these inputs, with hashes."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(constraints)
        file.flush()
        command = [uv, "pip", "compile", *OPTIONS, "--generate-hashes", "-c", file.name, *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def tested_versions() -> str:
    """What this environment has, as constraints; without the mark of a build like `+cpu`."""
    versions = {each.metadata["Name"]: each.version.partition("+")[0] for each in distributions()}
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()) if name != "tinworks")


def without_torch(lock: str) -> str:
    """A lock without torch and the libraries of GPUs: each requirement is a line, and indented ones with its hashes."""
    kept: list[str] = []
    keep = True
    for line in lock.splitlines(keepends=True):
        if not line.startswith((" ", "\t")):
            keep = not line.startswith(("torch==", *GPU_LIBRARIES))
        if keep:
            kept.append(line)
    return "".join(kept)


def torch_version(constraints: str) -> str:
    """The constraint on torch."""
    return next(line for line in constraints.splitlines() if line.startswith("torch==")) + "\n"


def main() -> None:
    """Write all of them."""
    uv = shutil.which("uv") or sys.exit("lock: uv is not installed: pip install uv")
    tested = tested_versions()
    train = compile_lock(uv, "pyproject.toml", "--extra", "worker", "--extra", "otel", constraints=tested)
    locks = {
        "web": compile_lock(uv, "pyproject.toml", "--extra", "otel", constraints=tested),
        "train": train,
        "cpu": without_torch(train),
        "sample": compile_lock(
            uv,
            "pyproject.toml",
            "requirements/sample.in",
            *("--extra", "worker", "--extra", "otel"),
            constraints=torch_version(tested),
        ),
        "build": compile_lock(uv, "requirements/build.in"),
    }
    for name, text in locks.items():
        (FOLDER / f"{name}.lock").write_text(f"# Written by scripts/lock.py.\n{text}")


if __name__ == "__main__":
    main()
