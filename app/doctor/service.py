"""All checks, one after the other. None ends the others, whatever it runs into."""

from __future__ import annotations

from collections.abc import Iterator

from app.doctor.findings import Check, Finding, cause, failed
from app.doctor.host import check_gpus, check_model, check_open_files, check_settings
from app.doctor.stores import check_blobs, check_broker, check_database
from app.settings import Settings

CHECKS: tuple[Check, ...] = (
    check_settings,
    check_database,
    check_broker,
    check_blobs,
    check_open_files,
    check_gpus,
    check_model,
)


def examine(settings: Settings) -> Iterator[Finding]:
    """What is found, as it is found."""
    for check in CHECKS:
        try:
            yield from check(settings)
        except Exception as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield failed(name, f"{type(error).__name__}: {cause(error)}", "This check could not be made.")
