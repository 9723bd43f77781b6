# SPDX-License-Identifier: Apache-2.0
"""What the user's engine arguments say, without changing a byte of them.

Owns the reading of vLLM options that the entrypoint itself needs (port, TLS, model, ...), as
vLLM's own parser spells them: dashes or underscores, `--name value` or `--name=value`. vLLM stays
the judge of all others. JSON values are checked here, because their position is known here.
"""

import json
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import Fault

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
}
# Each of them shares the work with engines that are elsewhere.
_ELSEWHERE = (
    *("--headless", "--data-parallel-rank", "--data-parallel-start-rank"),
    *("--data-parallel-external-lb", "--data-parallel-hybrid-lb"),
    "--data-parallel-multi-port-external-lb",
)
# What is read here or by others. argparse takes the beginning of an option for the option, where no
# other one begins so: then vLLM refuses it.
_READ = frozenset(
    f"--{name}"
    for name in """
    api-key api-server-count chat-template compilation-config config data-parallel-backend
    data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb
    data-parallel-rank data-parallel-size data-parallel-size-local data-parallel-start-rank
    disable-access-log-for-endpoints distributed-executor-backend enable-expert-parallel
    enable-sleep-mode enable-ssl-refresh gpu-memory-utilization grpc headless hf-token host
    kv-cache-memory-bytes load-format logprobs-mode middleware model model-loader-extra-config
    nnodes no-enable-sleep-mode node-rank pipeline-parallel-size port prefill-context-parallel-size
    quantization revision root-path served-model-name shutdown-timeout sleep-mode-backend
    spec-method spec-model spec-tokens speculative-config ssl-ca-certs ssl-certfile ssl-ciphers
    ssl-keyfile tensor-parallel-size uds weight-cache-health-host weight-cache-health-port
    weight-cache-master-port weight-cache-socket-dir
    """.split()  # noqa: SIM905
)
# Jinja templates may start with a brace; they are no JSON.
_NOT_JSON = {"--chat-template", "--api-key", "--hf-token"}


@dataclass(frozen=True)
class EngineArguments:
    """The user's argv for vLLM, in order and byte-exact, with the options that concern us."""

    argv: tuple[str, ...] = ()
    # What a file given by --config says, as arguments; a later one of the command wins, as in vLLM.
    config: tuple[str, ...] = ()

    def value(self, option: str) -> str | None:
        """Given a long option, return its last value, or None where it is absent."""
        values = self.values(option)
        return values[0] if values else None

    def values(self, option: str) -> tuple[str, ...]:
        """Given a long option, return all values of its last occurrence."""
        found: tuple[str, ...] = ()
        for name, values in self.options():
            if name == option:
                found = values
        return found

    def has(self, option: str) -> bool:
        """Given a long option or flag, tell whether it occurs."""
        return any(name == option for name, _ in self.options())

    def without(self, option: str) -> "EngineArguments":
        """Given a long option, return the arguments without it and its values."""
        dropped: set[int] = set()
        for name, _, positions in _options(self.argv):
            if name == option:
                dropped.update(positions)
        kept = tuple(item for index, item in enumerate(self.argv) if index not in dropped)
        return EngineArguments(kept, self.config)

    def words(self, dropped: Collection[str]) -> tuple[str, ...]:
        """Given long options, return all words but theirs, those of --config first."""
        kept: list[str] = []
        for argv in (self.config, self.argv):
            without = {
                position
                for name, _, positions in _options(argv)
                if name in dropped
                for position in positions
            }
            kept += [word for index, word in enumerate(argv) if index not in without]
        return tuple(kept)

    @property
    def port(self) -> int:
        """The public port; vLLM's default is 8000. A value that is no number reads as 0."""
        text = self.value("--port") or "8000"
        return int(text) if text.isascii() and text.isdigit() else 0

    @property
    def tls(self) -> bool:
        """Whether the engine speaks HTTPS."""
        return self.has("--ssl-certfile")

    @property
    def root_path(self) -> str:
        """The path prefix under which a proxy serves the engine, without a trailing slash."""
        return (self.value("--root-path") or "").rstrip("/")

    @property
    def worker_count(self) -> int:
        """How many worker processes share this machine's CPUs."""
        return (
            self.count("--tensor-parallel-size")
            * self.count("--pipeline-parallel-size")
            * self.count("--prefill-context-parallel-size")
            * self.count("--data-parallel-size")
        )

    @property
    def api_server_count(self) -> int:
        """How many API servers one node has: by default one for each data-parallel rank."""
        return self.count("--api-server-count", self.count("--data-parallel-size"))

    @property
    def elsewhere(self) -> str:
        """The first option that lets a part of the engine run outside this container's tree of
        processes: on another node, or under Ray; "" where there is none."""
        for option in _ELSEWHERE:
            if self.has(option):
                return option
        for option in ("--distributed-executor-backend", "--data-parallel-backend"):
            if self.value(option) == "ray":
                return f"{option} ray"
        ranks = self.count("--data-parallel-size")
        if self.count("--data-parallel-size-local", ranks) < ranks:
            return "--data-parallel-size-local"
        return "--nnodes" if self.count("--nnodes") > 1 else ""

    def options(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield each option with its values: those of --config, then those of the command."""
        for argv in (self.config, self.argv):
            for name, values, _ in _options(argv):
                yield name, values

    def count(self, option: str, default: int = 1) -> int:
        """Given a long option, return its value as a number of at least 1; where it is none, the
        default."""
        text = self.value(option) or ""
        return max(1, int(text)) if text.isascii() and text.isdigit() else default


def parse_arguments(command: Sequence[str], extra: str) -> tuple[EngineArguments, list[Fault]]:
    """Given the command and WARMHOLD_ENGINE_ARGS, return the arguments and their faults.

    The string is split as a POSIX shell splits words, with no expansion. Faults: unbalanced quotes,
    JSON values that do not parse (with line and column), a port that is no port.
    """
    faults = find_word_faults("WARMHOLD_ENGINE_ARGS", extra)
    argv = (*command, *([] if faults else shlex.split(extra)))
    if any(word.startswith("--config=") for word in argv):
        detail = "--config=FILE is one word, and vLLM does not read the file then"
        faults.append(Fault("arguments.config", detail, "give two words: --config FILE"))
    config, config_faults = _read_config(EngineArguments(argv).value("--config"))
    arguments = EngineArguments(argv, config)
    faults.extend(config_faults)
    faults.extend(_json_faults(argv))
    port = arguments.value("--port")
    if port is not None and not 1 <= arguments.port <= 65535:
        faults.append(
            Fault("arguments.port", f"--port {port!r} is no port", "give a number from 1 to 65535")
        )
    return arguments, faults


def find_word_faults(variable: str, text: str) -> list[Fault]:
    """Given a variable's name and value, return a fault where that cannot be split into words."""
    try:
        shlex.split(text)
    except ValueError as error:
        detail = f"{variable} cannot be split into words: {error}"
        remedy = "close every quote; the words are split as a shell splits them"
        return [Fault("arguments.quoting", detail, remedy)]
    return []


def _read_config(path: str | None) -> tuple[tuple[str, ...], list[Fault]]:
    """Given vLLM's --config file, return what it says as arguments, and why it cannot be read."""
    if path is None:
        return (), []
    import yaml  # costs 20 ms, so only where there is such a file

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        entries = dict(content or {}).items()
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        detail = " ".join(str(error).split())
        remedy = "mount a YAML file of vLLM options there, `port: 8000` a line"
        return (), [Fault("arguments.config", f"--config {path}: {detail}", remedy)]
    argv: list[str] = []
    for name, value in entries:
        if value is False:
            continue
        argv.append(f"--{name}")
        values = value if isinstance(value, list) else [] if value is True else [value]
        # As vLLM has it: what is nested becomes JSON.
        argv += [json.dumps(item) if isinstance(item, dict) else str(item) for item in values]
    return tuple(argv), []


def _options(argv: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...], range]]:
    """Yield each option with its values and the positions that it takes in argv."""
    index = 0
    while index < len(argv):
        item = argv[index]
        if not is_option(item):
            index += 1
            continue
        name, equals, inline = item.partition("=")
        end = index + 1
        while not equals and end < len(argv) and not is_option(argv[end]):
            end += 1
        values = (inline,) if equals else tuple(argv[index + 1 : end])
        yield _canonical(name), values, range(index, end)
        index = end


def _json_faults(argv: Sequence[str]) -> Iterator[Fault]:
    for name, values, _ in _options(argv):
        for value in values:
            if name in _NOT_JSON or not value.lstrip().startswith("{"):
                continue
            try:
                json.loads(value)
            except json.JSONDecodeError as error:
                around = value[max(0, error.pos - 12) : error.pos + 12]
                yield Fault(
                    "arguments.json",
                    f"{name} is not JSON: {error.msg} at line {error.lineno} column {error.colno}"
                    f" (near {around!r})",
                    f"correct the value of {name}; in a compose file give it as one list item",
                )


def is_option(item: str) -> bool:
    """Tell an option from a value; a negative number is a value."""
    return item.startswith("-") and len(item) > 1 and not item[1:2].isdigit()


def _canonical(name: str) -> str:
    """The option in its long form; what follows a dot is a key within its JSON, and kept."""
    head, dot, key = name.partition(".")
    head = _SHORT.get(head, head)
    if head.startswith("--"):
        head = "--" + head[2:].replace("_", "-")
        meant = [option for option in _READ if option.startswith(head)]
        head = meant[0] if len(meant) == 1 and head not in _READ else head
    return f"{head}{dot}{key}"


def read_bytes(text: str) -> int | None:
    """Given a number as vLLM's parser takes it (1g is 10**9, 1G is 2**30), return it, or None."""
    match = re.fullmatch(r"(\d{1,15})(\.\d+)?([kmgt]?)|(\d{1,15})([KMGT])", text.strip(), re.ASCII)
    if match is None or (match[2] and not match[3]):
        return None
    if match[5]:
        return int(match[4]) << 10 * ("KMGT".index(match[5]) + 1)
    return int(float(match[1] + (match[2] or "")) * 1000 ** (" kmgt".index(match[3] or " ")))
