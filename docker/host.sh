#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the Makefile does on the host: Docker Engine, base image, build inputs, `up`, times.
# It installs nothing without consent, and an engine that answers is used as it is.
set -euo pipefail
umask 022 # debootstrap's tree becomes an image that other users must be able to read
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=${HOST_ROOT:-} # tests put a folder here in place of /
PATH=$PATH:$root/usr/sbin:$root/sbin
base_image=debian:bookworm-slim
mirror=${WARMHOLD_DEBIAN_MIRROR:-http://deb.debian.org/debian}
goal=${GOAL:-${1:-help}} # what to run again, in messages
docker='' missing='' answer='' # the client in use, the plug-ins it lacks, what its server said
id='' status='' restarts='' exit_code='' started='' health='' # of the service's container
times=() mark=$SECONDS # rows of the table
scratch='' children=() # removed and ended at exit

say() { printf '%s\n' "==> $*"; }
fail() { printf 'error: %s\nfix: %s\n' "$1" "$2" >&2; exit 1; }
has() { type -P "$1" >/dev/null; }
record() { # $1: what took the time since the last record, or $2 seconds
  times+=("$(printf '%-24s %5d s' "$1" "${2:-$((SECONDS - mark))}")") mark=$SECONDS
}
print_times() { say "time taken"; printf '    %s\n' "${times[@]}"; }

clean_up() {
  ((${#children[@]} == 0)) || kill "${children[@]}" 2>/dev/null || true
  [[ -z $scratch ]] || rm -rf "$scratch" 2>/dev/null || as_root rm -rf "$scratch"
}
trap clean_up EXIT

# Given a name, print its value from the environment, else from .env, as compose does.
setting() {
  printenv "$1" || { [[ ! -r .env ]] || sed -n "s/^$1=//p" .env | tail -n 1 | tr -d "\"'"; }
}

# --- installing, with consent

as_root() {
  if [[ $(id -u) == 0 ]]; then "$@"
  elif has sudo; then sudo "$@"
  else fail "this needs root, and there is no sudo: $1" "run it as root: make $goal"; fi
}

agree() { # to installing these packages
  has apt-get || fail "there is no apt-get to install: $*" "install the like by your system's means"
  [[ ${YES:-} != 1 ]] || return 0
  [[ -t 0 ]] || fail "to be installed: $*; without a terminal nobody can agree" "YES=1 make $goal"
  local reply
  read -rp "Install with apt-get: $*? [y/N] " reply
  [[ $reply == [yY]* ]] || fail "not installed: $*" "answer y, or install it yourself"
}

apt_install() {
  # A third-party source that does not answer is no reason to stop: the install decides.
  as_root apt-get update || say "note: apt-get update had faults; going on with what it got"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    -o DPkg::Lock::Timeout=120 "$@" ||
    fail "apt-get could not install: $*" "correct what it names above, then make $goal again"
}

# Debian 12's own Engine has no compose or buildx plug-in: these packages alone come from Debian 13.
pin_trixie() {
  local pinned="docker.io docker-cli docker-buildx docker-compose"
  say "adding Debian 13 to apt for $pinned only: two files named warmhold-trixie in /etc/apt"
  printf '%s\n' 'Package: *' 'Pin: release n=trixie' 'Pin-Priority: 50' '' \
    "Package: $pinned" 'Pin: release n=trixie' 'Pin-Priority: 700' |
    as_root install -m 644 /dev/stdin "$root/etc/apt/preferences.d/warmhold-trixie"
  printf '%s\n' 'Types: deb' "URIs: $mirror" 'Suites: trixie' 'Components: main' \
    'Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg' |
    as_root install -m 644 /dev/stdin "$root/etc/apt/sources.list.d/warmhold-trixie.sources"
}

# --- Docker Engine

# Choose the first client with both plug-ins, else the first client at all.
find_docker() {
  local candidate lacks plugin
  docker='' missing=''
  while read -r candidate; do
    [[ -x $candidate ]] || continue
    lacks=''
    for plugin in compose buildx; do
      "$candidate" "$plugin" version >/dev/null 2>&1 || lacks+=" $plugin"
    done
    if [[ -z $docker || -z $lacks ]]; then docker=$candidate missing=$lacks; fi
    [[ -n $lacks ]] || return 0
  done < <(type -aP docker || true; echo "$root/usr/bin/docker")
}

check_client() {
  [[ -n $docker ]] || fail "no docker client was found" "make prepare"
  [[ -z $missing ]] || fail "$docker lacks the plug-in:$missing" "install it from where your Engine \
came from; packages: docker-compose-plugin docker-buildx-plugin (Docker), docker-compose docker-buildx \
(Debian 13), docker-compose-v2 docker-buildx (Ubuntu)"
}

ask_server() {
  [[ -n $docker ]] || return 1
  answer=$(timeout 10 "$docker" version --format '{{.Server.Version}}' 2>&1) && return 0
  [[ $answer != *"ermission denied"* ]] || fail "this user may not use the Docker Engine" \
    "sudo usermod -aG docker $(id -un), log in again, then make $goal"
  return 1
}

install_engine() {
  local release='' pin='' packages=(docker.io docker-cli docker-buildx docker-compose)
  # shellcheck source=/dev/null
  [[ ! -r $root/etc/os-release ]] || release=$(. "$root/etc/os-release"; echo "$ID:${VERSION_ID:-}")
  case $release in
    debian:12) pin=yes ;;
    debian:1[3-9] | debian:[2-9][0-9] | debian:) ;; # testing and sid carry no number
    ubuntu:*) packages=(docker.io docker-buildx docker-compose-v2) ;;
    *) fail "no Docker Engine here, and this can't set one up on '$release'" "install Docker \
Engine with its compose and buildx plug-ins: https://docs.docker.com/engine/install/" ;;
  esac
  packages+=(iptables)
  agree "${packages[@]}"
  [[ -z $pin ]] || pin_trixie
  apt_install "${packages[@]}"
  hash -r
  find_docker
}

start_engine() {
  local log=$root/var/log/dockerd.log waited init=''
  ask_server && return 0 # installing it may have started it
  say "starting the Docker Engine"
  [[ ! -r $root/proc/1/comm ]] || init=$(<"$root/proc/1/comm")
  if [[ -d $root/run/systemd/system ]]; then
    as_root systemctl start docker || fail "systemctl start docker failed" "journalctl -u docker"
  elif [[ $init == init ]]; then
    as_root service docker start || fail "service docker start failed" "correct what it names above"
  else # no init system, as in a container or on a CI machine
    # shellcheck disable=SC2016 # the inner shell, which may write there, opens the log
    as_root sh -c 'setsid dockerd >>"$1" 2>&1 </dev/null &' sh "$log"
  fi
  for ((waited = 0; waited < 60; waited++)); do
    ask_server && return 0
    ((waited % 5)) || say "waiting for the Docker Engine ($waited of 60 s)"
    sleep 1
  done
  [[ ! -r $log ]] || tail -n 20 "$log" >&2
  fail "the Docker Engine does not answer after 60 s: $answer" "read its log: $log or journalctl -u docker"
}

ensure_engine() {
  local context=default
  find_docker
  if ! ask_server; then
    [[ -z $docker ]] || context=$("$docker" context show 2>/dev/null || echo default)
    [[ -z ${DOCKER_HOST:-} && $context == default ]] ||
      fail "no Docker Engine answers at ${DOCKER_HOST:-context $context}" \
        "start that engine, or go back to this machine's: unset DOCKER_HOST, docker context use default"
    has dockerd || install_engine
    check_client
    start_engine
  fi
  check_client
  say "Docker Engine $answer answers; client: $docker"
}

# --- base image

ensure_base_image() {
  if "$docker" image inspect "$base_image" >/dev/null 2>&1; then
    say "$base_image is here"
  else
    say "pulling $base_image, for 30 s at most"
    timeout --foreground 30 "$docker" pull "$base_image" || debootstrap_base
  fi
}

debootstrap_base() {
  local packages=(debootstrap debian-archive-keyring)
  if ! has debootstrap || [[ ! -e $root/usr/share/keyrings/debian-archive-keyring.gpg ]]; then
    agree "${packages[@]}"
    apt_install "${packages[@]}"
  fi
  scratch=$(mktemp -d "$root/var/tmp/warmhold.XXXXXX")
  say "not pulled: building $base_image from $mirror with debootstrap"
  as_root debootstrap --force-check-gpg --variant=minbase bookworm "$scratch/base" "$mirror" ||
    fail "debootstrap failed" "set WARMHOLD_DEBIAN_MIRROR to a Debian mirror this machine reaches"
  printf 'deb %s %s main\n' "$mirror" bookworm "$mirror" bookworm-updates \
    "$mirror-security" bookworm-security | as_root tee "$scratch/base/etc/apt/sources.list" >/dev/null
  as_root tar -C "$scratch/base" --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' -c . |
    "$docker" import --change 'CMD ["bash"]' - "$base_image"
}

# --- what the build reads from this host

choose_wheels() {
  local folder configured
  [[ -z $(setting WARMHOLD_WHEELS) ]] || return 0
  configured=$(python3 -m pip config list 2>/dev/null | sed -n "s/.*find-links='\(.*\)'/\1/p" || true)
  for folder in ${PIP_FIND_LINKS:-} ${configured//\\n/ }; do
    folder=${folder#file://}
    compgen -G "$folder/torch-*+cpu*.whl" >/dev/null || continue
    export WARMHOLD_WHEELS=$folder
    say "wheels: $folder, from pip's settings"
    return 0
  done
}

choose_ca_bundle() {
  local file
  [[ -z $(setting WARMHOLD_CA_BUNDLE) ]] || return 0
  for file in "${SSL_CERT_FILE:-}" "${PIP_CERT:-}" "${REQUESTS_CA_BUNDLE:-}" \
    "$root/etc/ssl/certs/ca-certificates.crt"; do
    [[ -f $file && -r $file ]] || continue
    export WARMHOLD_CA_BUNDLE=$file
    (($(stat -Lc %s "$file") > 500 * 1024)) || return 0
    unset WARMHOLD_CA_BUNDLE
    say "note: $file is not handed to the build: BuildKit's secrets end at 500 KB"
  done
}

prepare() {
  ensure_engine
  record "Docker Engine"
  ensure_base_image
  record "base image"
  choose_wheels
  choose_ca_bundle
}

# --- up

check_port() {
  local bind port holder
  bind=$(setting WARMHOLD_BIND) port=$(setting WARMHOLD_PORT)
  bind=${bind:-127.0.0.1} port=${port:-8000}
  [[ $("$docker" compose port warmhold 8000 2>/dev/null) != *:"$port" ]] || return 0 # our own
  timeout 5 bash -c ": </dev/tcp/$bind/$port" 2>/dev/null || return 0
  holder=$("$docker" ps --filter "publish=$port" --format 'container {{.Names}}')
  [[ -n $holder ]] || ! has ss ||
    holder=$(ss -ltnpH "sport = :$port" | sed -n 's/.*(("\(.*\)",pid=\([0-9]*\).*/\1, PID \2/p' | head -n 1)
  fail "port $port of $bind is taken by ${holder:-another program}" "WARMHOLD_PORT=$((port + 1)) make $goal"
}

# Read the state of the service's container; all empty while there is none.
read_container() {
  local format='{{.Id}} {{.State.Status}} {{.RestartCount}} {{.State.ExitCode}} {{.State.StartedAt}}'
  id=$("$docker" compose ps --all --quiet warmhold 2>/dev/null || true)
  read -r id status restarts exit_code started health < <([[ -z $id ]] ||
    "$docker" inspect --format "$format {{with .State.Health}}{{.Status}}{{end}}" "$id") || true
}

# `compose up --wait` shows no log and sits out restarts: follow the one, end at the other.
up() {
  local began before compose followed='' code=0 engine_s=0
  began=$(date -u +%FT%T.000000000Z)
  read_container
  before="$id $restarts"
  BUILDKIT_PROGRESS=plain COMPOSE_ANSI=never "$docker" compose up --build --wait &
  compose=$! children+=($!)
  while kill -0 "$compose" 2>/dev/null; do
    read_container
    if [[ $status == running && $health == starting && $id != "$followed" ]]; then
      "$docker" logs --follow --since "$began" "$id" &
      children+=($!) followed=$id
    fi
    if ((${restarts:-0} > 0)) && [[ "$id $restarts" != "$before" ]]; then
      kill "$compose" 2>/dev/null || true
      break
    fi
    sleep 1
  done
  wait "$compose" || code=$?
  kill "${children[@]}" 2>/dev/null || true
  children=()
  read_container
  [[ $code == 0 ]] || explain_failure "$began"
  [[ $started < $began ]] || engine_s=$(($(date +%s) - $(date -d "$started" +%s)))
  record "image build" $((SECONDS - mark - engine_s))
  record "engine start" "$engine_s"
  print_ready
}

explain_failure() { # $1: when `up` began
  local log end="it is $status${health:+ and $health}, exit code $exit_code"
  [[ $started > $1 || $health == unhealthy ]] ||
    fail "docker compose up failed" "correct what it names above, then make $goal again"
  log=$("$docker" logs --tail 400 "$id" 2>&1)
  ((restarts == 0)) || end="it ended, and Docker started it again"
  say "the end of the container's log"
  tail -n 20 <<<"$log"
  [[ $(tail -n 20 <<<"$log") == *error:* ]] || grep -E '^(error|fix): ' <<<"$log" | tail -n 4 || true
  fail "the container did not become ready: $end" \
    "do what its log says, then make $goal again; make down ends it meanwhile"
}

print_ready() {
  local address header=''
  address=$("$docker" compose port warmhold 8000)
  address=http://${address/#0.0.0.0:/127.0.0.1:}
  # shellcheck disable=SC2016 # the reader's shell puts the key in; it is not printed here
  [[ -z $(setting WARMHOLD_API_KEY) ]] || header=' -H "Authorization: Bearer $WARMHOLD_API_KEY"'
  print_times
  say "ready at $address; try:"
  printf '%s\n' "curl $address/v1/completions$header -H 'Content-Type: application/json' \
-d '{\"prompt\": \"The capital of France is\", \"max_tokens\": 16, \"temperature\": 0}'"
}

# --- tests

ensure_python() { # $1: the interpreter the virtual environment is made with
  local probe='import ensurepip, sys, venv; assert sys.version_info >= (3, 11), sys.version'
  "$1" -c "$probe" 2>/dev/null || { agree python3-venv; apt_install python3-venv; }
  "$1" -c "$probe" || fail "$1 is not Python 3.11 or newer with venv" "PYTHON=python3.12 make $goal"
}

# Run make's targets in turn; end with a table of times and the last line of every pytest run.
timed() {
  local target code=0 log
  scratch=$(mktemp -d)
  for target; do
    mark=$SECONDS log=$scratch/$target
    say "$target"
    make --no-print-directory "$target" 2>&1 | tee "$log" || code=$?
    record "$target"
    [[ $code == 0 ]] || break
  done
  print_times
  grep -hE '^=+ .* in [0-9.]+s.* =+$' "$scratch"/* || true
  [[ $code == 0 ]] || fail "make $target failed" "see its output above"
}

with_engine() { find_docker; check_client; ask_server || fail "no Docker Engine answers" "make up"; }

case ${1:-} in
  prepare) prepare ;;
  up) prepare; check_port; mark=$SECONDS; up ;;
  down) with_engine; "$docker" compose down; say "volumes are kept; make clean-state removes them" ;;
  clean-state) with_engine; "$docker" compose down --volumes ;;
  logs) with_engine; "$docker" compose logs --follow --tail 200 ;;
  image) prepare; BUILDKIT_PROGRESS=plain "$docker" compose build ;;
  python) ensure_python "$2" ;;
  timed) timed "${@:2}" ;;
  run) # a command that finds the chosen client first on PATH, as `docker`
    prepare
    scratch=$(mktemp -d)
    ln -s "$docker" "$scratch/docker"
    PATH=$scratch:$PATH TESTCONTAINERS_RYUK_DISABLED=true "${@:2}" ;;
  *) fail "unknown command: ${1:-none}" "make help" ;;
esac
