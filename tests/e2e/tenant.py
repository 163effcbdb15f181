"""A key, the SDK's clients with it, and the `tinker` command line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import tinker
from click.testing import CliRunner, Result
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError
from tinker.lib.internal_client_holder import _SessionlessHolderCache
from tinker.lib.public_interfaces import rest_client_common

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, train

DATA = batch(33, [12])


@dataclass
class Tenant:
    """A key, and the SDK's clients with it."""

    base_url: str
    key: str

    @property
    def rest(self) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.base_url, api_key=self.key)

    def connect(self, **options: Any) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.base_url, api_key=self.key, **options)

    def run(self, **options: Any) -> tinker.TrainingClient:
        """A run after one step."""
        run = self.connect().create_lora_training_client(base_model=MODEL, rank=8, **options).result(60)
        train(run, DATA, 1)
        return run

    @property
    def environment(self) -> dict[str, str]:
        return {"TINKER_BASE_URL": self.base_url, "TINKER_API_KEY": self.key}

    def invoke(self, *arguments: str, typed: str | None = None, **environment: str | None) -> Result:
        """Run the `tinker` command. The SDK keeps the connection of the first key that a process takes from its
        environment: not here."""
        with patch.object(rest_client_common, "sessionless_holder_cache", _SessionlessHolderCache()):
            return CliRunner().invoke(main_cli, arguments, input=typed, env={**self.environment, **environment})

    def command(self, *arguments: str) -> str:
        """What the `tinker` command prints. It runs in this process: it takes seconds to start in one of its own."""
        result = self.invoke(*arguments)
        assert result.exit_code == 0, result.output + repr(result.exception)
        return str(result.stdout)

    def told(self, *arguments: str) -> Any:
        """What the `tinker` command tells in JSON."""
        printed = self.command("--format", "json", *arguments)
        return json.loads(printed) if printed.strip() else None

    def failed(self, *arguments: str) -> str:
        """What the `tinker` command says of its failure."""
        error = self.invoke(*arguments).exception
        assert isinstance(error, TinkerCliError), repr(error)
        return f"{error.message}\n{error.details}"
