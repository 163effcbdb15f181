"""`--base-model [ALIAS[,ALIAS…]=]NAME_OR_PATH`: parsing, grouping, the names of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.up import CannotStart
from app.up.models import BaseModel, group_base_models, parse_base_model, worker_roles


@pytest.mark.parametrize(
    ("text", "source", "aliases"),
    [
        ("org/model-7b", "org/model-7b", ()),
        ("small=org/model-7b", "org/model-7b", ("small",)),
        ("a, Org/B =org/model-7b", "org/model-7b", ("a", "Org/B")),
        ("a=org/model?x=1", "org/model?x=1", ("a",)),
    ],
)
def test_a_hub_name_is_read_with_its_aliases(text: str, source: str, aliases: tuple[str, ...]) -> None:
    assert parse_base_model(text) == BaseModel(source, aliases)


def test_a_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_base_model("x=tiny") == BaseModel(str(tmp_path / "tiny"), ("x",))
    assert parse_base_model("./tiny").source == str(tmp_path / "tiny")


@pytest.mark.parametrize("text", ["", "=org/m", "a=", "a,,b=org/m"])
def test_an_empty_part_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(CannotStart, match="NAME_OR_PATH"):
        parse_base_model(text)


@pytest.mark.parametrize("path", ["./no-such-folder", "/no/such/folder", "~/no-such-folder-of-tinworks"])
def test_a_path_without_a_folder_is_refused_at_once(path: str) -> None:
    with pytest.raises(CannotStart, match="there is no folder"):
        parse_base_model(f"a={path}")


def test_values_with_one_source_become_one_worker() -> None:
    models = group_base_models(["a=org/m", "org/n", "b,a=org/m"])
    assert models == [BaseModel("org/m", ("a", "b")), BaseModel("org/n")]
    assert [model.setting for model in models] == ["a,b=org/m", "org/n"]


def test_an_alias_of_two_models_is_refused() -> None:
    with pytest.raises(CannotStart, match="'a' is given to two models"):
        group_base_models(["a=org/m", "a=org/n"])


def test_models_that_would_share_a_pool_are_refused() -> None:
    with pytest.raises(CannotStart, match="'org/m' and 'Org-M' differ too little"):
        group_base_models(["org/m", "Org-M=org/n"])


def test_one_worker_is_named_plainly_and_several_by_pool() -> None:
    one, other = BaseModel("org/Model-1.5B"), BaseModel("org/z", ("Chat Z",))
    assert worker_roles([one]) == [("worker", one)]
    assert [role for role, _ in worker_roles([one, other])] == ["worker-org-model-1.5b", "worker-chat-z"]
