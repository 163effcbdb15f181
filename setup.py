"""Compiles the `.proto` files of `app/wire` when Tinworks is built or installed. All else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
PROTOS = ("app/wire/tinker.proto", "app/wire/perfetto.proto")


class BuildProto(Command):
    """Writes `<name>_pb2.py` and its type stub beside each `.proto`, before packages are collected."""

    description = "compile the protocol buffers"
    user_options: list[tuple[str, str, str]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        """Nothing to configure."""

    def finalize_options(self) -> None:
        """Nothing to configure."""

    def run(self) -> None:
        """Run protoc. Raises SystemExit when it refuses a file."""
        from grpc_tools import protoc

        files = [str(ROOT / name) for name in PROTOS]
        if protoc.main(["protoc", f"-I{ROOT}", f"--python_out={ROOT}", f"--pyi_out={ROOT}", *files]):
            raise SystemExit(f"protoc failed on {', '.join(PROTOS)}")

    def get_source_files(self) -> list[str]:
        """What a source distribution has to contain."""
        return list(PROTOS)

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
