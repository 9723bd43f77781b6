# SPDX-License-Identifier: Apache-2.0
"""The launch key: what can be compared before an engine starts, in milliseconds and without torch.

A key is a flat mapping of field to text, so that a mismatch can be told by its field. Equal launch
keys promise a hit and different ones a miss, neither of them for certain: the exact key decides in
the loader. This module reads what it is given and chooses nothing.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from warmhold_wcache.content import Content, read_cached_content

Differences = dict[str, tuple[str | None, str | None]]  # field -> (resident, wanted)

# What changes neither the weights nor how they are laid out. Everything not named here counts: a
# flag too many costs a reload, one too few only a wrong forecast, because the loader checks the
# exact key.
_UNRELATED_FLAGS = frozenset(
    """
    allow-credentials allowed-headers allowed-methods allowed-origins api-key api-server-count
    chat-template chat-template-content-format config default-chat-template-kwargs
    disable-fastapi-docs disable-log-stats disable-uvicorn-access-log download-dir
    enable-auto-tool-choice enable-log-outputs enable-log-requests enable-prefix-caching
    enable-prompt-tokens-details enable-request-id-headers enable-server-load-tracking
    enforce-eager generation-config gpu-memory-utilization headless hf-token host
    kv-cache-memory-bytes load-format log-config-file lora-modules max-log-len
    max-num-batched-tokens max-num-seqs middleware model-loader-extra-config
    no-enable-prefix-caching no-enforce-eager otlp-traces-endpoint port reasoning-parser
    response-role return-tokens-as-token-ids root-path seed served-model-name ssl-ca-certs
    ssl-cert-reqs ssl-certfile ssl-keyfile swap-space tool-call-parser tool-parser-plugin uds
    uvicorn-log-level
    """.split()  # noqa: SIM905
)
_SECRETS = ("api-key", "hf-token")
_UNRELATED_VARIABLES = frozenset(
    """
    VLLM_API_KEY VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_CONFIGURE_LOGGING VLLM_CPU_KVCACHE_SPACE
    VLLM_CPU_OMP_THREADS_BIND VLLM_DO_NOT_TRACK VLLM_ENGINE_ITERATION_TIMEOUT_S
    VLLM_ENGINE_READY_TIMEOUT_S VLLM_HOST_IP VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH
    VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOG_STATS_INTERVAL
    VLLM_NO_USAGE_STATS VLLM_PLUGINS VLLM_PORT VLLM_RPC_BASE_PATH VLLM_USAGE_SOURCE
    VLLM_USAGE_STATS_SERVER VLLM_USE_AOT_COMPILE
    """.split()  # noqa: SIM905
)
_SHORT_FLAGS = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "q": "quantization",
    "O": "optimization-level",
    "cc": "compilation-config",
}


def build_launch_key(
    argv: Sequence[str],
    environ: Mapping[str, str],
    content: Content,
    *,
    versions: Mapping[str, str],
    cpu_linear: str,
) -> dict[str, str]:
    """Given vLLM's arguments (model first, no program name), the engine's environment, the
    checkpoint's content, version ids and the CPU linear path, return the launch key. Secrets do
    not enter it."""
    key = {f"argument.{name}": value for name, value in normalise_arguments(argv).items()}
    key |= {
        f"variable.{name}": value
        for name, value in environ.items()
        if name.startswith("VLLM_") and name not in _UNRELATED_VARIABLES
    }
    key |= {f"version.{name}": value for name, value in versions.items()}
    key["cpu_linear"] = cpu_linear
    key["content"] = content.digest
    key["files"] = json.dumps(
        [
            [version.path, version.size_bytes, version.mtime_ns, version.ctime_ns, version.inode]
            for version in content.versions
        ]
    )
    return dict(sorted(key.items()))


def read_launch_key(
    argv: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    digests: Path | None,
    *,
    versions: Mapping[str, str],
    cpu_linear: str,
) -> dict[str, str]:
    """Given the same and the checkpoint's folder, return the launch key; reads stat and kept
    digests."""
    content = read_cached_content(folder, digests)
    return build_launch_key(argv, environ, content, versions=versions, cpu_linear=cpu_linear)


def normalise_arguments(argv: Sequence[str]) -> dict[str, str]:
    """Given vLLM's arguments, return flag to value for those that may bear on the weights:
    `--a_b=c`, `--a-b c` and JSON written in another order are one; a repeated flag's last value
    counts."""
    found: dict[str, str] = {}
    position = 0
    index = 0
    while index < len(argv):
        word = argv[index]
        index += 1
        if not _is_flag(word):
            found[f"positional-{position}"] = word
            position += 1
            continue
        name, separator, value = word.lstrip("-").partition("=")
        if not separator:
            values = []
            while index < len(argv) and not _is_flag(argv[index]):
                values.append(argv[index])
                index += 1
            value = " ".join(values)
        name = name.replace("_", "-") if word.startswith("--") else _SHORT_FLAGS.get(name, name)
        found[name] = _canonical(value)
    return {name: value for name, value in found.items() if not _is_unrelated(name)}


def compare(resident: Mapping[str, str], wanted: Mapping[str, str]) -> Differences:
    """Given two keys of one level, return the fields that differ, each with both values. Where both
    know the content, the versions of the files do not matter: a copied checkpoint is the same
    one."""
    same_content = bool(wanted.get("content")) and resident.get("content") == wanted["content"]
    ignored = {"files"} if same_content else set()
    if "files" in wanted and not (wanted.get("content") and resident.get("content")):
        ignored = {"content"}  # one of them was made before the files were read: versions decide
    return {
        field: (resident.get(field), wanted.get(field))
        for field in sorted({*resident, *wanted} - ignored)
        if resident.get(field) != wanted.get(field)
    }


def _is_unrelated(name: str) -> bool:
    # The beginning of an option is enough for vLLM, and no secret enters a key.
    return name in _UNRELATED_FLAGS or any(option.startswith(name) for option in _SECRETS)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit()


def _canonical(value: str) -> str:
    if value[:1] not in "{[":
        return value
    try:
        return json.dumps(json.loads(value), sort_keys=True)
    except ValueError:
        return value
