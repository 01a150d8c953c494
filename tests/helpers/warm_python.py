"""A Python that has imported torch and calibrate: what it is asked to run are forks of it.

A start of torch and calibrate takes two seconds of a core, and a job of two ranks has two of them.
"""

from __future__ import annotations

import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_LOADED = (
    "torch._dynamo",
    "torch.distributed",
    "calibrate.cli",
    "calibrate.measure.cluster.session",
    "calibrate.measure.ddp.rounds",
    "calibrate.measure.model.profile",
)
# asks a server for a fork with its own arguments, variables, folder and files, and ends as that
# does; without site-packages it starts in 20 ms
_PROGRAM = """#!{python} -IS
import marshal, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
asked = marshal.dumps((sys.argv, dict(os.environ), os.getcwd()))
socket.send_fds(link, [len(asked).to_bytes(4, "big")], [0, 1, 2])
link.sendall(asked)
pid = int.from_bytes(link.recv(4), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = os.waitstatus_to_exitcode(int.from_bytes(link.recv(4), "big"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def serving(folder: Path) -> Iterator[Path]:
    """A program that takes the arguments of Python: `-m`, `-c` or a script."""
    program, path = folder / "python", folder / "asked"
    program.write_text(_PROGRAM.format(python=sys.executable, path=str(path)))
    program.chmod(0o755)
    paths = os.pathsep.join(each for each in sys.path if each)
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, __file__, str(path), str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | variables,
    ) as server:
        assert server.stdin
        assert server.stdout
        assert server.stdout.readline(), "it did not start"
        yield program
        server.stdin.close()


class _Server:
    """Forks, and what each of them was asked by; it ends with its standard input."""

    def __init__(self, path: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(16)
        self._links: dict[int, socket.socket] = {}
        self._ended, wakes = socket.socketpair()
        wakes.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno())
        self._wakes = wakes

    def asked(self) -> tuple[Sequence[str], dict[str, str], str]:
        """Wait for requests and fork for each.

        Returns in a fork alone: the arguments, variables and folder that it is to run with.
        """
        while True:
            waits_for = [0, self._ended, self._listening, *self._links.values()]
            ready, _, _ = select.select(waits_for, [], [])
            if 0 in ready:
                os._exit(0)
            if self._ended in ready:
                self._ended.recv(1024)
                self._reap()
            for pid, link in self._links.items():
                if link in ready:  # who asked for it is gone
                    os.kill(pid, signal.SIGKILL)
            if self._listening in ready and (program := self._fork()):
                return program

    def _reap(self) -> None:
        while self._links:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with self._links.pop(pid) as link, suppress(OSError):
                link.sendall(status.to_bytes(4, "big"))

    def _fork(self) -> tuple[Sequence[str], dict[str, str], str] | None:
        link, _ = self._listening.accept()
        size, files, _, _ = socket.recv_fds(link, 4, 3)
        asked = b""
        while len(asked) < int.from_bytes(size, "big"):
            asked += link.recv(1 << 16)
        if pid := os.fork():
            for file in files:
                os.close(file)
            link.sendall(pid.to_bytes(4, "big"))
            self._links[pid] = link
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for file, own in zip(files, (0, 1, 2), strict=True):
            os.dup2(file, own)
            os.close(file)
        for each in (link, self._listening, self._ended, self._wakes, *self._links.values()):
            each.close()
        return marshal.loads(asked)


def _run(argv: Sequence[str], variables: dict[str, str], folder: str, paths: list[str]) -> None:
    """Run a script or a module as `python` would, given its arguments and environment."""
    import torch

    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    own = [each for each in variables.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [folder, *own, *(each for each in paths if each not in own)]
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    kind, *rest = argv[1:]
    if kind == "-c":
        code, *rest = rest
        sys.argv, main = ["-c", *rest], types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), vars(main))
    elif kind == "-m":
        name, *rest = rest
        sys.argv = [name, *rest]
        sys.modules.pop(name, None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [kind, *rest], str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    own_paths = sys.path[1:]
    for loaded in _LOADED:
        importlib.import_module(loaded)
    gc.freeze()
    server = _Server(sys.argv[1])
    sys.executable = sys.argv[2]
    os.write(1, b"started\n")
    _run(*server.asked(), own_paths)
