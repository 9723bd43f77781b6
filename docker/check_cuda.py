# SPDX-License-Identifier: Apache-2.0
"""Checks the image `cuda` while it is built, on a machine without a GPU: every module of ours and
vLLM's servers are imported, and `vllm preload` takes what we pass on to it.

vLLM makes no list of its options without knowing a device, so that it is shown one of no kind.
"""

import importlib
import pkgutil
import sys
from argparse import ArgumentParser

import vllm.platforms
import warmhold_entrypoint
import warmhold_snapshot
import warmhold_wcache
from vllm.platforms.interface import UnspecifiedPlatform
from warmhold_entrypoint.weight_cache.backend import SERVER_ONLY

_PACKAGES = (warmhold_entrypoint, warmhold_snapshot, warmhold_wcache)
_VLLM = ("v1.engine.core", "entrypoints.openai.api_server", "snapshot.controller")


class AnyDevice(UnspecifiedPlatform):
    """What options are listed for; they are the same on each."""

    device_type = "cpu"


def import_all() -> int:
    """Import everything; return how many modules that are. Raise ImportError."""
    names = [f"vllm.{name}" for name in _VLLM]
    for package in _PACKAGES:
        modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        names += [module.name for module in modules if not module.name.endswith("__main__")]
    for name in names:
        importlib.import_module(name)
    return len(names)


def find_differences() -> set[str]:
    """Return the options of `vllm serve` that `vllm preload` does not take and we pass on, and
    those that it does take and we do not."""
    from vllm.entrypoints.cli.preload import PreloadSubcommand
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    serve = make_arg_parser(FlexibleArgumentParser())
    preload = PreloadSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    return (_options(serve) - _options(preload)) ^ SERVER_ONLY


def _options(parser: ArgumentParser) -> set[str]:
    words = [word for action in parser._actions for word in action.option_strings]
    return {word for word in words if word.startswith("--") and not word.startswith("--no-")}


if __name__ == "__main__":
    count = import_all()
    vllm.platforms._current_platform = AnyDevice()
    if differences := find_differences():
        sys.exit(f"vllm preload and backend.SERVER_ONLY differ: {', '.join(sorted(differences))}")
    print(f"{count} modules imported; vllm preload takes what it gets")
