# SPDX-License-Identifier: Apache-2.0
"""`python -m warmhold_entrypoint` is the command `warmhold`."""

from .cli import main

if __name__ == "__main__":
    main()
