"""`make demo`: start Tinworks on a free port in a temporary folder, run the quickstart, stop and remove everything."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
START_S = 120.0
STOP_S = 15.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: str, port: int) -> subprocess.Popen[bytes]:
    """`tinworks up`, in a session of its own: Ctrl-C reaches this program only, which then stops it."""
    command = [sys.executable, "-m", "app.cli", "up", "--port", str(port), "--data-dir", f"{folder}/data"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("TINWORKS_", "TINKER_"))}
    for name in ("DATABASE_URL", "REDIS_URL"):
        ours.pop(name, None)
    return subprocess.Popen(command, cwd=HERE.parent, env=ours, stdin=subprocess.DEVNULL, start_new_session=True)


def wait_until_ready(service: subprocess.Popen[bytes], url: str) -> None:
    """Return when the service is healthy; exit if it ends or takes too long."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if service.poll() is not None:
            sys.exit("demo: `tinworks up` ended; see above.")
        try:
            with direct.open(f"{url}/api/v1/healthz", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit(f"demo: not ready after {START_S:.0f} s.")


def stop(service: subprocess.Popen[bytes]) -> None:
    """End the service and what it has started; no further Ctrl-C is needed, or heard."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if service.poll() is None:
        service.terminate()
    try:
        service.wait(STOP_S)
    except subprocess.TimeoutExpired:
        service.kill()  # its children end with it
        service.wait()


def main() -> int:
    """Run the demo. Returns the quickstart's exit status."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    url = f"http://127.0.0.1:{(port := free_port())}"
    with tempfile.TemporaryDirectory(prefix="tinworks-demo-", ignore_cleanup_errors=True) as folder:
        service = start(folder, port)
        try:
            wait_until_ready(service, url)
            quickstart = [sys.executable, str(HERE / "pig_latin.py"), "--base-url", url]
            environment = {**os.environ, "TINKER_API_KEY": "tml-demo", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
            return subprocess.run(quickstart, env=environment, check=False).returncode
        except KeyboardInterrupt:
            return 130
        finally:
            stop(service)


if __name__ == "__main__":
    sys.exit(main())
