"""What `--base-model` says: which model folders are served, by which names, one worker each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.fleet.queues import pool_slug
from app.up import CannotStart


@dataclass(frozen=True)
class BaseModel:
    """One model to serve: a local folder or a hub name, and the aliases that clients may ask for it by."""

    source: str
    aliases: tuple[str, ...] = ()

    @property
    def setting(self) -> str:
        """The value of TINWORKS_BASE_MODEL: `ALIAS,ALIAS2=SOURCE`, or `SOURCE`."""
        return f"{','.join(self.aliases)}={self.source}" if self.aliases else self.source

    @property
    def names(self) -> tuple[str, ...]:
        """What clients put into `base_model`."""
        return self.aliases or (self.source,)


def parse_base_model(text: str) -> BaseModel:
    """Read `[ALIAS[,ALIAS…]=]NAME_OR_PATH`. The first `=` ends the aliases; a folder is made absolute.

    Raises:
        CannotStart: a part is empty, or the text is a path at which there is no folder.
    """
    before, equals, after = text.partition("=")
    aliases = tuple(part.strip() for part in before.split(",")) if equals else ()
    source = (after if equals else before).strip()
    if not source or not all(aliases):
        raise CannotStart(f"--base-model {text!r} is not [ALIAS[,ALIAS…]=]NAME_OR_PATH.")
    folder = Path(source).expanduser()
    if folder.is_dir():
        return BaseModel(str(folder.resolve()), aliases)
    if source.startswith((".", "/", "~")):
        raise CannotStart(f"--base-model {text!r}: there is no folder {folder}.")
    return BaseModel(source, aliases)


def group_base_models(texts: Iterable[str]) -> list[BaseModel]:
    """Parse all `--base-model` values and join those of one source, in order of first mention: one worker each.

    Raises:
        CannotStart: as `parse_base_model`; or one alias is given to two models; or two models would share a pool.
    """
    aliases_of: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for text in texts:
        model = parse_base_model(text)
        aliases = aliases_of.setdefault(model.source, [])
        for alias in model.aliases:
            if owner.setdefault(alias, model.source) != model.source:
                raise CannotStart(f"The alias {alias!r} is given to two models: {owner[alias]} and {model.source}.")
            if alias not in aliases:
                aliases.append(alias)
    models = [BaseModel(source, tuple(aliases)) for source, aliases in aliases_of.items()]
    _check_pools(models)
    return models


def worker_roles(models: Sequence[BaseModel]) -> list[tuple[str, BaseModel]]:
    """Name each model's worker: `worker` when there is one, else `worker-<pool>`."""
    if len(models) == 1:
        return [("worker", models[0])]
    return [(f"worker-{pool_slug(model.names[0])}", model) for model in models]


def _check_pools(models: Iterable[BaseModel]) -> None:
    pools: dict[str, BaseModel] = {}
    for model in models:
        other = pools.setdefault(pool_slug(model.names[0]), model)
        if other is not model:
            raise CannotStart(
                f"{other.names[0]!r} and {model.names[0]!r} differ too little to name two pools of workers; "
                "give one of them another alias."
            )
