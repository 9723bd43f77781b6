# SPDX-License-Identifier: Apache-2.0
"""What happened, as `warmhold status` and Prometheus tell it."""
