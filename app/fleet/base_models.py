"""Names of a served base model, and what clients are told so that they find its tokenizer (WIRE §8).

The SDK looks a tokenizer up by the model's name on the client's machine: as a hub name, or as a local folder, except
that it reads a name with exactly two slashes as `org/model/variant`.
"""

from __future__ import annotations

from app.fleet.queues import pool_slug
from app.fleet.service import NameOfModel
from app.up.models import BaseModel


def pool_of(model: BaseModel) -> str:
    """The pool of the workers that serve this model."""
    return pool_slug(model.names[0])


def names_to_register(model: BaseModel) -> list[NameOfModel]:
    """Every name that clients may ask for, aliases first.

    An alias that looks like a hub name (`org/model`) is what clients look up; any other alias, like `tiny`, resolves to
    the folder itself, which is a name too.
    """
    source = client_folder(model.source) if model.source.startswith("/") else model.source
    tokenizer_id = source if model.source.startswith("/") else None
    names = [
        NameOfModel(alias, alias, None) if "/" in alias else NameOfModel(alias, source, tokenizer_id)
        for alias in model.aliases
    ]
    if not names or any(name.client_name == source for name in names):
        names.append(NameOfModel(source, source, tokenizer_id))
    return list({name.name: name for name in names}.values())


def client_folder(folder: str) -> str:
    """An absolute path that the SDK takes for one: never with exactly two slashes."""
    return f"/{folder}" if folder.count("/") == 2 else folder
