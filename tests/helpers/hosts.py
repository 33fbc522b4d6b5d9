"""Two hosts on one machine: network namespaces joined by a link, for ranks that share no memory and no localhost.

Needs root and `ip` from iproute2; without them the test that asks for hosts fails and says so.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PORT = 29500  # of the store, on the first host; nothing else listens in a namespace
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
COMMAND_S = 20.0  # bounds every command


@dataclass(frozen=True)
class Hosts:
    """Two hosts with equally many ranks each; the first has the store. Called with a rank, it takes the process there.

    names: of the namespaces, and hostnames of the processes in them. links: of the network devices, one in each.
    """

    names: tuple[str, str]
    links: tuple[str, str]
    ranks_per_host: int

    def __call__(self, rank: int) -> str:
        """Move this process, which must have one thread, to the rank's host; return torch's init_method."""
        host = rank // self.ranks_per_host
        libc = ctypes.CDLL(None, use_errno=True)
        namespace = os.open(f"/run/netns/{self.names[host]}", os.O_RDONLY)
        for outcome in (libc.setns(namespace, CLONE_NEWNET), libc.unshare(CLONE_NEWUTS)):
            if outcome:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(namespace)
        socket.sethostname(self.names[host])
        os.environ["GLOO_SOCKET_IFNAME"] = self.links[host]  # else gloo takes the address that the hostname has
        return f"tcp://{address(0)}:{PORT}"

    def set_link(self, state: str) -> None:
        """Plug the cable in ("up") or out ("down"). Works anywhere; both hosts lose their carrier."""
        run_ip("-n", self.names[1], "link", "set", self.links[1], state)


@contextmanager
def two_hosts(ranks_per_host: int) -> Iterator[Hosts]:
    """Make two hosts; remove them at the end, also after a failure."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        lacking = "root, to make network namespaces" if os.geteuid() else "`ip` (the package iproute2)"
        pytest.fail(f"this test needs {lacking}; `--deselect` it by name where that can't be had")
    unique = uuid.uuid4().hex[:6]
    hosts = Hosts((f"envoi-a-{unique}", f"envoi-b-{unique}"), ("va", "vb"), ranks_per_host)
    try:
        for name in hosts.names:
            run_ip("netns", "add", name)
        (first, second), (va, vb) = hosts.names, hosts.links
        run_ip("link", "add", va, "netns", first, "type", "veth", "peer", "name", vb, "netns", second)
        for host, (name, link) in enumerate(zip(hosts.names, hosts.links, strict=True)):
            run_ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", link)
            run_ip("-n", name, "link", "set", "lo", "up")
            run_ip("-n", name, "link", "set", link, "up")
        yield hosts
    finally:
        for name in hosts.names:
            if Path(f"/run/netns/{name}").exists():
                run_ip("netns", "del", name)


def address(host: int) -> str:
    """Return a host's address on the link."""
    return f"10.77.0.{host + 1}"


def run_ip(*arguments: str) -> None:
    """Run `ip`. Raises RuntimeError with what it says if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
