# SPDX-License-Identifier: Apache-2.0
"""Who keeps the weights resident, and how an engine comes by them."""
