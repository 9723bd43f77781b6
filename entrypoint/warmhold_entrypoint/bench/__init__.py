# SPDX-License-Identifier: Apache-2.0
"""How long restarts take, by mode, in a running container: measured, proved, shown.

Nothing outside this folder needs it; the command `warmhold bench` imports it when it is called.
"""
