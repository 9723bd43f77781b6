# SPDX-License-Identifier: Apache-2.0
"""Resident weights: the vault, its protocol and its clients. Mechanics only.

No mode is chosen here. Everything outside `vllm_plugin` runs on the standard library; `cli` alone
uses click.
"""
