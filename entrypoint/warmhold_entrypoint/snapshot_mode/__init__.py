# SPDX-License-Identifier: Apache-2.0
"""Snapshots of the engine: which one fits, how one is made, and how one is brought back."""
