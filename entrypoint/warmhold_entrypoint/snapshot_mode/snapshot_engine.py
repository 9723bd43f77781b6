# SPDX-License-Identifier: Apache-2.0
"""A running engine as a snapshot's maker and its restorer speak to it: over its control socket."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from warmhold_snapshot.errors import SnapshotError
from warmhold_wcache.control_client import ControlClient, ControlError

# Token ids that every vocabulary has; one token is asked for after each.
PROMPTS = ([100, 101, 102, 103, 104, 105, 106, 107], [107, 101], [103], [105, 105, 100, 104])
_CANARY_S = 60.0
_RESUME_S = 60.0
_STATE_S = 30.0  # a worker answers between two steps, and a step on a CPU takes seconds


class ControlledEngine:
    """An engine that is held, asked, quiesced and resumed. `drain_s` is what requests may take;
    `on_resumed` is called whenever it serves again."""

    def __init__(
        self, socket: Path, drain_s: float = 30.0, on_resumed: Callable[[], None] = lambda: None
    ) -> None:
        self._client = ControlClient(socket)
        self._drain_s = drain_s
        self._on_resumed = on_resumed

    def hold(self) -> None:
        """Let what is under way end, take nothing new, and close what is idle. Raise SnapshotError
        `snapshot.busy` where requests outlast the limit."""
        try:
            self._client.hold(self._drain_s)
        except ControlError as error:
            if error.code != "control.busy":
                raise
            raise SnapshotError("snapshot.busy", error.detail, error.remedy) from error

    def canary(self) -> dict[str, Any]:
        """Return what a restored engine has to answer: the likeliest token after each prompt (none
        where it does not generate), and the random text that this process alone holds.

        Without log-probabilities: the first one compiles a kernel, and the image would be larger.
        """
        nonce = self._client.state()["nonce"]
        try:
            tokens = [
                self._client.canary(_CANARY_S, prompt, with_logprob=False)["token"]
                for prompt in PROMPTS
            ]
        except ControlError as error:
            if error.code != "control.unsupported":
                raise
            tokens = []
        return {"nonce": nonce, "tokens": tokens}

    def quiesce(self) -> None:
        """Give the weights back."""
        self._client.quiesce(self._drain_s)

    def map_weights(self) -> None:
        """Map the weights, and let nobody in yet."""
        self._client.resume(_RESUME_S, serve=False)

    def resume(self) -> None:
        """Map the weights and serve."""
        self._client.resume(_RESUME_S)
        self._on_resumed()

    def generations(self) -> dict[str, int]:
        """Return the bytes of every generation that its workers map, by id. Raise SnapshotError
        `snapshot.detached` where weights were changed since: they are in no vault."""
        workers = self._client.state(_STATE_S)["workers"]
        if any(worker["detached"] for worker in workers):
            remedy = "restart the engine; it then has the weights of the checkpoint again"
            raise SnapshotError("snapshot.detached", "weights were updated in place", remedy)
        return {item["id"]: item["bytes"] for worker in workers for item in worker["generations"]}

    def require_canary(self, wanted: Any) -> None:
        """Given what was recorded, raise SnapshotError `snapshot.canary` where it answers
        otherwise."""
        found = self.canary()
        if found != wanted:
            what = "tokens" if found["nonce"] == wanted.get("nonce") else "process"
            detail = f"the restored engine is not the one of the snapshot: other {what}"
            raise SnapshotError("snapshot.canary", detail, "create a new snapshot")
