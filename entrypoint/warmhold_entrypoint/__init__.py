# SPDX-License-Identifier: Apache-2.0
"""The entrypoint: settings, facts, plan, supervision and readiness of one vLLM engine.

All policy of the project lives here. Nothing in this package may import torch or vllm.
"""

VERSION = "0.1.0"
