# SPDX-License-Identifier: Apache-2.0
"""Loads the weights of a command line into the vault and ends; they stay, with no engine running.

    python -m warmhold_wcache.vllm_plugin.preload <what would follow `vllm serve`>

vLLM's own parser, configuration and workers are used, so that the exact key is the one which an
engine with the same arguments asks for. There is no KV cache, no warm-up and no server. Ends with 0
when every rank's weights are resident, else with 1 and the reason.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warmhold_wcache.errors import WcacheError

_FAILED, _INTERRUPTED = 1, 130
_OWN_FORMATS = ("warmhold", "ipc_cache")
# vLLM on a CPU wants to know beforehand that the KV cache fits. There will be none.
_KV_BYTES = 1 << 20
# vLLM on a GPU wants its share of it free beforehand, which weights alone do not take.
_GPU_SHARE = 0.01

Report = Mapping[str, Any]


def load(argv: Sequence[str], folder: Path) -> int:
    """Given the arguments and an empty folder, load the model in as many workers as an engine would
    have, each of which leaves its report there, and end them; return the number of ranks.

    Raise WcacheError where there is no such load, and whatever vLLM raises.
    """
    # On a CPU vLLM binds each worker to a NUMA node of its own, and ends where there are too few.
    # Nothing is computed here, and an engine that runs has the same nodes.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor import Executor

    engine_args = parse(argv)
    engine_args.kv_cache_memory_bytes = _KV_BYTES
    if current_platform.is_cuda_alike():
        engine_args.gpu_memory_utilization = _GPU_SHARE
    engine_args.load_format, engine_args.model_loader_extra_config = choose_loader(
        str(engine_args.load_format), engine_args.model_loader_extra_config, folder
    )
    if engine_args.data_parallel_size > 1 or engine_args.nnodes > 1:
        raise WcacheError(
            "wcache.unsupported",
            "data parallel engines and engines on several nodes are not preloaded",
            "start the engine once: it publishes what it loads",
        )
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    executor = Executor.get_class(config)(config)  # returns when every worker has loaded
    executor.shutdown()
    return int(config.parallel_config.world_size)


def parse(argv: Sequence[str]) -> Any:
    """Given what would follow `vllm serve`, return the engine arguments as `vllm serve` makes them;
    end with 2 where its parser does."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *argv])
    if args.model_tag is not None:
        args.model = args.model_tag
    return AsyncEngineArgs.from_cli_args(args)


def choose_loader(load_format: str, extra: Any, folder: Path) -> tuple[str, dict[str, Any]]:
    """Given the load format and the loader's options as they were asked for, return both as this
    load needs them: through our loader, from wherever the weights are, reported to the folder.

    Raise WcacheError for a format with which an engine would not ask the vault.
    """
    if load_format not in (*_OWN_FORMATS, "auto"):
        raise WcacheError(
            "wcache.unsupported",
            f"an engine with the load format {load_format} does not ask the vault",
            "leave --load-format out",
        )
    options = json.loads(extra) if isinstance(extra, str) else dict(extra or {})
    ours = {"source": "auto", "mode": "zero_copy", "release": False, "fallback": True}
    chosen = load_format if load_format in _OWN_FORMATS else "warmhold"
    return chosen, {**options, **ours, "report": str(folder)}


def read_reports(folder: Path) -> list[Report]:
    """Given the folder, return the reports in it, ordered by name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("weights-*.json"))]


def is_resident(report: Report) -> bool:
    """Given a report, tell whether the vault holds those weights now."""
    return bool(report["published"] or report["generation"])


def find_failures(reports: Sequence[Report], ranks: int) -> list[str]:
    """Given all reports and the number of ranks (processes), say which weights are not resident,
    and why; a rank has more than one report where it has a draft model too."""
    failures = [
        f"{report['not_published'] or report['reason'] or 'nothing was published'}"
        f" (PID {report['pid']})"
        for report in reports
        if not is_resident(report)
    ]
    silent = ranks - len({report["pid"] for report in reports})
    if silent > 0:
        failures.append(f"{silent} of {ranks} rank(s) loaded without the vault's loader")
    return failures


def main() -> int:
    """Load what the command line says; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="warmhold-preload-") as name:
        folder = Path(name)
        try:
            ranks = load(sys.argv[1:], folder)
            reports = read_reports(folder)
            failures = find_failures(reports, ranks)
        except WcacheError as error:
            return _fail(error)
        except KeyboardInterrupt:
            return _INTERRUPTED
        except Exception as error:
            from vllm.logger import init_logger

            init_logger("vllm.warmhold").exception("the model could not be loaded")
            text = " ".join(str(error).split()) or repr(error)
            return _fail(WcacheError("wcache.not-resident", text, "see the log above"))
    for report in reports:
        if is_resident(report):
            how = "published" if report["published"] else "was resident already"
            sys.stdout.write(f"{report['published'] or report['generation']} {how}\n")
    if failures:
        detail = "; ".join(failures)
        return _fail(WcacheError("wcache.not-resident", detail, "see the log above"))
    return 0


def _fail(error: WcacheError) -> int:
    sys.stderr.write(f"error: {error.code}: {error.detail}\n")
    sys.stderr.write(f"fix: {error.remedy}\n" if error.remedy else "")
    return _FAILED


if __name__ == "__main__":
    # An orderly end: workers and the folder go with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
