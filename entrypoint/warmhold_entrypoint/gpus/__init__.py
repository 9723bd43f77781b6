# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs: which there are, what memory they have free, what of them a snapshot takes along."""
