"""Parts of this package that run as child processes at the other end of a socket: how a parent starts one, and how it
begins."""

import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


def start(
    command: Sequence[str], sock: socket.socket, more_environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that is told its socket's file descriptor as the last argument; what it prints goes to this
    process's stderr. `sock` is closed here."""
    with sock:
        return subprocess.Popen(
            [*command, str(sock.fileno())],
            pass_fds=[sock.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,
            env={**environment(), **(more_environment or {})},
        )


def environment() -> dict[str, str]:
    """This process's, and in it the package is found where this process found it, installed or not."""
    home = str(Path(__file__).parents[2])
    if home in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)  # where Python looks anyway
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": home if not known else os.pathsep.join([home, known])}


# --- in the child -----------------------------------------------------------------------------------------------------


def parents_socket() -> socket.socket:
    """A child's first act: the socket it was given. From now on it ends when its parent does, and at no signal that
    reaches all processes of a group, Ctrl-C or a service manager's: what becomes of it is for the parent to decide."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[-1]))
    sock.set_inheritable(False)
    threading.Thread(target=_exit_with_parent, args=(sock,), daemon=True).start()
    return sock


def _exit_with_parent(sock: socket.socket) -> None:
    """End this process when the other end of the socket is gone, whatever it is doing: loading, or stuck in a step."""
    poll = select.poll()
    poll.register(sock, 0)  # a hang-up is reported unasked
    poll.poll()
    os._exit(1)
