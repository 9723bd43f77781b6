# SPDX-License-Identifier: Apache-2.0
"""A vault and starts of vLLM within one container, for the checks beside it."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = "/opt/warmhold/demo"
LINE = "weights mode="


class Vault:
    """The real vault, without an fd store, in a folder of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warmhold-contract-"))
        self.socket = self.folder / "wcache.sock"
        self.digests = self.folder / "digests"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "warmhold_wcache.serve", "--socket", str(self.socket)]
        )
        deadline = time.monotonic() + 10
        while not self.socket.exists():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)

    def extra(self, **more: object) -> dict[str, object]:
        return {"socket_path": str(self.socket), "digests": str(self.digests), **more}


def start(environ: dict[str, str] | None = None, **job: object) -> dict:
    """Start vLLM once; return its result, with the loader's log line as `line` and a failure's
    tail."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(HERE / "one_start.py"), json.dumps({"model": MODEL, **job})],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **(environ or {})},
        check=False,
    )
    text = done.stdout + done.stderr
    lines = text.splitlines()
    result = next((json.loads(i[7:]) for i in lines if i.startswith("RESULT ")), {})
    line = next((i for i in lines if LINE in i), "")
    result["line"] = line[line.find(LINE) :] if line else ""
    result["code"] = done.returncode
    result["wall_s"] = time.monotonic() - began
    result["log"] = text
    if done.returncode and not job.get("fails"):
        print("\n".join(lines[-60:]), flush=True)
    return result


def words(result: dict) -> dict[str, str]:
    """The log line's key=value pairs."""
    import shlex

    return dict(word.split("=", 1) for word in shlex.split(result["line"]) if "=" in word)
