"""The few instructions of our Dockerfiles, read as Docker reads them."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAMES = ("web", "train", "sample", "cpu")


@dataclass(frozen=True)
class Instruction:
    """`stage` counts from 0; options stand in `text`."""

    stage: int
    name: str
    text: str

    @property
    def exec_form(self) -> list[str]:
        """The words of a CMD."""
        words: list[str] = json.loads(self.text)
        return words

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command that a RUN joins with `&&`."""
        return [shlex.split(command) for command in self.text.split("&&")]


def read(name: str) -> list[Instruction]:
    """All instructions of an image's Dockerfile."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found, stage = [], -1
    for line in joined.splitlines():
        word, _, rest = line.strip().partition(" ")
        stage += word == "FROM"
        found.append(Instruction(stage, word, rest.strip()))
    return found


def last(name: str, instruction: str) -> Instruction:
    """The one that counts: the last of its kind."""
    return [each for each in read(name) if each.name == instruction][-1]
