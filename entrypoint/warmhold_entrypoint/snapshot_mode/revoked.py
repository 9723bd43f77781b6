# SPDX-License-Identifier: Apache-2.0
"""What an artifact must not outlive (keys, TLS files, LoRAs, served names), and which ones have.

Told in every case, also where snapshots are off or impossible: what holds a key that was taken back
is not to lie there. Nothing is removed here.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from warmhold_snapshot import identity
from warmhold_snapshot.artifact import MANIFEST, list_names
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.manifest import Manifest

from ..settings import Settings
from .inputs import LORA_OPTIONS

_TLS_FILES = ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs")
# Fields whose change revokes an artifact: it answers to a key, or serves what is not wanted now.
_REVOKING = (
    identity.SECRETS,
    identity.SERVED,
    *(f"{identity.FILES}{option}" for option in LORA_OPTIONS),
)


def collect_secrets(settings: Settings) -> dict[str, str]:
    """Given settings, return what an artifact must not outlive: API keys, and the TLS files' bytes
    as digests."""
    secrets = {f"api_key.{number}": key for number, key in enumerate(settings.api_keys)}
    for option in _TLS_FILES:
        if path := settings.arguments.value(option):
            try:
                content = Path(path).read_bytes()
            except OSError:
                content = b""
            secrets[option.strip("-")] = hashlib.sha256(content).hexdigest()
    return secrets


def collect_served(settings: Settings) -> list[str]:
    """Given settings, return what clients may ask for: the served names, and LoRAs as the arguments
    have them."""
    arguments = settings.arguments
    served = [*(arguments.values("--served-model-name") or (settings.model,))]
    for option, values in arguments.options():
        if option.lstrip("-").partition(".")[0] in LORA_OPTIONS:
            served += [f"{option}={value}" for value in values]
    return served


def find_revoked(
    folder: Path, manifests: Sequence[tuple[str, Manifest | SnapshotError]], now: Mapping[str, str]
) -> tuple[str, ...]:
    """Given the folder of artifacts, their manifests, and the fields of an identity that revoke,
    return the names of the revoked: a secret, a LoRA or a served name has changed since.

    One that cannot be read counts where there are secrets now or its manifest names one, since
    nobody can tell which ones its images hold; else it stays, for whoever wants to look into it.
    """
    has_secrets = any(name.startswith(identity.SECRETS) for name in now)
    return tuple(
        name
        for name, manifest in manifests
        if (
            any(
                item.field.startswith(_REVOKING)
                for item in identity.compare(manifest.identity, now)
            )
            if isinstance(manifest, Manifest)
            else has_secrets or _names_secret(folder / name)
        )
    )


def find_unsealed(
    folder: Path, error: SnapshotError, secrets: Mapping[str, str]
) -> tuple[str, ...]:
    """The revoked artifacts where the key that seals them cannot be used: none can be read."""
    with suppress(OSError):
        manifests = [(name, error) for name in list_names(folder)]
        return find_revoked(
            folder, manifests, {f"{identity.SECRETS}{name}": "" for name in secrets}
        )
    return ()


def _names_secret(artifact: Path) -> bool:
    """Whether a manifest that is not to be believed has a field of a secret."""
    with suppress(OSError):
        return f'"{identity.SECRETS}'.encode() in (artifact / MANIFEST).read_bytes()
    return False
