import asyncio, faulthandler, sys, threading, time
import pytest

@pytest.mark.parametrize("n", range(400))
def test_start_stop(api, n):
    pass
