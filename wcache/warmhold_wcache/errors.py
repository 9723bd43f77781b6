# SPDX-License-Identifier: Apache-2.0
"""What the vault and its clients can answer instead of weights; every error has a dotted code.

Codes: wcache.absent (no vault, or nothing resident), wcache.dead-socket (a socket nobody serves),
wcache.hung (no answer in time), wcache.other-uid, wcache.refused, wcache.key-mismatch,
wcache.in-use, wcache.malformed, wcache.too-large, wcache.unsupported (not possible here),
wcache.cuda (the NVIDIA driver refused a call), wcache.not-resident (a preload that did not
succeed).
"""

from collections.abc import Mapping
from typing import Any


class WcacheError(Exception):
    """A dotted code, what was found, and what to do about it."""

    def __init__(self, code: str, detail: str, remedy: str = "") -> None:
        self.code = code
        self.detail = detail
        self.remedy = remedy
        super().__init__(f"{code}: {detail}")

    def to_json(self) -> dict[str, Any]:
        """Return the error as the answer that carries it."""
        return {"ok": False, "code": self.code, "detail": self.detail, "remedy": self.remedy}


class UnreachableError(WcacheError):
    """No vault answers at the socket: absent, dead-socket, hung, or not for this user."""


class MissError(WcacheError):
    """No generation has this key; `fields` holds what differs: name -> (resident, wanted)."""

    def __init__(
        self, code: str, detail: str, fields: Mapping[str, tuple[str, str]], remedy: str = ""
    ) -> None:
        super().__init__(code, detail, remedy)
        self.fields = dict(fields)

    def to_json(self) -> dict[str, Any]:
        """Return the error as the answer that carries it, with its fields."""
        return {**super().to_json(), "fields": self.fields}


def malformed(detail: str) -> WcacheError:
    """Given what is wrong with a message or a generation, return the error."""
    return WcacheError("wcache.malformed", detail, "use the client of the same version")


def error_from_json(answer: Mapping[str, Any]) -> WcacheError:
    """Given an answer that is not ok, return the error in it."""
    code, detail, remedy = (str(answer.get(name, "")) for name in ("code", "detail", "remedy"))
    fields = answer.get("fields")
    if not isinstance(fields, dict):
        return WcacheError(code, detail, remedy)
    pairs = {
        str(name): (str(pair[0]), str(pair[1]))
        for name, pair in fields.items()
        if isinstance(pair, list) and len(pair) == 2
    }
    return MissError(code, detail, pairs, remedy)
