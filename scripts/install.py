"""Install Tinworks into a virtual environment: `python3 scripts/install.py [--venv .venv] [--extras dev]`.

What a plain `pip install` would get wrong is torch: on Linux its default build brings several GB of CUDA libraries, and
cannot be imported without them. Here a torch that can be imported is kept; a machine with an NVIDIA GPU gets the
default build; any other gets a CPU build: the one that pip finds by itself, else the one of PyTorch's own index.
Everything else is installed with torch held fixed.

Does nothing, quickly, when it has run before and what it installs is the same. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "app" / "wire").glob("*.proto"))
COMPILED = [path.with_name(f"{path.stem}_pb2.py") for path in PROTOS]
INPUTS = (ROOT / "pyproject.toml", ROOT / "setup.py", Path(__file__), *PROTOS)
OLDEST_PYTHON = (3, 11)
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_DEPENDENCIES = ["filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools>=77"]
GPU_LIBRARIES = ("nvidia-", "cuda-", "triton")


class Installer:
    """Runs pip of one virtual environment."""

    def __init__(self, venv: Path, extras: str) -> None:
        self.venv = venv
        self.extras = extras
        self.python = venv / "bin" / "python"
        self.stamp = venv / "tinworks-installed"

    def run(self) -> None:
        """Everything, or nothing if it was done before."""
        if self.is_done():
            return
        self.make_venv()
        self.pip("install", "--quiet", "--upgrade", "pip", optional=True)
        self.install_torch()
        self.install_project()
        self.stamp.write_text(self.fingerprint())
        say(f"Installed into {self.venv}.")

    def is_done(self) -> bool:
        """Whether this very project was installed here."""
        made = (self.python, self.stamp, *COMPILED)
        return all(path.exists() for path in made) and self.stamp.read_text() == self.fingerprint()

    def fingerprint(self) -> str:
        """Changes when there is something to install."""
        inputs = [*(path.read_bytes() for path in INPUTS), str(ROOT).encode()]
        return hashlib.sha256(b"\0".join([*inputs, self.extras.encode()])).hexdigest()

    def make_venv(self) -> None:
        """The virtual environment, unless it is there."""
        if self.python.exists():
            return
        say(f"Making {self.venv} with Python {sys.version.split()[0]} …")
        if subprocess.run([sys.executable, "-m", "venv", str(self.venv)], check=False).returncode:
            shutil.rmtree(self.venv, ignore_errors=True)
            fail("Python cannot make virtual environments here (Debian: apt-get install python3-venv).")

    def install_torch(self) -> None:
        """A torch that fits this machine."""
        if version := self.torch_version():
            say(f"torch {version} is here already.")
        elif has_nvidia_gpu():
            say("Installing torch for the NVIDIA GPU …")
            self.pip("install", "torch>=2.13")
        elif self.brings_gpu_libraries(TORCH) is False:
            say("Installing the CPU build of torch …")
            self.pip("install", TORCH)
        else:
            say(f"Installing the CPU build of torch from {CPU_INDEX} …")
            cpu_build = [f"{TORCH}+cpu", "--no-deps", "--index-url", CPU_INDEX, "--timeout", "15", "--retries", "1"]
            if not self.pip("install", *cpu_build, optional=True):
                fail(
                    "No CPU build of torch can be reached, and the default one brings several GB of CUDA libraries.\n"
                    f"Install a torch of your own into {self.venv}, then run this again, for example\n"
                    f"  {self.python} -m pip install PATH_OR_URL_OF_A_TORCH_CPU_WHEEL"
                )
            self.pip("install", "--quiet", *CPU_DEPENDENCIES)
        if not self.torch_version():
            fail(f"torch was installed but cannot be imported: {self.python} -c 'import torch' says why.")

    def install_project(self) -> None:
        """Tinworks itself, editable, with its extras; torch stays as it is."""
        say(f"Installing tinworks[{self.extras}] …")
        with tempfile.TemporaryDirectory() as folder:
            constraints = Path(folder) / "constraints.txt"
            constraints.write_text(f"torch=={self.torch_version()}\n")
            self.pip("install", "--quiet", "-c", str(constraints), "-e", f"{ROOT}[{self.extras}]")

    def torch_version(self) -> str:
        """The version of the torch that the environment can import, or nothing."""
        code = "import torch; print(torch.__version__)"
        result = subprocess.run([str(self.python), "-c", code], capture_output=True, text=True, check=False, cwd="/")
        return result.stdout.strip() if result.returncode == 0 else ""

    def brings_gpu_libraries(self, requirement: str) -> bool | None:
        """Whether what pip would install for `requirement` needs CUDA libraries. None: pip finds nothing."""
        command = [*self.pip_command, "install", "--dry-run", "--quiet", "--no-deps", "--report", "-", requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            (candidate,) = json.loads(result.stdout)["install"]
        except (ValueError, KeyError):
            return None
        needs = candidate["metadata"].get("requires_dist", [])
        return sys.platform == "linux" and any(need.startswith(GPU_LIBRARIES) for need in needs)

    @property
    def pip_command(self) -> list[str]:
        """pip of the environment."""
        return [str(self.python), "-m", "pip", "--disable-pip-version-check"]

    def pip(self, *arguments: str, optional: bool = False) -> bool:
        """Run pip; what it prints is on the terminal. Returns whether it succeeded, which it must unless optional."""
        succeeded = subprocess.run([*self.pip_command, *arguments], check=False).returncode == 0
        if not succeeded and not optional:
            fail(f"pip {' '.join(arguments)} failed.")
        return succeeded


def has_nvidia_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU that a driver serves."""
    if os.path.exists("/dev/nvidia0"):
        return True
    query = shutil.which("nvidia-smi")
    return bool(query) and subprocess.run([query, "-L"], capture_output=True, check=False).returncode == 0


def use_recent_python() -> None:
    """Go on as a Python that is recent enough, if this one is not."""
    if sys.version_info >= OLDEST_PYTHON:
        return
    for name in ("python3.13", "python3.12", "python3.11"):
        if shutil.which(name):
            os.execvp(name, [name, *sys.argv])
    fail("Tinworks needs Python 3.11 or newer.")


def say(text: str) -> None:
    """One line for the person at the terminal."""
    sys.stderr.write(f"{text}\n")


def fail(text: str) -> None:
    """Say what is wrong and end."""
    sys.exit(f"install: {text}")


def main() -> None:
    """Parse the command line and install."""
    use_recent_python()
    parser = argparse.ArgumentParser(description="Install Tinworks into a virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="dev")
    options = parser.parse_args()
    Installer(options.venv.resolve(), options.extras).run()


if __name__ == "__main__":
    main()
