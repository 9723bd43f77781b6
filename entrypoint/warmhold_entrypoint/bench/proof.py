# SPDX-License-Identifier: Apache-2.0
"""What a start has to show before its time counts: pure questions to what was seen.

A "restore" that was a cold start, or a "hit" that read the file again, must not become a number.
"""

from dataclasses import dataclass
from typing import Any

# The headers of weight files, and what the kernel reads ahead of them: at least, or a part of all.
_HEADER_BYTES, _HEADER_SHARE = 4 << 20, 0.02


@dataclass(frozen=True)
class Evidence:
    """What was seen of one start. `answers` are texts, one for each known prompt; nonces are texts
    that only one process and what is restored from it hold; `cached_*_bytes` are those of weight
    files in the page cache, before and after (None: the kernel did not say)."""

    wanted: str
    mode: str
    weights: dict[str, Any]
    weight_bytes: int
    answers: list[str]
    known_answers: list[str]
    nonce: str
    nonces_before: frozenset[str]
    snapshot_nonce: str
    cached_before_bytes: int | None = None
    cached_after_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """What of it is kept beside the time."""
        return {
            "mode": self.mode,
            "weights_from": self.weights.get("mode", ""),
            "weights_bytes": self.weights.get("bytes", 0),
            "weights_s": self.weights.get("seconds", 0.0),
            "weight_file_read_bytes": self.read_bytes,
            "same_process_as_the_snapshot": self.nonce == self.snapshot_nonce,
            "answers_equal": self.answers == self.known_answers,
        }

    @property
    def read_bytes(self) -> int | None:
        """Bytes of weight files that this start read, where the page cache was empty before."""
        if self.cached_before_bytes is None or self.cached_after_bytes is None:
            return None
        return max(0, self.cached_after_bytes - self.cached_before_bytes)


def find_faults(seen: Evidence) -> list[str]:
    """Given what was seen, return everything that speaks against the row; [] proves it."""
    faults = []
    if seen.mode != seen.wanted:
        faults.append(f"the runner says mode {seen.mode or 'none'}, not {seen.wanted}")
    if seen.answers != seen.known_answers:
        faults.append("its answers to known prompts differ from the first start's")
    if seen.wanted == "snapshot":
        if not seen.nonce or seen.nonce != seen.snapshot_nonce:
            faults.append("it is not the process that the snapshot was made of")
    elif not seen.nonce or seen.nonce in seen.nonces_before:
        faults.append("it is no new process")
    source = seen.weights.get("mode", "")
    if seen.wanted == "disk" and (source != "disk" or not seen.weights.get("bytes")):
        faults.append(f"its loader read no weights from disk ({source or 'it says nothing'})")
    if seen.wanted in ("ipc_cache", "snapshot"):
        if source != "ipc_cache":
            faults.append(f"its weights came from {source or 'nowhere'}, not out of the vault")
        if seen.read_bytes is None:
            faults.append("how much of the weight files it read is not known")
        elif seen.read_bytes > max(_HEADER_BYTES, _HEADER_SHARE * seen.weight_bytes):
            faults.append(f"it read {seen.read_bytes} bytes of the weight files")
    return faults
