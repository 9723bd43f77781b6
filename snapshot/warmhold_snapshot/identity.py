# SPDX-License-Identifier: Apache-2.0
"""What must be equal for a snapshot to be right: collected as names and texts, compared one by one.

The caller gives what only it knows (versions, arguments, environment, files, secrets, the weights'
key); machine, kernel and criu are read here. Secrets, and what files contain, are kept as HMACs
under a key file of the state volume, so that a changed, added or removed one is seen and none can
be read.
"""

import hashlib
import hmac
import json
import os
import secrets as random
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from .errors import SnapshotError
from .pids import PROC

KEY_BYTES = 32
ABSENT = "absent"
SECRETS, FILES, SERVED, GPU = "secret.", "files.", "served", "gpu."
_FLAGS, _PACKAGES = "cpu_flags", "packages"
_SETS = (_FLAGS, _PACKAGES, SERVED, FILES)  # fields that are words, in the order of their names
_SHOWN = 60
_LISTED = 3
_DIGITS = 16  # of a file's digest: enough to see that it changed


@dataclass(frozen=True)
class Difference:
    """A field that differs: its value in the snapshot and now; `absent` where there is none."""

    field: str
    then: str
    now: str

    def line(self) -> str:
        """Return it as one line; of sets only what differs, of long texts only their beginnings."""
        if self.field.startswith(_SETS) and ABSENT not in (self.then, self.now):
            then, now = set(self.then.split()), set(self.now.split())
            changed = [f"-{word}" for word in sorted(then - now)]
            changed += [f"+{word}" for word in sorted(now - then)]
            return f"{self.field}: {' '.join(changed)}"
        return f"{self.field}: {_short(self.then)} then, {_short(self.now)} now"


def collect_identity(
    *,
    key: bytes,
    criu_version: str,
    versions: Mapping[str, str],
    argv: Sequence[str],
    environment: Mapping[str, str],
    files: Mapping[str, Mapping[str, str]],
    packages: Iterable[str],
    secrets: Mapping[str, str],
    served: Iterable[str],
    weights: str,
    gpu: Mapping[str, str] | None = None,
    proc: Path = PROC,
) -> dict[str, str]:
    """Given what the caller knows, return the identity as field -> text.

    `versions` are any names with their texts (build id, vllm, torch, driver). `files` are by what
    names them, each a mapping from path to version. `packages` are installed, `served` is what
    clients may ask for. `secrets` are by name; where the value of one occurs in `argv` or
    `environment` its name stands in for it. `gpu` tells of the GPU and its driver, by any names,
    where the engine is on one.
    """
    uname = os.uname()
    cpu, flags = read_cpu(proc)
    fields = {
        "machine": uname.machine,
        "kernel": f"{uname.release} {uname.version}",
        "page_bytes": str(os.sysconf("SC_PAGE_SIZE")),
        "cpu": cpu,
        _FLAGS: flags,
        "criu": criu_version,
        "argv": json.dumps([_mask(argument, secrets) for argument in argv]),
        "weights": weights,
        _PACKAGES: _join(packages),
        **collect_revoking(key, secrets, files, served),
    }
    fields |= {f"version.{name}": text for name, text in versions.items()}
    fields |= {f"environment.{name}": _mask(text, secrets) for name, text in environment.items()}
    fields |= {f"{GPU}{name}": text for name, text in (gpu or {}).items()}
    return fields


def collect_revoking(
    key: bytes,
    secrets: Mapping[str, str],
    files: Mapping[str, Mapping[str, str]],
    served: Iterable[str],
) -> dict[str, str]:
    """Given the same, return the fields of secrets, files and what is served: all that it takes to
    tell whether an artifact has been revoked."""
    fields = {f"{SECRETS}{name}": digest(key, f"{name}={text}") for name, text in secrets.items()}
    fields |= {
        f"{FILES}{name}": _join(
            f"{quote(path)}:{digest(key, version)[:_DIGITS]}" for path, version in found.items()
        )
        for name, found in files.items()
    }
    fields[SERVED] = _join(quote(name) for name in served)
    return fields


def compare(then: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    """Given two identities, return every field that differs, by name."""
    return [
        Difference(name, then.get(name, ABSENT), now.get(name, ABSENT))
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


def is_on_gpu(fields: Mapping[str, str]) -> bool:
    """Given an identity, tell whether its engine is on a GPU."""
    return any(name.startswith(GPU) for name in fields)


def require_equal(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise SnapshotError `snapshot.identity-mismatch` with every field that differs."""
    if differences := compare(then, now):
        lines = [difference.line() for difference in differences]
        detail = summarise(differences)
        raise SnapshotError("snapshot.identity-mismatch", detail, "create a new snapshot", lines)


def summarise(differences: Sequence[Difference]) -> str:
    """Given differences, return a line with the most telling ones: another image changes not only
    its version, but variables and packages with it."""
    lines = [difference.line() for difference in sorted(differences, key=_rank)]
    shown, more = lines[:_LISTED], len(lines) - _LISTED
    return "; ".join(shown + ([f"and {more} more"] if more > 0 else []))


def _rank(difference: Difference) -> int:
    name = difference.field
    return -1 if name.startswith("version.") else int(name.startswith(("environment.", _PACKAGES)))


def digest(key: bytes, text: str) -> str:
    """Given a key and a text, return the HMAC-SHA256 in hexadecimal."""
    return hmac.new(key, text.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()


def read_cpu(proc: Path = PROC) -> tuple[str, str]:
    """Return model and flags of the first processor (flags by name), as the kernel tells them."""
    fields: dict[str, str] = {}
    for line in (proc / "cpuinfo").read_text(errors="replace").splitlines():
        if not line.strip() and fields:
            break
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    model = " ".join(fields[name] for name in names if name in fields)
    flags = fields.get("flags") or fields.get("Features") or ""
    return model, " ".join(sorted(flags.split()))


def read_key(path: Path) -> bytes:
    """Given the key file, return the key; a missing one is made (0600, in one step).

    Raise SnapshotError `snapshot.key` for a file that others can read or that is none.
    """
    remedy = f"remove {path}; snapshots made under another key are then not used any more"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _make_key(path)
    except OSError as error:
        raise SnapshotError("snapshot.key", f"{path}: {error.strerror}", remedy) from error
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
        if not private or status.st_uid != os.geteuid():
            detail = f"{path} is not a file of this user alone (mode 0600)"
            raise SnapshotError("snapshot.key", detail, remedy)
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise SnapshotError("snapshot.key", f"{path} does not hold {KEY_BYTES} bytes", remedy)
    return key


def _make_key(path: Path) -> bytes:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{random.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(random.token_bytes(KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # the first of several makers wins, all read its key
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        detail = f"{path} cannot be made: {error.strerror}"
        raise SnapshotError("snapshot.key", detail, "mount a writable state volume") from error
    return read_key(path)


def _join(words: Iterable[str]) -> str:
    return " ".join(sorted(words))


def _mask(text: str, secrets: Mapping[str, str]) -> str:
    for name, value in secrets.items():
        if value:
            text = text.replace(value, f"<{name}>")
    return text


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
