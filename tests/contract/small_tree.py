# SPDX-License-Identifier: Apache-2.0
"""A small process tree that CRIU sees as it sees an engine: front, core and worker.

    small_tree.py PORT CONTROL_SOCKET INSIDE_SOCKET VAULT_SOCKET

The front listens on a wildcard port and on a control socket, the core on a socket within the tree.
Core and worker have sessions of their own. The worker holds 100 MB of its own memory, pages of
every kind, a ring in /dev/shm, a named semaphore, threads, a TCP connection to itself, a file lock,
and weights that it maps from a descriptor which the vault socket hands out. Front and worker hold a
random token that is written nowhere. Nothing is waited for by time.
"""

import _multiprocessing
import ctypes
import fcntl
import hashlib
import json
import os
import select
import socket
import struct
import sys
import threading
from multiprocessing import shared_memory

import kinds_of_pages
from warmhold_wcache import segments

PRIVATE_BYTES = 100 << 20
WEIGHT_BYTES = 8 << 20
RING_BYTES = 4 << 20
RECURSIVE, MAXIMUM = 0, 100


def own_session(body):
    """Fork a child that leads a session of its own."""
    if os.fork() == 0:
        os.setsid()
        try:
            body()
        finally:
            os._exit(1)


def ask(connection, question):
    """Send a line, return the answer to it."""
    connection.sendall(question.encode() + b"\n")
    return json.loads(connection.makefile().readline())


def may_lock(path):
    """Whether nobody holds a lock on the file."""
    with open(path) as file:  # noqa: PTH123
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class Worker:
    """Holds everything that has to come back."""

    def __init__(self, vault, inherited):
        self.vault = vault
        self.pages = kinds_of_pages.Pages(inherited)
        self.token = os.urandom(16).hex()
        self.private = os.urandom(1 << 20) * (PRIVATE_BYTES >> 20)
        self.ring = shared_memory.SharedMemory(create=True, size=RING_BYTES)
        name = f"/warmhold-tree-{os.getpid()}"
        self.semaphore = _multiprocessing.SemLock(1, 3, MAXIMUM, name, False)
        self.semaphore.acquire()
        self.address = segments.reserve(WEIGHT_BYTES)
        self.mapped = False
        self.store = socket.create_server(("127.0.0.1", 0))  # as torch's store: a loop within
        self.client = socket.create_connection(self.store.getsockname())
        self.accepted, _ = self.store.accept()
        self.locked = open(__file__)  # noqa: PTH123, SIM115 - held to the end
        fcntl.flock(self.locked, fcntl.LOCK_EX)
        for number in range(4):
            threading.Thread(target=self.count, args=(number,), daemon=True).start()

    def count(self, number):
        """Counts in the ring until the end, a slot per thread."""
        pause = threading.Event()
        while not pause.wait(0.005):
            (value,) = struct.unpack_from("=Q", self.ring.buf, 8 * number)
            struct.pack_into("=Q", self.ring.buf, 8 * number, value + 1)

    def map_weights(self):
        """Map what the vault hands out, where it was."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self.vault)
            _, fds, _, _ = socket.recv_fds(client, 1, 1)
        segments.map_read_only(fds[0], WEIGHT_BYTES, self.address)
        os.close(fds[0])
        self.mapped = True

    def unmap_weights(self):
        """Give them back and keep their address."""
        if self.mapped:
            segments.unmap_keep_address(self.address, WEIGHT_BYTES)
        self.mapped = False

    def state(self):
        """All that can be told of this process."""
        weights = ctypes.string_at(self.address, WEIGHT_BYTES) if self.mapped else b""
        self.client.sendall(b"over loopback")
        echo = self.accepted.recv(100).decode()
        counters = struct.unpack_from("=4Q", self.ring.buf, 0)
        return {
            "worker": os.getpid(),
            "worker_token": self.token,
            "pages": self.pages.digest(),
            "private": hashlib.blake2b(self.private).hexdigest(),
            "ring": self.ring.name,
            "counters": counters,
            "loop": [echo, self.client.getsockname()],
            "flock": may_lock(__file__),
            "semaphore": self.semaphore._get_value(),
            "weights": hashlib.blake2b(weights).hexdigest(),
            "weights_at": self.address,
            "threads": threading.active_count(),
        }

    def serve(self, connection):
        """Answer the core until it ends."""
        self.map_weights()
        for line in connection.makefile():
            {"quiesce": self.unmap_weights, "resume": self.map_weights}.get(
                line.strip(), lambda: 0
            )()
            connection.sendall(json.dumps(self.state()).encode() + b"\n")


def core(inside, vault):
    """Between front and worker, as an engine's core is: a socket to each."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(inside)
    listener.listen()
    here, there = socket.socketpair()
    inherited = kinds_of_pages.make_inherited()

    def work():
        here.close()
        listener.close()
        Worker(vault, inherited).serve(there)

    own_session(work)
    there.close()
    ask(here, "state")
    os.write(READY_W, b"r")
    connection, _ = listener.accept()
    for line in connection.makefile():
        shared = hashlib.blake2b(inherited[:]).hexdigest()
        below = ask(here, line.strip())
        told = {"core": os.getpid(), "shared": shared, **below}
        connection.sendall(json.dumps(told).encode() + b"\n")


class Front:
    """The tree's first process: HTTP, control, and a line of output now and then."""

    def __init__(self, port, control, core_connection):
        self.token = os.urandom(16).hex()
        self.core = core_connection
        self.core_lock = threading.Lock()
        self.http = socket.create_server(("0.0.0.0", port), backlog=256)
        self.control = socket.socket(socket.AF_UNIX)
        self.control.bind(control)
        self.control.listen()
        self.wake_r, self.wake_w = os.pipe()
        self.open = threading.Event()
        self.parked = threading.Event()
        self.held = False
        self.busy = 0
        self.idle = threading.Condition()

    def state(self, question="state"):
        """Front, core and worker together."""
        with self.core_lock:
            below = ask(self.core, question)
        return {"front": os.getpid(), "front_token": self.token, **below}

    def accept(self):
        """Accept while the gate is open; who comes meanwhile waits in the queue."""
        while True:
            if not self.open.is_set():
                self.parked.set()
                self.open.wait()
            ready, _, _ = select.select([self.http, self.wake_r], [], [])
            if self.wake_r in ready:
                os.read(self.wake_r, 1)
                continue
            connection, _ = self.http.accept()
            with self.idle:
                self.busy += 1
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection):
        """One request, one answer, and the end of the connection."""
        with connection:
            try:
                if connection.recv(4096):
                    status, body = (
                        ("503 Busy", "{}") if self.held else ("200 OK", json.dumps(self.state()))
                    )
                    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n"
                    head += "Connection: close\r\n\r\n"
                    connection.sendall((head + body).encode())
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)
            except OSError:
                pass
        with self.idle:
            self.busy -= 1
            self.idle.notify_all()

    def obey(self, order):
        """What the control socket asks for."""
        if order == "hold":
            self.held = True
        elif order == "quiesce":
            self.parked.clear()
            self.open.clear()
            os.write(self.wake_w, b"w")
            self.parked.wait()
            with self.idle:
                if not self.idle.wait_for(lambda: self.busy == 0, 5):
                    return {"error": f"{self.busy} connection(s) stay"}
            return self.state("quiesce")
        elif order == "resume":
            state = self.state("resume")
            self.held = False
            self.open.set()
            return state
        elif order == "exit":
            os._exit(7)
        return self.state()

    def serve(self):
        """Open the gate and obey until told to exit."""
        self.open.set()
        threading.Thread(target=self.accept, daemon=True).start()
        threading.Thread(target=self.beat, daemon=True).start()
        while True:
            connection, _ = self.control.accept()
            with connection:
                order = connection.makefile().readline().strip()
                connection.sendall(json.dumps(self.obey(order)).encode() + b"\n")

    def beat(self):
        """A numbered line of output, so that it can be seen to go on."""
        pause, number = threading.Event(), 0
        while not pause.wait(0.02):
            number += 1
            print(f"beat {number} {os.getpid()}", flush=True)


def main():
    port, control, inside, vault = int(sys.argv[1]), *sys.argv[2:]
    own_session(lambda: core(inside, vault))
    os.read(READY_R, 1)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(inside)
    front = Front(port, control, connection)
    print("serving", flush=True)
    front.serve()


if __name__ == "__main__":
    READY_R, READY_W = os.pipe()
    main()
