# SPDX-License-Identifier: Apache-2.0
"""Resident weights. Mechanics only: nothing here chooses a mode. Empty so far."""
