"""Child processes that run a part of this package and talk to their parent over a socket."""

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


def start_child(
    command: Sequence[str], sock: socket.socket, more_environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that inherits `sock` and gets its file descriptor as the last argument.

    The child's standard output goes to this process's stderr. `sock` is closed in this process. `more_environment` is
    added to the environment that the child inherits.
    """
    with sock:
        return subprocess.Popen(
            [*command, str(sock.fileno())],
            pass_fds=[sock.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,
            env={**child_environment(), **(more_environment or {})},
        )


def child_environment() -> dict[str, str]:
    """This process's environment, with a PYTHONPATH by which a child imports this same copy of the package."""
    home = str(Path(__file__).parents[2])
    if home in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)  # installed: Python finds it without help
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": home if not known else os.pathsep.join([home, known])}


# --- in the child -----------------------------------------------------------------------------------------------------


def parent_socket() -> socket.socket:
    """The socket that the parent passed on; to be called first in the child's main thread.

    From now on the child exits when its parent does. It ignores SIGINT and SIGTERM, which Ctrl-C and service managers
    send to all processes of a group: the parent decides when the child ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[-1]))
    sock.set_inheritable(False)
    threading.Thread(target=_exit_with_parent, args=(sock,), daemon=True).start()
    return sock


def _exit_with_parent(sock: socket.socket) -> None:
    """Exit when the parent closes its end of the socket, even if the main thread is loading or stuck in a step."""
    poll = select.poll()
    poll.register(sock, 0)  # a hang-up is always reported
    poll.poll()
    os._exit(1)
