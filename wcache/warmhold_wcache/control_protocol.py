# SPDX-License-Identifier: Apache-2.0
"""What the two sides of an engine's control socket agree on: requests, time limits, error codes.

A connection carries one request and one answer, in the vault's frames and without descriptors.
Codes: control.absent (no socket), control.dead-socket (nobody serves it), control.hung (no answer),
control.other-uid, control.refused, control.malformed, control.too-large, control.busy (requests
outlast the drain, or somebody else is at it), control.timeout (the engine did not answer in time),
control.quiesced (not while the weights are unmapped), control.unsupported (this engine's weights
cannot be unmapped, or it does not generate), control.dead (the engine), control.failed.
"""

from collections.abc import Mapping
from typing import Any

from .errors import WcacheError, malformed

# Seconds that a verb may take unless the request says otherwise.
CANARY_S = 10.0
DRAIN_S = 30.0
RESUME_S = 60.0
STATE_S = 5.0
# For unmapping, and for putting everything back where that failed; quiesce's own limit is the
# drain's.
WORKERS_S = 60.0
MAX_LIMIT_S = 3600.0
MAX_PROMPT = 256
_MAX_TOKEN_ID = 1 << 31
_REMEDIES = {
    "absent": "start the engine with the plug-in `warmhold` and WARMHOLD_CONTROL_SOCKET",
    "dead-socket": "the engine has ended; start it",
    "hung": "see the engine's log",
    "other-uid": "run it as the engine's user or as root",
}


class ControlError(WcacheError):
    """What a control socket can answer, or its client find, instead of a result."""


def to_control(error: WcacheError) -> ControlError:
    """Given an error of the vault's transport, return it as one of the control socket's."""
    if isinstance(error, ControlError):
        return error
    family, _, name = error.code.partition(".")
    if family == "control":
        return ControlError(error.code, error.detail, error.remedy)
    return ControlError(f"control.{name}", error.detail, _REMEDIES.get(name, error.remedy))


def read_limit(body: Mapping[str, Any], default_s: float) -> float:
    """Given a request, return its `timeout_s` in seconds; raise WcacheError on a wrong one."""
    value = body.get("timeout_s", default_s)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise malformed("timeout_s is not a number of seconds")
    if not 0 < value <= MAX_LIMIT_S:
        raise malformed(f"timeout_s must be above 0 and at most {MAX_LIMIT_S:g}")
    return float(value)


def read_flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """Given a request, return one of its flags; raise WcacheError where it is none."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise malformed(f"{name} is neither true nor false")
    return value


def read_prompt(body: Mapping[str, Any]) -> list[int] | None:
    """Given a request, return its `prompt`, token ids, or None where it has none; raise WcacheError
    on a wrong one."""
    prompt = body.get("prompt")
    if prompt is None:
        return None
    if not isinstance(prompt, list) or not 0 < len(prompt) <= MAX_PROMPT:
        raise malformed(f"prompt is not a list of 1 to {MAX_PROMPT} token ids")
    if not all(type(item) is int and 0 <= item < _MAX_TOKEN_ID for item in prompt):
        raise malformed("prompt holds what is no token id")
    return prompt
