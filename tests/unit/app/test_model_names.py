"""The names of a served model, and what the SDK makes of them on the client's machine."""

from __future__ import annotations

import pytest

from app.fleet.base_models import client_folder, names_to_register, pool_of
from app.fleet.queues import pool_slug
from app.fleet.service import NameOfModel
from app.up.models import BaseModel


def read_by_the_sdk(name: NameOfModel) -> str:
    """Where the SDK looks for the tokenizer: the id if it is told one, else the name, whose third part it drops."""
    if name.tokenizer_id is not None:
        return name.tokenizer_id
    parts = name.client_name.split("/")
    return "/".join(parts[:2]) if len(parts) == 3 else name.client_name


@pytest.mark.parametrize("folder", ["/models/tiny", "/m/x", "/a/b/c/tiny", "/tiny"])
def test_a_folder_is_never_told_with_exactly_two_slashes(folder: str) -> None:
    told = client_folder(folder)
    assert told.count("/") != 2
    assert told.lstrip("/") == folder.lstrip("/")


@pytest.mark.parametrize("folder", ["/models/tiny", "/data/models/tiny"])
@pytest.mark.parametrize("aliases", [(), ("tiny",), ("tiny", "small")])
def test_a_folder_is_found_under_each_of_its_plain_names(folder: str, aliases: tuple[str, ...]) -> None:
    names = names_to_register(BaseModel(folder, aliases))
    assert {name.name for name in names} == {*aliases, client_folder(folder)}
    for name in names:
        assert read_by_the_sdk(name) == client_folder(folder)
        assert name.client_name == client_folder(folder)


def test_an_alias_that_is_a_hub_name_is_what_clients_look_up() -> None:
    names = names_to_register(BaseModel("/models/tiny", ("Qwen/Qwen3-8B",)))
    assert names == [NameOfModel("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", None)]


def test_a_hub_name_is_its_own_name() -> None:
    assert names_to_register(BaseModel("org/model")) == [NameOfModel("org/model", "org/model", None)]


def test_a_plain_alias_of_a_hub_name_leads_to_the_hub_name() -> None:
    names = names_to_register(BaseModel("org/model", ("chat",)))
    assert names == [NameOfModel("chat", "org/model", None), NameOfModel("org/model", "org/model", None)]


def test_no_name_is_registered_twice() -> None:
    names = [name.name for name in names_to_register(BaseModel("/models/tiny", ("a", "a", "//models/tiny")))]
    assert len(names) == len(set(names))


def test_a_pool_is_named_after_the_first_name() -> None:
    assert pool_of(BaseModel("/models/tiny", ("Org/Model 1.5B", "b"))) == "org-model-1.5b"


@pytest.mark.parametrize(("name", "slug"), [("A//b__C", "a-b-c"), ("ä", "model"), ("x" * 200, "x" * 100)])
def test_a_slug_is_safe_in_the_name_of_a_queue(name: str, slug: str) -> None:
    assert pool_slug(name) == slug
