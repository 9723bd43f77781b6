# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as values, and the one table from faults to exit codes.

A fault has a dotted code, a detail and a remedy. The first word of the code is its kind, and the
kind decides the exit code. Only `cli.main` catches `EntrypointError`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every warmhold command; 128+n means that signal n ended the engine."""

    STOPPED = 0
    FAILED = 1
    USAGE = 2
    MODE_UNAVAILABLE = 69
    BUG = 70
    SNAPSHOT_CREATE = 73
    RESTORE = 74
    NOT_READY = 75
    RIGHTS = 77
    SETTINGS = 78


EXIT_MEANING = {
    Exit.STOPPED: "stopped on request",
    Exit.FAILED: "the engine ended unasked with 0, or a question was answered with no",
    Exit.USAGE: "usage, also an argument that vLLM refused",
    Exit.MODE_UNAVAILABLE: "the named mode is not available, or no vault answers",
    Exit.BUG: "a bug in warmhold",
    Exit.SNAPSHOT_CREATE: "snapshot create failed",
    Exit.RESTORE: "restore failed in the named mode",
    Exit.NOT_READY: "not ready in time",
    Exit.RIGHTS: "a right or permission is missing",
    Exit.SETTINGS: "settings are wrong",
}

_EXIT_OF_KIND = {
    "settings": Exit.SETTINGS,
    "arguments": Exit.SETTINGS,
    "model": Exit.SETTINGS,
    "memory": Exit.SETTINGS,
    "gpu": Exit.SETTINGS,
    "shm": Exit.SETTINGS,
    "port": Exit.SETTINGS,
    "rights": Exit.RIGHTS,
    "mode": Exit.MODE_UNAVAILABLE,
    "wcache": Exit.MODE_UNAVAILABLE,
    "ready": Exit.NOT_READY,
    "engine": Exit.FAILED,
    "usage": Exit.USAGE,
    "snapshot": Exit.SNAPSHOT_CREATE,
}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: a dotted code, what was found, and what to do about it."""

    code: str
    detail: str
    remedy: str

    @classmethod
    def of(cls, answer: Mapping[str, str]) -> "Fault":
        """Given an answer that holds code, detail and remedy, return it as a fault."""
        return cls(answer["code"], answer["detail"], answer["remedy"])

    @property
    def exit_code(self) -> Exit:
        """The exit code of this fault's kind; an unknown kind is a bug."""
        return _EXIT_OF_KIND.get(self.code.partition(".")[0], Exit.BUG)

    def lines(self) -> str:
        """Given a fault, return the two lines that a user sees."""
        return f"error: {self.code}: {self.detail}\nfix: {self.remedy}"


class EntrypointError(Exception):
    """One or more faults that end a command; they are shown together."""

    def __init__(self, faults: Iterable[Fault], code: Exit | None = None) -> None:
        """Given the faults, and a code where it is not that of the first one's kind."""
        self.faults = tuple(faults)
        self._code = code
        super().__init__("; ".join(f"{fault.code}: {fault.detail}" for fault in self.faults))

    @property
    def exit_code(self) -> Exit:
        """Given several faults, return the first one's code, or the one that was given."""
        return self.faults[0].exit_code if self._code is None else self._code


def exit_code_of_status(status: int) -> int:
    """Given a child's return code as subprocess reports it, return the container's exit code.

    A signal n (reported as -n) becomes 128+n. An engine that ended unasked with 0 has failed too.
    """
    if status < 0:
        return 128 - status
    return status or int(Exit.FAILED)


@dataclass(frozen=True)
class Rejection:
    """Why a mode is not used."""

    mode: str
    code: str
    detail: str
    remedy: str
