"""Compiles `app/wire/tinker.proto` when Tinworks is built or installed, editable too. All else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
PROTO = "app/wire/tinker.proto"


class BuildProto(Command):
    """Writes `tinker_pb2.py` and its type stub beside the `.proto`, before packages are collected."""

    description = f"compile {PROTO}"
    user_options: list[tuple[str, str, str]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        """Nothing to configure."""

    def finalize_options(self) -> None:
        """Nothing to configure."""

    def run(self) -> None:
        """Run protoc. Raises SystemExit when it refuses the file."""
        from grpc_tools import protoc

        status = protoc.main(["protoc", f"-I{ROOT}", f"--python_out={ROOT}", f"--pyi_out={ROOT}", str(ROOT / PROTO)])
        if status:
            raise SystemExit(f"protoc failed on {PROTO}")

    def get_source_files(self) -> list[str]:
        """What a source distribution has to contain."""
        return [PROTO]

    def get_outputs(self) -> list[str]:
        """Nothing of its own: the modules are collected with their package."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        """As `get_outputs`."""
        return {}


class Build(build):
    """The usual build, with the protocol compiled first."""

    sub_commands = [("build_proto", None), *build.sub_commands]


setup(cmdclass={"build": Build, "build_proto": BuildProto})
