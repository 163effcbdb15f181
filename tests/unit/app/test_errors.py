"""What the protocol says of statuses, for every error that there is."""

from __future__ import annotations

import pytest

from app import errors
from app.errors import TinworksError


def all_errors(base: type[TinworksError] = TinworksError) -> list[type[TinworksError]]:
    return [base, *(one for direct in base.__subclasses__() for one in all_errors(direct))]


EXPECTED = {
    errors.InvalidRequest: (400, "user"),
    errors.Unauthorized: (401, "user"),
    errors.InvalidToken: (401, "user"),
    errors.NotFound: (404, "user"),
    errors.ConflictingReplay: (409, "user"),
    errors.Gone: (410, "user"),
    errors.TooLarge: (413, "user"),
    errors.TooBusy: (429, "server"),
    errors.Unavailable: (503, "server"),
}


@pytest.mark.parametrize("error", EXPECTED, ids=lambda error: error.__name__)
def test_an_error_has_its_status_and_category(error: type[TinworksError]) -> None:
    assert (error.status, error.category) == EXPECTED[error]


def test_no_error_sends_the_client_into_the_payment_pause() -> None:
    assert 402 not in {error.status for error in all_errors()}


def test_only_a_contradicting_replay_is_a_conflict() -> None:
    assert [error for error in all_errors() if error.status == 409] == [errors.ConflictingReplay]


def test_what_is_the_users_fault_is_never_a_5xx() -> None:
    assert [error for error in all_errors() if error.category == "user" and error.status >= 500] == []


def test_an_error_shows_its_text() -> None:
    assert errors.NotFound("no such thing").detail == str(errors.NotFound("no such thing")) == "no such thing"
