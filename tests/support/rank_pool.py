"""A pool of eight rank processes, started once and given one task after another, in worlds of any size.

``python -m tests.support.rank_pool`` is the parent of the ranks: it imports torch once, and what a pool asks for, and
forks the ranks of every such pool. Each rank reads tasks from its own pipe. A task is the name of a function of
``tests.support.rank_tasks``, or ``module:function``, and its arguments. A world of n is a gloo group of the first n
ranks; each task gets its group.
"""

import atexit
import contextlib
import datetime
import functools
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tests.support import ROOT

DEAD = "dead"
MOST = 8
AT_FIRST_USE = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")  # else by each rank
TIMEOUT = 120.0  # of the groups, in seconds: reached where something hangs, and not where the machine is busy


# In the ranks


def serve(rank: int, world: int, door: socket.socket, timeout: float, tasks: Connection) -> None:
    """Take part in the world, which meets at a listening socket, and run tasks until the pipe closes."""
    import torch.distributed as dist

    from tests.support import rank_tasks as table

    limit = datetime.timedelta(seconds=timeout)
    (host, port), fd = door.getsockname(), door.detach()
    if rank == 0:
        store = dist.TCPStore(host, port, world, True, timeout=limit, master_listen_fd=fd)
    else:
        os.close(fd)
        store = dist.TCPStore(host, port, world, False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, world + 1)}
    while True:
        try:
            name, size, args = pickle.loads(tasks.recv_bytes())  # plain: torch would share memory
        except EOFError:
            break
        try:
            result: Any = _find_task(table, name)(groups[size], *args)
        except BaseException as error:  # the parent raises it
            result = Failure(type(error).__name__, str(error), traceback.format_exc())
        tasks.send_bytes(pickle.dumps(result))
    os._exit(0)


def _find_task(table: Any, name: str) -> Any:
    """A function of the table, or of the module that is named before a colon."""
    module, _, function = name.rpartition(":")
    return getattr(importlib.import_module(module) if module else table, function)


class Failure:
    """What a rank raised."""

    def __init__(self, kind: str, text: str, trace: str):
        self.kind, self.text, self.trace = kind, text, trace

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}\n{self.trace}"


# In the test's process


class Pool:
    """Ranks of one world, forked by a process that has torch imported already."""

    def __init__(self, world: int = MOST, timeout: float = TIMEOUT, imported: tuple[str, ...] = ()):
        self.world, self.broken = world, False
        pairs = [socket.socketpair() for _ in range(world)]
        self.here = [Connection(a.detach()) for a, _ in pairs]
        nursery = _nursery(imported)
        socket.send_fds(nursery, [pickle.dumps(timeout)], [b.fileno() for _, b in pairs])
        for _, b in pairs:
            b.close()
        self.pids: list[int] = pickle.loads(nursery.recv(4096))

    def send(self, name: str, size: int, *args: Any) -> None:
        message = pickle.dumps((name, size, args))
        for rank in range(size):
            self.here[rank].send_bytes(message)

    def receive(self, rank: int, seconds: float = 2 * TIMEOUT) -> Any:
        """A rank's answer; DEAD if it gave up its life instead."""
        if not select.select([self.here[rank]], [], [], seconds)[0]:
            raise TimeoutError(f"rank {rank} gave no answer in {seconds} s")
        try:
            return pickle.loads(self.here[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return DEAD

    def run(self, name: str, size: int, *args: Any) -> list[Any]:
        """A task on all ranks of a world; their answers, or an error with every trace."""
        self.broken = True  # until all is well: a failed task leaves a group in no state to be used again
        self.send(name, size, *args)
        answers = [self.receive(r) for r in range(size)]
        failed = [f"rank {r}: {a}" for r, a in enumerate(answers) if isinstance(a, Failure) or a is DEAD]
        assert not failed, "\n".join(failed)
        self.broken = False
        return answers

    def signal(self, rank: int, which: int) -> None:
        os.kill(self.pids[rank], which)

    def close(self) -> None:
        for connection in self.here:
            connection.close()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@functools.cache
def _nursery(imported: tuple[str, ...]) -> socket.socket:
    """The way to ask for ranks: started by the first pool that has these imported, ended with the tests' process."""
    here, there = socket.socketpair()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.rank_pool", str(there.fileno()), *imported]
    process = subprocess.Popen(command, pass_fds=[there.fileno()], cwd=ROOT, env=environment)
    there.close()
    atexit.register(process.wait)
    atexit.register(here.close)  # the first to be called
    return here


# In the nursery


def main(asked: socket.socket, imported: list[str]) -> None:
    import torch

    import monoidreduce  # noqa: F401
    from tests.support import rank_tasks  # noqa: F401

    for name in (*AT_FIRST_USE, *imported):
        importlib.import_module(name)
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead: a process that is there lives
    while True:
        message, fds, _, _ = socket.recv_fds(asked, 4096, MOST)
        if not message:
            return
        asked.sendall(pickle.dumps(start(pickle.loads(message), fds)))


def start(timeout: float, fds: list[int]) -> list[int]:
    """Fork the ranks of a world; their numbers."""
    door, pids = socket.create_server(("127.0.0.1", 0), backlog=len(fds)), []
    for rank, fd in enumerate(fds):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in fds:
                if other != fd:
                    os.close(other)
            serve(rank, len(fds), door, timeout, Connection(fd))
        pids.append(pid)
    for fd in (*fds, door.detach()):
        os.close(fd)
    return pids


if __name__ == "__main__":
    from tests.support import rank_pool  # by its own name, so that what it sends can be read

    rank_pool.main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
