# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a running engine. Mechanics only: nothing here chooses a mode or reads a setting."""
