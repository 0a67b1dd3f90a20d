"""Real processes that stay: eight ranks started once, given one task after another, in worlds of any size.

``python -m tests.ranks.pool`` is the parent: it imports torch once and forks the ranks, each of which reads tasks from
its own pipe. A task is the name of a function of ``tests.ranks.tasks`` and its arguments. A world of n is a gloo group
of the first n ranks; each task gets its group.
"""

import contextlib
import datetime
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DEAD = "dead"
ROOT = Path(__file__).parents[2]
MOST = 8
TIMEOUT = 20.0  # of the groups, in seconds


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# In the ranks


def serve(rank: int, world: int, port: int, timeout: float, tasks: Connection) -> None:
    """Take part in the world, and run tasks until the pipe closes."""
    import torch.distributed as dist

    from tests.ranks import tasks as table

    limit = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, world + 1)}
    while True:
        try:
            name, size, args = pickle.loads(tasks.recv_bytes())  # plain: torch would share memory
        except EOFError:
            break
        try:
            result: Any = getattr(table, name)(groups[size], *args)
        except BaseException as error:  # the parent raises it
            result = Failure(type(error).__name__, str(error), traceback.format_exc())
        tasks.send_bytes(pickle.dumps(result))
    os._exit(0)


class Failure:
    """What a rank raised."""

    def __init__(self, kind: str, text: str, trace: str):
        self.kind, self.text, self.trace = kind, text, trace

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}\n{self.trace}"


# In the test's process


class Pool:
    """Ranks of one world, all started by one parent that has torch imported already."""

    def __init__(self, world: int = MOST, timeout: float = TIMEOUT):
        self.world, self.broken = world, False
        self.port = free_port()
        self.here, there = [], []
        for _ in range(world):
            a, b = socket.socketpair()
            self.here.append(Connection(a.detach()))
            there.append(b.detach())
        command = [sys.executable, "-m", "tests.ranks.pool", str(self.port), str(timeout), *map(str, there)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.parent = subprocess.Popen(
            command, pass_fds=there, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        for fd in there:
            os.close(fd)
        assert self.parent.stdout is not None
        self.pids = list(map(int, self.parent.stdout.readline().split()))

    def send(self, name: str, size: int, *args: Any) -> None:
        message = pickle.dumps((name, size, args))
        for rank in range(size):
            self.here[rank].send_bytes(message)

    def receive(self, rank: int, seconds: float = TIMEOUT) -> Any:
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
        answers = [self.receive(r, 2 * TIMEOUT) for r in range(size)]
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
        self.parent.kill()
        self.parent.wait()
        assert self.parent.stdout is not None
        self.parent.stdout.close()


def main(port: int, timeout: float, fds: list[int]) -> None:
    import torch

    import monoidreduce  # noqa: F401
    from tests.ranks import tasks  # noqa: F401

    torch.set_num_threads(1)
    pids = []
    for rank, fd in enumerate(fds):
        pid = os.fork()
        if pid == 0:
            for other in fds:
                if other != fd:
                    os.close(other)
            serve(rank, len(fds), port, timeout, Connection(fd))
        pids.append(pid)
    for fd in fds:
        os.close(fd)
    print(*pids, flush=True)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


if __name__ == "__main__":
    from tests.ranks import pool  # by its own name, so that what it sends can be read

    pool.main(int(sys.argv[1]), float(sys.argv[2]), list(map(int, sys.argv[3:])))
