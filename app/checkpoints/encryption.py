"""Exported files encrypted with age (https://age-encryption.org/v1) to the recipients that a client names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyrage

from app.errors import InvalidRequest

SUFFIX = ".age"
_FIELD = "age_encryption_recipients"


def parse_recipients(recipients: Sequence[str]) -> list[Any]:
    """The keys to encrypt to: native X25519 ones (`age1…`) or SSH public keys.

    Raises InvalidRequest that names the first that nothing can be encrypted to.
    """
    return [_parse(text, f"{_FIELD}.{place}") for place, text in enumerate(recipients)]


def _parse(text: str, field: str) -> Any:
    kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
    try:
        recipient = kind.from_str(text)
        pyrage.encrypt(b"", [recipient])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a malformed RSA key makes the library panic, which is no Exception
        raise InvalidRequest(f"{field}: neither an age1… key nor an SSH public key that age can encrypt to") from error
    return recipient


def encrypt(files: Mapping[str, bytes], recipients: Sequence[str]) -> dict[str, bytes]:
    """`files` in age's binary format, each name with `.age` behind it. Raises InvalidRequest."""
    keys = parse_recipients(recipients)
    return {name + SUFFIX: pyrage.encrypt(data, keys) for name, data in files.items()}
