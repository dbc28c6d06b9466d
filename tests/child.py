"""Cases that may crash, hang or eat all memory run in a child: one process for many, a new one after each that ended it.

child = Child(check)  # a function of a module: it is looked up there by the child
child.run(case)  # as check(case), whatever becomes of the process
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Check = Callable[[Any], object]

MOST_BYTES = 4 << 30  # of address space, beyond what the child starts with
IS_SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # whose shadow alone is terabytes


class Child:
    """Runs ``check`` on picklable cases in a process of its own, for at most ``timeout`` seconds each."""

    def __init__(self, check: Check, *, timeout: float = 120) -> None:
        self.check = check
        self.timeout = timeout * (10 if IS_SANITIZED else 1)
        self.context = multiprocessing.get_context("spawn")
        self.process: multiprocessing.process.BaseProcess | None = None

    def run(self, case: Any) -> None:
        """Raises AssertionError with the failure's traceback, or with what the child said as it died."""
        if self.process is None:
            self._start()
        assert self.process is not None
        try:
            self.connection.send(case)
        except ConnectionError:
            raise AssertionError(f"{self._end('died before it got a case')}\nin {case!r}") from None
        ready = wait([self.connection, self.process.sentinel], self.timeout)
        if self.connection in ready:
            try:
                failure = self.connection.recv()
            except (EOFError, ConnectionError):  # it died before it answered
                failure = self._end("died")
        else:
            failure = self._end("died" if ready else f"took more than {self.timeout} s")
        assert failure is None, f"{failure}\nin {case!r}"

    def close(self) -> None:
        if self.process is not None:
            self._end("")

    def _start(self) -> None:
        self.stderr = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115 (closed in _end)
        self.connection, other = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(self.check, other, self.stderr.name), daemon=True)
        process.start()
        other.close()
        self.process = process
        try:
            self.connection.recv()  # however long it takes to import what the check needs
        except (EOFError, ConnectionError):
            raise AssertionError(self._end("died at its start")) from None

    def _end(self, what: str) -> str:
        """Ends the process, and tells why it had to."""
        process, self.process = self.process, None
        assert process is not None
        process.join(5 if what.startswith("died") else 0)
        process.kill()
        process.join()
        status = process.exitcode or 0
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        with self.connection, self.stderr:
            return f"the child {what}: {name}\n{self.stderr.read()[-8000:]}"


def _serve(check: Check, connection: Connection, stderr: str) -> None:
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    faulthandler.enable()
    _bound_memory()
    connection.send(None)
    while True:
        try:
            case = connection.recv()
        except EOFError:  # the parent has gone
            return
        try:
            check(case)
        except Exception:
            connection.send(traceback.format_exc())
        else:
            connection.send(None)


def _bound_memory() -> None:
    """So that what asks for too much fails, rather than the machine."""
    if IS_SANITIZED or not sys.platform.startswith("linux"):
        return
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.RLIM_INFINITY))


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that ``call`` held at a time beyond what the process had; 0 where nobody can tell."""
    refs = Path("/proc/self/clear_refs")
    if IS_SANITIZED or not refs.exists():
        call()
        return 0
    refs.write_text("5")  # the peak starts anew
    before = _kilobytes("VmHWM")
    call()
    return (_kilobytes("VmHWM") - before) * 1024


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
