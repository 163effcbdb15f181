"""Names that the scripts and those who check them share; importing them does not import the SDK."""

from __future__ import annotations

TENANTS = ("sft", "rl", "custom")
LAST = "last"
"""Every run saves its final adapter under this name."""
SHORT = "one-step-short"
"""And under this one, what it was a step before."""
END = "end"
"""And the state that it ends in."""
