"""`tinworks worker …` becomes the process that the documentation names, its options in its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import app


class Became(Exception):
    """The process is another program now."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    command: list[str] = []

    def become(program: str, arguments: list[str]) -> None:
        assert program == sys.executable
        command.extend(arguments[1:])
        raise Became

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setenv("TINWORKS_GPUS", "7")
    monkeypatch.setenv("TINWORKS_BASE_MODEL", "org/other")
    return command


CELERY = ["-m", "celery", "-A", "workers", "worker", "-Q"]


@pytest.mark.parametrize(
    ("role", "module"),
    [("train", [*CELERY, "train"]), ("sample", [*CELERY, "sample"]), ("ranks", ["-m", "workers.model.ranks"])],
)
def test_a_role_becomes_its_process(became: list[str], role: str, module: list[str]) -> None:
    result = CliRunner().invoke(app, ["worker", role, "--gpus", "0,1"])
    assert isinstance(result.exception, Became), result.output
    assert became == module
    assert os.environ["TINWORKS_GPUS"] == "0,1" and os.environ["TINWORKS_BASE_MODEL"] == "org/other"


def test_a_model_is_named_by_its_absolute_path(
    became: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["worker", "train", "--base-model", "a=./small"])
    assert os.environ["TINWORKS_BASE_MODEL"] == f"a={tmp_path / 'small'}" and os.environ["TINWORKS_GPUS"] == "7"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--gpus", "0,,1"), "TINWORKS_GPUS must be a list of different devices"),
        (("--gpus", "1,1"), "TINWORKS_GPUS must be a list of different devices"),
        (("--base-model", "./nowhere"), "there is no folder"),
    ],
)
def test_a_bad_option_is_a_sentence(became: list[str], option: tuple[str, str], words: str) -> None:
    result = CliRunner().invoke(app, ["worker", "train", *option])
    assert result.exit_code == 1 and words in result.output and not became
