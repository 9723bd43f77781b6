# SPDX-License-Identifier: Apache-2.0
"""Clients that do not stop: each gets a whole answer or a 503, or it is written down as broken."""

import http.client
import json
import threading
from collections import Counter
from types import TracebackType

_PATIENCE_S = 120
_PER_CONNECTION = {"keep-alive": 50, "stream": 5, "connect": 1}
_CLIENTS = {"keep-alive": 6, "stream": 4, "connect": 6}


class Storm:
    """Sixteen clients against a port of this machine, between enter and exit."""

    def __init__(self, port: int) -> None:
        self.statuses: list[int] = []
        self.broken: list[str] = []
        self._port = port
        self._over = threading.Event()
        kinds = [kind for kind, count in _CLIENTS.items() for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in kinds]

    def __enter__(self) -> "Storm":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def count(self) -> dict[int, int]:
        """How many answers of each status there were."""
        return dict(Counter(self.statuses))

    def _run(self, kind: str) -> None:
        while not self._over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE_S)
            try:
                for _ in range(_PER_CONNECTION[kind]):
                    if self._over.is_set() or not self._ask(connection, kind == "stream"):
                        break
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.broken.append(f"{kind}: {error!r}")
            finally:
                connection.close()
            self._over.wait(0.01)  # a refused client that came back at once would do nothing else

    def _ask(self, connection: http.client.HTTPConnection, streamed: bool) -> bool:
        """Ask once; tell whether the connection may be used again."""
        body = {"model": "demo", "prompt": "One, two,", "max_tokens": 4, "stream": streamed}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status == 200:
            if not streamed:
                json.loads(text)["choices"][0]["text"]
            elif not text.rstrip().endswith(b"[DONE]"):
                raise ValueError("the stream was cut")
        elif answer.status == 503 and not answer.getheader("Retry-After"):
            raise ValueError("503 without Retry-After")
        self.statuses.append(answer.status)
        return not answer.will_close
