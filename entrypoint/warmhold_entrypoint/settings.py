# SPDX-License-Identifier: Apache-2.0
"""Settings: the environment and the command, read once, frozen, with every fault at the same time.

A fault leaves the field at its default, so that what depends on other fields can still be checked.
Any setting that is a secret may come from a file named by the same variable with `_FILE`.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from .arguments import EngineArguments, find_word_faults, parse_arguments
from .errors import Fault

PREFIX = "WARMHOLD_"
MODES = ("snapshot", "ipc_cache", "disk")

Seconds = Annotated[float, Meta(ge=0, le=86400)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class Secret:
    """A text that shows itself only when asked to."""

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text."""
        return self._text

    def __repr__(self) -> str:
        return "***"


def _about(description: str) -> Meta:
    return Meta(description=description)


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The variables that warmhold reads; the name of each is the field's in capitals, prefixed."""

    mode: Annotated[
        Literal["auto", "snapshot", "ipc_cache", "disk"],
        _about("How to start: `auto` takes the fastest that works; a name, only that."),
    ] = "auto"
    model: Annotated[
        str,
        Meta(min_length=1),
        _about("A Hugging Face id, a local path, or `demo` (SmolLM2-135M-Instruct)."),
    ] = "demo"
    engine_args: Annotated[
        str, _about("vLLM arguments, split like a shell does; appended to the command.")
    ] = ""
    api_key: Annotated[
        Secret | None, _about("The key that clients must send; never shown, never in an argv.")
    ] = None
    drain_s: Annotated[
        int,
        Meta(ge=0, le=3600),
        _about("How long running requests may take to finish on stop, in seconds."),
    ] = 30
    ready_timeout_s: Annotated[
        Seconds, _about("How long one start may take until it serves, in seconds.")
    ] = 1800
    canary_interval_s: Annotated[
        float,
        Meta(ge=1, le=3600),
        _about("Without a completed request for so long, the engine is probed."),
    ] = 15
    canary_timeout_s: Annotated[
        float,
        Meta(gt=0, le=600),
        _about("A probe's time limit in seconds; two missed probes mean degraded."),
    ] = 6
    max_failures: Annotated[
        int,
        Meta(ge=1, le=1000),
        _about("Failed starts in a row, each in every mode planned, that end the container."),
    ] = 3
    kv_cache_gib: Annotated[
        Annotated[float, Meta(gt=0, le=4096)] | None,
        _about("KV cache on a CPU in GiB; default: what the memory limit leaves, up to 4."),
    ] = None
    engine_uid: Annotated[
        Annotated[int, Meta(ge=0, lt=2**32 - 1)] | None,
        _about(
            "User id of the engine; default: warmhold's own. Another one needs SYS_RESOURCE for"
            " snapshots."
        ),
    ] = None
    wcache: Annotated[
        Literal["vault", "vllm", "auto", "off"],
        _about(
            "`vault` keeps weights resident between engine starts; `vllm` has upstream's `vllm"
            " preload` do it, for several GPUs; `auto`: the latter where several GPUs share the"
            " work or a model drafts; `off` reads them each time."
        ),
    ] = "vault"
    preload_args: Annotated[
        str,
        _about(
            "More arguments of `vllm preload`, split like a shell does, after the engine's own:"
            " `--weight-cache-master-port 29600`."
        ),
    ] = ""
    gpu_wait_s: Annotated[
        Seconds,
        _about(
            "How long a start waits for GPU memory that an ended process has not given back, in"
            " seconds; then it goes on, and the log names who holds the memory."
        ),
    ] = 60
    cpu_linear: Annotated[
        Literal["shared", "packed"],
        _about(
            "How a CPU's linear layers hold weights: `shared` computes from the resident ones;"
            " `packed` is vLLM's own way and copies them."
        ),
    ] = "shared"
    snapshot: Annotated[
        Literal["auto", "manual", "off"],
        _about(
            "`manual`: `snapshot create` makes one, later starts restore it; `auto` also makes one"
            " by itself where none fits, in place of its last; `off`: neither."
        ),
    ] = "auto"
    snapshot_idle_s: Annotated[
        Seconds, _about("`auto` waits until no request has come for so long, in seconds.")
    ] = 30
    snapshot_verify: Annotated[
        Literal["always", "metadata"],
        _about(
            "Before what is restored runs compare every byte with its checksum, or names and sizes"
            " alone."
        ),
    ] = "always"
    snapshot_compress: Annotated[
        bool, _about("Keep snapshots in LZ4: a third of the bytes, and a slower restore.")
    ] = False
    snapshot_weights: Annotated[
        Literal["flat", "none"],
        _about(
            "`flat` keeps a snapshot's weights in a file too, for a container whose vault lacks"
            " them; with `none` such a container first starts in another mode."
        ),
    ] = "flat"
    metrics_port: Annotated[
        Port | None, _about("Serve Prometheus metrics of the supervision on this port (off).")
    ] = None
    wcache_health_port: Annotated[
        Port | None,
        _about(
            "Serve the vault's /health on this port of 127.0.0.1: 200 after a round trip (off)."
        ),
    ] = None
    log_format: Annotated[Literal["text", "json"], _about("Form of warmhold's log lines.")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _about("Lowest level that is logged.")
    ] = "info"
    state_dir: Annotated[Path, _about("Compile caches and snapshots (a volume).")] = Path(
        "/var/lib/warmhold"
    )
    models_dir: Annotated[
        Path, _about("Hugging Face cache, of either depth, or folders of models.")
    ] = Path("/models")
    run_dir: Annotated[Path, _about("Sockets and the plan (a tmpfs in memory).")] = Path(
        "/run/warmhold"
    )

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in FIELDS if name not in _HIDDEN}
        return f"Environment({shown})"


@dataclass(frozen=True)
class Setting:
    """One field of Environment: its default, its meaning, and the type that a value must have."""

    default: object
    meaning: str
    type: Any


FIELDS = {
    info.name: Setting(
        info.default,
        next(
            meta.description
            for meta in info.type.__metadata__[::-1]
            if meta.description is not None
        ),
        info.type,
    )
    for info in msgspec.structs.fields(Environment)
}
# The arguments may hold a key.
_HIDDEN = ("engine_args", "preload_args")
SECRETS = ("api_key",)
# What huggingface_hub takes its token from.
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True)
class Settings:
    """All that the user asked for: the environment, the engine's arguments, the secrets."""

    env: Environment
    arguments: EngineArguments = field(repr=False)
    # The container's environment without our own variables: what the engine inherits.
    environ: Mapping[str, str] = field(repr=False)
    offline: bool
    api_keys: tuple[str, ...] = field(repr=False)

    @property
    def model(self) -> str:
        """The model by its user-facing name; `--model` among the arguments wins."""
        return self.arguments.value("--model") or self.env.model

    @property
    def stop_wait_s(self) -> int:
        """How long supervisord waits for the runner: the drain and 30 s to end what is left."""
        return self.env.drain_s + 30


def read_settings(
    environ: Mapping[str, str], command: Sequence[str]
) -> tuple[Settings, list[Fault], list[str]]:
    """Given an environment and a command, return the settings, every fault and the notes.

    Notes name variables with our prefix that nothing reads (most often a misspelt one).
    """
    faults: list[Fault] = []
    values = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and value != ""
    }
    for secret in SECRETS:
        path = values.pop(f"{secret}_file", None)
        if path is not None:
            try:
                values[secret] = Path(path).read_text(encoding="utf-8").strip()
                if not values[secret]:
                    del values[secret]
                    raise OSError("the file is empty")
            except (OSError, UnicodeDecodeError) as error:
                faults.append(
                    Fault(
                        "settings.secret-file",
                        f"{PREFIX}{secret.upper()}_FILE names {path}: {error}",
                        "mount the file, readable for root",
                    )
                )
    unknown = sorted(set(values) - set(FIELDS))
    notes = [_unknown_note(name) for name in unknown]
    for name in unknown:
        del values[name]
    env, value_faults = _validate(values)
    arguments, argument_faults = parse_arguments(command, env.engine_args)
    argument_faults += find_word_faults("WARMHOLD_PRELOAD_ARGS", env.preload_args)
    settings = Settings(
        env=env,
        arguments=arguments,
        environ={name: value for name, value in environ.items() if not name.startswith(PREFIX)},
        offline=is_offline(environ),
        api_keys=_api_keys(env, arguments, environ),
    )
    if any(not re.fullmatch(r"[!-~]+", key) for key in settings.api_keys):
        faults.append(
            Fault(
                "settings.api-key",
                "an API key holds a character that no HTTP header can carry",
                "use printable ASCII without spaces; look for a line end at its end",
            )
        )
    return settings, faults + value_faults + argument_faults, notes


def is_offline(environ: Mapping[str, str]) -> bool:
    """Given an environment, tell whether huggingface_hub downloads nothing in it. Source: its
    constants.py."""
    text = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
    return text.upper() in {"1", "ON", "YES", "TRUE"}


def _validate(values: Mapping[str, str]) -> tuple[Environment, list[Fault]]:
    valid: dict[str, Any] = {}
    faults = []
    for name, text in values.items():
        setting = FIELDS[name]
        try:
            valid[name] = msgspec.convert(
                text, setting.type, strict=False, dec_hook=lambda kind, value: kind(value)
            )
        except msgspec.ValidationError as error:
            shown = "***" if name in SECRETS else repr(text)
            faults.append(
                Fault(
                    f"settings.{name.replace('_', '-')}",
                    f"{PREFIX}{name.upper()}={shown}: {_choices(setting) or error}",
                    f"{setting.meaning} Default: {_default_text(setting.default)}",
                )
            )
    return Environment(**valid), faults


def _choices(setting: Setting) -> str:
    kind = setting.type.__origin__
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return f"not one of {', '.join(choices)}" if choices else ""


def _api_keys(
    env: Environment, arguments: EngineArguments, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The keys that the engine will accept, as vLLM has it: arguments, else the variable."""
    from_arguments = arguments.values("--api-key")
    if from_arguments:
        return from_arguments
    if env.api_key is not None:
        return (env.api_key.reveal(),)
    return tuple(key for key in [environ.get("VLLM_API_KEY")] if key)


def _unknown_note(name: str) -> str:
    near = difflib.get_close_matches(name, FIELDS, n=1)
    hint = f"; did you mean {PREFIX}{near[0].upper()}?" if near else ""
    return f"{PREFIX}{name.upper()} is not a setting and is ignored{hint}"


def _default_text(default: object) -> str:
    return "none" if default is None else str(default) or "empty"


def settings_table() -> list[tuple[str, str, str]]:
    """Return a row for each setting: variable, default, meaning (for help and the README)."""
    return [
        (
            PREFIX + name.upper() + (" (or _FILE)" if name in SECRETS else ""),
            _default_text(setting.default),
            setting.meaning,
        )
        for name, setting in FIELDS.items()
    ]
