"""What every answer of the service has to be like, whatever was sent: for tests that send anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

ROOT = str(Path(__file__).parents[2])
_INSIDE = (ROOT, "site-packages", "Traceback", ".py", "sqlalchemy", "psycopg", "sqlite3")
"""What would tell a client how the server is built."""
LONGEST_S = 15.0
"""Far more than any answer takes here, polls included, even on a busy machine: a request that hangs is noticed."""


def check_answer(answer: httpx.Response, *, openai: bool = False, sent: str = "") -> None:
    """No 5xx and no 402; a 4xx is a JSON error in one piece, as it is, that says nothing of our insides (WIRE §0.10,
    §0.11). `sent`: what the client has said himself and may be told again."""
    assert answer.status_code < 500, answer.text
    assert answer.status_code != 402
    assert answer.elapsed.total_seconds() < LONGEST_S
    if answer.status_code < 400:
        return
    assert answer.headers["content-length"] == str(len(answer.content))
    assert "content-encoding" not in answer.headers and "transfer-encoding" not in answer.headers
    assert answer.headers["content-type"] == "application/json"
    assert [word for word in _INSIDE if word in answer.text and word not in sent] == []
    body: Any = answer.json()
    if answer.status_code == 408:
        assert body.get("type") == "try_again" or isinstance(body["detail"], str)
    elif openai:
        assert isinstance(body["error"]["message"], str) and body["error"]["type"]
    else:
        assert set(body) == {"detail"} and isinstance(body["detail"], str) and body["detail"]
