"""The images without Docker: their RUN lines in clean virtual environments, and their commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.service import free_port, wait_until
from tests.services import RedisServer, dies_with_us
from tests.unit.docker.dockerfile import ROOT, last, read

pytestmark = pytest.mark.slow


class Image:
    """A virtual environment in which a Dockerfile's pip lines were run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", self.venv], check=True)

    def environment(self, **more: str) -> dict[str, str]:
        """Only what the image has: its own ENV, and what compose adds."""
        kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "HTTP", "http", "NO_", "no_"))}
        path = f"{self.venv / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        return {**kept, "PATH": path, "HOME": str(self.folder), "VIRTUAL_ENV": str(self.venv), **more}

    def run(self, command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command to its end, which must be a good one."""
        answer = subprocess.run(
            command, cwd=cwd, env=self.environment(**environment), capture_output=True, text=True, check=False
        )
        assert answer.returncode == 0, f"{command}: {answer.stdout[-2000:]}{answer.stderr[-2000:]}"
        return answer

    def start(self, command: list[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """A command in the background, away from the repository."""
        work = self.folder / "home"
        work.mkdir(exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(
                dies_with_us(command), cwd=work, env=self.environment(**environment), stdout=output, stderr=output
            )


def build(name: str, folder: Path) -> Image:
    """Run the pip lines of both stages. What the image COPYs is where it was."""
    image = Image(folder)
    wheels, source = folder / "wheels", folder / "src"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", "tests", "*_pb2.py*", "build", "*.egg-info"))
    for instruction in read(name):
        for command in instruction.commands if instruction.name == "RUN" else ():
            if command[0] != "pip":
                continue
            lock = {"/tmp/requirements.lock": str(source / "requirements" / f"{name}.lock")}
            words = [lock.get(word, word.replace("/wheels", str(wheels))) for word in command]
            if words[-1].endswith("*.whl"):
                words[-1:] = map(str, wheels.glob("*.whl"))
            image.run(words, source)
    shutil.rmtree(source)
    return image


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The web image."""
    return build("web", tmp_path_factory.mktemp("web"))


@pytest.fixture
def settings(shared_redis: RedisServer, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment that compose or a platform gives it."""
    yield {
        "DATABASE_URL": f"sqlite:///{tmp_path / 'tinworks.db'}",
        "REDIS_URL": shared_redis.url,
        "PORT": str(free_port()),
        "TINWORKS_DATA_DIR": str(tmp_path),
        "TINWORKS_ALIVE_FILE": str(tmp_path / "alive"),
    }


def health_check(name: str) -> list[str]:
    words: list[str] = json.loads(last(name, "HEALTHCHECK").text.partition("CMD ")[2])
    return words


def is_healthy(image: Image, command: list[str], settings: dict[str, str]) -> bool:
    answer = subprocess.run(command, cwd="/", env=image.environment(**settings), capture_output=True, check=False)
    return answer.returncode == 0


def test_the_web_image_serves_and_ends_on_sigterm(web: Image, settings: dict[str, str], tmp_path: Path) -> None:
    web.run(["tinworks", "migrate"], tmp_path, **settings)
    assert not is_healthy(web, health_check("web"), settings)
    process = web.start(last("web", "CMD").exec_form, tmp_path / "log", **settings)
    wait_until(lambda: is_healthy(web, health_check("web"), settings), timeout_s=60, what="the health check succeeds")
    process.terminate()
    assert process.wait(20) in (0, -15, 143), (tmp_path / "log").read_text()


def test_the_web_image_has_no_torch_and_runs_beat(web: Image, settings: dict[str, str], tmp_path: Path) -> None:
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)"
    web.run(["python", "-c", look], tmp_path, **settings)
    web.run(["tinworks", "migrate"], tmp_path, **settings)
    beat = ["celery", "-A", "workers", "worker", "-B", "-Q", "janitor", "--pool", "solo"]
    process = web.start(beat, tmp_path / "log", **settings)
    alive = ["python", "-m", "app.alive", "600"]
    wait_until(lambda: is_healthy(web, alive, settings), timeout_s=90, what="beat has tidied once")
    process.terminate()
    assert process.wait(30) == 0, (tmp_path / "log").read_text()


def test_a_worker_that_stands_still_is_not_alive(web: Image, settings: dict[str, str], tmp_path: Path) -> None:
    alive = health_check("train")
    assert not is_healthy(web, alive, settings)
    (tmp_path / "alive").touch()
    assert is_healthy(web, alive, settings)
    os.utime(tmp_path / "alive", (0, time.time() - 200))
    assert not is_healthy(web, alive, settings)


@pytest.mark.parametrize("name", ["train", "sample", "cpu"])
def test_other_images_can_be_installed(name: str, tmp_path: Path) -> None:
    """Without fetching anything: uv only asks the index for each pinned file and its hash."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    command = [uv, "pip", "install", "--dry-run", "--no-deps", "--require-hashes", "--python", sys.executable]
    command += ["--target", str(tmp_path / "nothing"), "-r", f"requirements/{name}.lock"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "error sending request" in answer.stderr or "dns error" in answer.stderr:
        pytest.skip("the package index cannot be reached")
    assert answer.returncode == 0, answer.stderr
