"""Write README.md's table of settings from `app.settings`: `python scripts/settings_table.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import AliasChoices

from app.settings import Settings

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"


def table() -> str:
    """A Markdown row per setting: the variable, its default, what it does."""
    rows = ["| variable | default | what it does |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        alias = field.validation_alias
        variable = str(alias.choices[0]) if isinstance(alias, AliasChoices) else f"TINWORKS_{name.upper()}"
        default = "" if field.default == "" else f"`{field.default}`"
        rows.append(f"| `{variable}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Rewrite the table, or, with --check, say whether it is current."""
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    wanted = before + BEGIN + table() + END + after
    if "--check" in sys.argv:
        return int(wanted != text)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
