"""A READ that outlives its request changes nobody's memory (D1), over tcp, in two processes."""

from __future__ import annotations

import shutil

import pytest

from tests.support import cable
from tests.support.late import give_up_and_go_on
from tests.support.producer import OtherProcess


def test_a_read_that_goes_on_after_its_deadline_changes_no_other_requests_page():
    producer = OtherProcess("p0", transports="tcp", words=128 << 18)
    try:
        give_up_and_go_on(producer)
    finally:
        producer.close()


def test_a_network_that_drops_everything_for_a_while_changes_no_other_requests_page():
    if shutil.which("unshare") is None or not cable.may_make_networks():
        pytest.skip("needs the right to make network namespaces")
    done = cable.run()
    assert done.returncode == 0, done.stderr[-3000:]
