"""The README's quickstart, as it stands there, against a running service."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.service import Service

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_quickstart_ends_with_the_right_answer(service: Service) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    environment = {**os.environ, "TINKER_BASE_URL": service.base_url, "TINKER_API_KEY": "tml-readme"}
    code += "\nimport os, sys; sys.stdout.flush(); os._exit(0)"  # see below
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    # The interpreter is not left to take itself down: now and then the SDK's transport aborts in that.
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert float(lines[29]) < 0.2 * float(lines[0])
    assert lines[30].strip() == "anana-bay plit-say"
