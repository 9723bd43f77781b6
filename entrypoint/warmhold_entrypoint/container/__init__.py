# SPDX-License-Identifier: Apache-2.0
"""The container's own processes: PID 1, supervisord and its configuration, its plug-ins."""
