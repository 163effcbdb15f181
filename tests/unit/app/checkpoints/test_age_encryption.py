"""Exports encrypted with age: to whom, and who is refused."""

from __future__ import annotations

import base64
import struct

import pyrage
import pytest

from app.checkpoints.encryption import encrypt, parse_recipients
from app.errors import InvalidRequest


def ssh_key(kind: bytes, *fields: bytes) -> str:
    packed = b"".join(struct.pack(">I", len(field)) + field for field in (kind, *fields))
    return f"{kind.decode()} {base64.b64encode(packed).decode()}"


def test_each_recipient_decrypts_to_the_same_bytes_and_nobody_else() -> None:
    keys = [pyrage.x25519.Identity.generate() for _ in range(3)]
    files = {"one.json": b"{}", "two.bin": bytes(range(256)) * 999, "empty": b""}
    sealed = encrypt(files, [str(key.to_public()) for key in keys[:2]])
    assert sealed.keys() == {"one.json.age", "two.bin.age", "empty.age"}
    for key in keys[:2]:
        assert {name.removesuffix(".age"): pyrage.decrypt(data, [key]) for name, data in sealed.items()} == files
    for data in sealed.values():
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(data, [keys[2]])


def test_nothing_of_a_file_can_be_read_without_a_key() -> None:
    secret = b"the weights of a model that nobody shall see" * 50
    (sealed,) = encrypt({"f": secret}, [str(pyrage.x25519.Identity.generate().to_public())]).values()
    assert not any(secret[i : i + 8] in sealed for i in range(44))


def test_an_ssh_key_is_a_recipient_beside_others() -> None:
    point = bytes([0x58]) + b"\x66" * 31  # the base point of the curve: a valid public key
    identity = pyrage.x25519.Identity.generate()
    public = ssh_key(b"ssh-ed25519", point) + " ada@example.com"
    (sealed,) = encrypt({"f": b"weights"}, [public, str(identity.to_public())]).values()
    stanzas = [line.split()[1] for line in sealed.split(b"\n") if line.startswith(b"-> ")]
    assert {b"ssh-ed25519", b"X25519"} <= set(stanzas)
    assert pyrage.decrypt(sealed, [identity]) == b"weights"


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "age1",
        "age1qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq",
        str(pyrage.x25519.Identity.generate()),
        str(pyrage.x25519.Identity.generate().to_public()) + "\n",
        "ssh-ed25519 AAAA",
        "ssh-ed25519 " + "A" * 4000,
        ssh_key(b"ssh-dss", b"\x01", b"\x02"),
        ssh_key(b"ssh-rsa", b"\x01\x00\x01", b"\x05" * 16),
        "\x00",
        "\ud800",
    ],
)
def test_what_is_no_key_is_refused_by_its_place(wrong: str) -> None:
    good = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(InvalidRequest, match=r"^age_encryption_recipients\.1: "):
        parse_recipients([good, wrong])


def test_a_key_at_which_the_library_panics_is_refused_like_any_other() -> None:
    with pytest.raises(InvalidRequest, match=r"^age_encryption_recipients\.0: "):
        parse_recipients([ssh_key(b"ssh-rsa", b"", b"")])
