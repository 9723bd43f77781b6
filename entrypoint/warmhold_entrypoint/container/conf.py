# SPDX-License-Identifier: Apache-2.0
"""supervisord's configuration: a fixed text with a few numbers and paths, and no user data.

The engine's argv never passes through it, because supervisord cuts commands at ` ;` and ` #` even
inside quotes and expands `%`. Exit codes are the runner's business: every code that it ends with is
listed as expected, so that only a runner killed by a signal is started again.

Priorities order starts, and stops in reverse: who holds the weights comes before the engine and
goes after it.
"""

import os
import re
import sys
from pathlib import Path

from .. import launcher
from ..errors import Fault
from ..files import write_atomically
from ..settings import Environment, Settings
from ..weight_cache.backend import Backend

CONF_NAME = "supervisord.conf"
HOLDER_PROGRAM = "preload"
VAULT_SOCKET = "wcache.sock"
STORE_SOCKET = "fdstore.sock"
# What the engine itself makes in the run directory: reports of its loads, its control socket.
ENGINE_FOLDER = "engine"
CONTROL_SOCKET = f"{ENGINE_FOLDER}/control.sock"
_SAFE_PATH = re.compile(r"/[\w./-]*")

_TEXT = """\
; Written by warmhold at each start; changes are lost.
[supervisord]
nodaemon=true
{user}
pidfile={run_dir}/supervisord.pid
logfile=/dev/null
logfile_maxbytes=0
logfile_backups=0
loglevel=warn
childlogdir={run_dir}

[unix_http_server]
file={run_dir}/supervisor.sock
chmod=0700
; The file's mode is the lock. A password only keeps supervisord from a critical-looking line.
username=warmhold
password=warmhold

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix://{run_dir}/supervisor.sock
username=warmhold
password=warmhold

[ctlplugin:warmhold]
supervisor.ctl_factory=warmhold_entrypoint.container.ctl:make_plugin
run_dir={run_dir}

[program:engine]
command={python} -m warmhold_entrypoint.running.engine
priority=200
autorestart=unexpected
exitcodes={exit_codes}
startsecs=0
stopsignal=TERM
stopwaitsecs={stop_wait_s}
{logs}

[eventlistener:end]
command={python} -m warmhold_entrypoint.container.listener
events=PROCESS_STATE_EXITED,PROCESS_STATE_FATAL
autorestart=true
startsecs=0
stdout_logfile=NONE
stderr_logfile=/dev/stderr
stderr_logfile_maxbytes=0
stderr_logfile_backups=0
"""

_VAULT = """
[program:wcache]
command={python} -I -S {launcher} --listen {run_dir}/{socket} {uid} none {vault}
priority=100
autorestart=true
; The vault itself slows down starts that fail; one that was killed is back at once.
startsecs=0
stopsignal=TERM
{logs}
"""

_HOLDER = """
[program:{program}]
command={python} -m warmhold_entrypoint.weight_cache.holder_program
priority=100
; The runner starts it, before an engine and never under one that serves.
autostart=false
autorestart=false
startsecs=0
stopsignal=TERM
stopwaitsecs=10
stopasgroup=true
killasgroup=true
{logs}
"""

_METRICS = """
[program:metrics]
command={python} -m warmhold_entrypoint metrics --port {port}
autorestart=true
startsecs=1
{logs}
"""

_HEALTH = """
[program:wcache-health]
command={python} -m warmhold_wcache.cli --socket {run_dir}/{socket} health --port {port}
autorestart=true
startsecs=1
{logs}
"""

# Rotation of a pipe is an illegal seek; zero turns it off.
_LOGS = """\
stdout_logfile=/dev/stdout
stdout_logfile_maxbytes=0
stdout_logfile_backups=0
stderr_logfile=/dev/stderr
stderr_logfile_maxbytes=0
stderr_logfile_backups=0"""


def check_paths(settings: Settings) -> list[Fault]:
    """Given settings, return a fault where the run directory cannot stand in supervisord's file."""
    path = str(settings.env.run_dir)
    if _SAFE_PATH.fullmatch(path):
        return []
    return [
        Fault(
            "settings.run-dir",
            f"WARMHOLD_RUN_DIR={path!r} is not an absolute path of letters, digits, '.', '_', '-'",
            "use the default, /run/warmhold",
        )
    ]


def build_vault_argv(env: Environment) -> list[str]:
    """Given the settings, return the argv that the launcher becomes for the vault."""
    return [
        *(sys.executable, "-m", "warmhold_wcache.serve"),
        *("--listen-fd", str(launcher.LISTEN_FD)),
        *("--store", f"{env.run_dir}/{STORE_SOCKET}"),
        *("--log-level", env.log_level, "--log-format", env.log_format),
    ]


def build_conf(settings: Settings, backend: Backend) -> str:
    """Given settings and who keeps the weights, return the text of supervisord's configuration."""
    env = settings.env
    run_dir = str(env.run_dir)
    text = _TEXT.format(
        run_dir=run_dir,
        python=sys.executable,
        user="user=root" if os.getuid() == 0 else "; not root",
        stop_wait_s=settings.stop_wait_s,
        exit_codes=",".join(str(code) for code in range(256)),
        logs=_LOGS,
    )
    if backend == "vllm":
        text += _HOLDER.format(program=HOLDER_PROGRAM, python=sys.executable, logs=_LOGS)
    if backend == "vault":
        text += _VAULT.format(
            run_dir=run_dir,
            python=sys.executable,
            launcher=launcher.PROGRAM,
            socket=VAULT_SOCKET,
            uid=os.getuid() if env.engine_uid is None else env.engine_uid,
            vault=" ".join(build_vault_argv(env)),
            logs=_LOGS,
        )
    if backend == "vault" and env.wcache_health_port is not None:
        text += _HEALTH.format(
            run_dir=run_dir,
            python=sys.executable,
            socket=VAULT_SOCKET,
            port=env.wcache_health_port,
            logs=_LOGS,
        )
    if settings.env.metrics_port is not None:
        text += _METRICS.format(python=sys.executable, port=settings.env.metrics_port, logs=_LOGS)
    return text


def write_conf(settings: Settings, backend: Backend) -> Path:
    """Given the same, write the configuration into the run directory and return its path."""
    path = settings.env.run_dir / CONF_NAME
    write_atomically(path, build_conf(settings, backend), mode=0o644)
    return path
