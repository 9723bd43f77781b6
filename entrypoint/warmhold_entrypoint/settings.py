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
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from .arguments import EngineArguments, parse_arguments
from .errors import Fault

PREFIX = "WARMHOLD_"
MODES = ("snapshot", "ipc_cache", "disk")

Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Environment(BaseModel):
    """The variables that warmhold reads; the name of each is the field's in capitals, prefixed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["auto", "snapshot", "ipc_cache", "disk"] = Field(
        "auto", description="How to start: `auto` takes the fastest that works; a name, only that."
    )
    model: str = Field(
        "demo",
        min_length=1,
        description="A Hugging Face id, a local path, or `demo` (SmolLM2-135M-Instruct).",
    )
    engine_args: str = Field(
        "",
        repr=False,
        description="vLLM arguments, split like a shell does; appended to the command.",
    )
    api_key: SecretStr | None = Field(
        None, description="The key that clients must send; never shown, never in an argv."
    )
    drain_s: Annotated[int, Field(ge=0, le=3600)] = Field(
        30, description="How long running requests may take to finish on stop, in seconds."
    )
    ready_timeout_s: Seconds = Field(
        1800, description="How long one start may take until it serves, in seconds."
    )
    canary_interval_s: Annotated[float, Field(ge=1, le=3600)] = Field(
        15, description="Without a completed request for so long, the engine is probed."
    )
    canary_timeout_s: Annotated[float, Field(gt=0, le=600)] = Field(
        6, description="A probe's time limit in seconds; two missed probes mean degraded."
    )
    max_failures: Annotated[int, Field(ge=1, le=1000)] = Field(
        3, description="Failed starts in a row after which the container ends."
    )
    kv_cache_gib: Annotated[float, Field(gt=0, le=4096)] | None = Field(
        None,
        description="KV cache on a CPU in GiB; default: what the memory limit leaves, up to 4.",
    )
    engine_uid: Annotated[int, Field(ge=0, lt=2**32 - 1)] | None = Field(
        None,
        description="User id of the engine; default: warmhold's own. Another one needs SYS_RESOURCE"
        " for snapshots.",
    )
    wcache: Literal["off", "vault"] = Field(
        "off",
        description="`vault` starts the vault of resident weights; no engine publishes to it yet.",
    )
    metrics_port: Port | None = Field(
        None, description="Serve Prometheus metrics of the supervision on this port (off)."
    )
    log_format: Literal["text", "json"] = Field("text", description="Form of warmhold's log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged."
    )
    state_dir: Path = Field(
        Path("/var/lib/warmhold"), description="Compile caches and snapshots (a volume)."
    )
    models_dir: Path = Field(
        Path("/models"), description="Hugging Face cache, of either depth, or folders of models."
    )
    run_dir: Path = Field(
        Path("/run/warmhold"), description="Sockets and the plan (a tmpfs in memory)."
    )


SECRETS = ("api_key",)


@dataclass(frozen=True)
class Settings:
    """All that the user asked for: the environment, the engine's arguments, the secrets."""

    env: Environment
    arguments: EngineArguments = field(repr=False)
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
    unknown = sorted(set(values) - set(Environment.model_fields))
    notes = [_unknown_note(name) for name in unknown]
    for name in unknown:
        del values[name]
    env, value_faults = _validate(values)
    arguments, argument_faults = parse_arguments(command, env.engine_args)
    settings = Settings(
        env=env,
        arguments=arguments,
        offline=any(
            environ.get(name, "").lower() in {"1", "true", "yes", "on"}
            for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        ),
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


def _validate(values: dict[str, str]) -> tuple[Environment, list[Fault]]:
    faults: list[Fault] = []
    try:
        return Environment.model_validate(values), faults
    except ValidationError as error:
        for item in error.errors(include_url=False):
            name = str(item["loc"][0])
            shown = "***" if name in SECRETS else repr(values.get(name, ""))
            about = Environment.model_fields[name]
            faults.append(
                Fault(
                    f"settings.{name.replace('_', '-')}",
                    f"{PREFIX}{name.upper()}={shown}: {item['msg']}",
                    f"{about.description} Default: {_default_text(about.default)}",
                )
            )
            values.pop(name, None)
    return Environment.model_validate(values), faults


def _api_keys(
    env: Environment, arguments: EngineArguments, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The keys that the engine will accept, as vLLM has it: arguments, else the variable."""
    from_arguments = arguments.values("--api-key")
    if from_arguments:
        return from_arguments
    if env.api_key is not None:
        return (env.api_key.get_secret_value(),)
    return tuple(key for key in [environ.get("VLLM_API_KEY")] if key)


def _unknown_note(name: str) -> str:
    near = difflib.get_close_matches(name, Environment.model_fields, n=1)
    hint = f"; did you mean {PREFIX}{near[0].upper()}?" if near else ""
    return f"{PREFIX}{name.upper()} is not a setting and is ignored{hint}"


def _default_text(default: object) -> str:
    return "none" if default is None else str(default) or "empty"


def settings_table() -> list[tuple[str, str, str]]:
    """Return a row for each setting: variable, default, meaning (for help and the README)."""
    return [
        (
            PREFIX + name.upper() + (" (or _FILE)" if name in SECRETS else ""),
            _default_text(field.default),
            field.description or "",
        )
        for name, field in Environment.model_fields.items()
    ]
