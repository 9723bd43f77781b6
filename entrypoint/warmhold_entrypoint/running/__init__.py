# SPDX-License-Identifier: Apache-2.0
"""The runner: one engine after the other, from sweep to end, with orders from outside."""
