"""How commands find their data, and how they fail: in a sentence, with exit status 1."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

DataDirOption = Annotated[
    Path | None,
    typer.Option(help="The folder that `tinworks up` was given; without it DATABASE_URL says where the database is."),
]


def use_data_dir(data_dir: Path | None) -> None:
    """Let settings find what `tinworks up --data-dir` keeps, unless the environment says otherwise."""
    if data_dir is not None:
        os.environ.setdefault("DATABASE_URL", f"sqlite:///{data_dir.expanduser().resolve() / 'tinworks.db'}")
        os.environ["TINWORKS_DATA_DIR"] = str(data_dir)


@contextmanager
def in_sentences() -> Iterator[None]:
    """Turn what a person can mend into one line and exit status 1; anything else keeps its traceback."""
    from pydantic import ValidationError
    from sqlalchemy.exc import DBAPIError

    from app.errors import TinworksError
    from app.up import CannotStart

    try:
        yield
    except CannotStart as error:
        fail(str(error))
    except TinworksError as error:
        fail(f"{error.detail}.")
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        fail(f"A setting is not valid. {problems}")
    except DBAPIError as error:
        cause = str(error.orig).strip().splitlines()[0]
        fail(f"The database refused: {cause}. Is DATABASE_URL right, and has `tinworks migrate` run?")


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Log nothing meanwhile: a command says itself what it finds, and its output may be read by a program."""
    import structlog

    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def fail(sentence: str) -> NoReturn:
    """End the command with this sentence."""
    typer.secho(f"tinworks: {sentence}", fg=typer.colors.RED, err=True)
    raise typer.Exit(1)
