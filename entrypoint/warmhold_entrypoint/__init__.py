# SPDX-License-Identifier: Apache-2.0
"""The entrypoint: settings, facts, plan, supervision and readiness of one vLLM engine.

All policy of the project lives here. Nothing in this package may import torch or vllm. A start goes
through the modules beside this one: `settings` and `arguments`, `facts` (with `model` and
`budget`), `plan`, `command`, `launcher`; `start` holds them together. What happens then:

    container       PID 1, supervisord, their configuration
    running         the runner: engines one after the other, and what orders them
    snapshot_mode   which snapshot fits, how one is made and brought back
    weight_cache    who keeps the weights resident
    gpus            what has to be known of GPUs
    reporting       status and metrics
    bench           restarts, measured
"""

VERSION = "0.1.0"
