"""The README tells the truth where a machine can check it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_settings_is_current() -> None:
    script = ROOT / "scripts" / "settings_table.py"
    result = subprocess.run([sys.executable, str(script), "--check"], cwd=ROOT, check=False)
    assert result.returncode == 0, "run: python scripts/settings_table.py"


def test_the_quickstart_is_python() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    compile(code, "README.md", "exec")
