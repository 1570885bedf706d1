"""A producer at the other end of a cable that can be cut; runs in a network namespace of its own.

`run()` gives up a READ whose cable was cut (`tests/support/late.py`); it ends with 0 when nothing
went where it should not.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.late import give_up_and_go_on
from tests.support.processes import ROOT
from tests.support.producer import OtherProcess

APART = ("unshare", "--net", "--mount")
SEE = "mount -t sysfs sysfs /sys"  # UCX looks for networks there
HERE, THERE = "10.77.0.1/30", "10.77.0.2/30"


def may_make_networks() -> bool:
    """Whether this user may make network namespaces with a cable between them."""
    cable = f"{SEE} && ip link set lo up && ip link add here type veth peer name there"
    return _apart("sh", "-c", cable).returncode == 0


def run() -> subprocess.CompletedProcess[str]:
    """Cut the cable in mid-READ, in namespaces of their own: this host sees nothing of it."""
    return _apart("sh", "-c", f'{SEE} && exec "$0" -m tests.support.cable', sys.executable)


def _apart(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*APART, "--map-root-user", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def ip(*words: str, inside: int | None = None) -> None:
    """Run `ip`, in the namespace of process `inside` if given."""
    enter = ["nsenter", "--target", str(inside), "--net"] if inside is not None else []
    subprocess.run([*enter, "ip", *words], check=True)


class CutOff(OtherProcess):
    """Behind a cable: `stall` cuts it, `resume` mends it; the process itself goes on."""

    def __init__(self, words: int) -> None:
        # It waits for a line, so that its agent finds the cable when it looks for networks.
        waiting = (*APART, "sh", "-c", f'read _; {SEE} && exec "$0" "$@"')
        super().__init__("p0", transports="tcp", words=words, before=waiting)
        ip("link", "set", "lo", "up")
        ip("link", "add", "here", "type", "veth", "peer", "name", "there")
        ip("link", "set", "there", "netns", str(self.pid))
        ip("addr", "add", HERE, "dev", "here")
        ip("link", "set", "here", "up")
        ip("addr", "add", THERE, "dev", "there", inside=self.pid)
        ip("link", "set", "lo", "up", inside=self.pid)
        ip("link", "set", "there", "up", inside=self.pid)
        self.write(b"go\n")

    def stall(self) -> None:
        ip("link", "set", "there", "down", inside=self.pid)

    def resume(self) -> None:
        ip("link", "set", "there", "up", inside=self.pid)


if __name__ == "__main__":
    producer = CutOff(128 << 18)
    try:
        give_up_and_go_on(producer)
    finally:
        producer.close()
