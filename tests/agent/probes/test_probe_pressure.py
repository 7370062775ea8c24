"""Pressure figures of the kernel, which old kernels do not have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.probes import pressure
from agent.probes.pressure import Pressure, Stall

BUSY = """some avg10=1.53 avg60=0.87 avg300=0.73 total=1067
full avg10=0.05 avg60=0.00 avg300=0.00 total=12
"""


def test_some_and_full():
    assert pressure.parse(BUSY) == Stall(1.53, 0.05)


def test_old_kernels_have_no_full_for_the_cpu():
    assert pressure.parse(BUSY.splitlines()[0]) == Stall(1.53, None)


def test_no_file_and_nonsense_are_unknown_not_zero():
    for text in (None, "", "some", "some avg10=nan", "some avg10=900.00 total=1", "\x00\xff"):
        assert pressure.parse(text) == Stall()


def test_each_file_on_its_own(machine):
    root = machine({"/proc/pressure/memory": BUSY, "/proc/pressure/io": "full avg10=100.00\n"})
    assert pressure.read_pressure(root) == Pressure(memory=Stall(1.53, 0.05), io=Stall(None, 100.0))


@given(st.integers(0, len(BUSY)), st.integers(0, len(BUSY)), st.text(max_size=20))
def test_mutated_files_never_raise(begin, end, middle):
    found = pressure.parse(BUSY[:begin] + middle + BUSY[end:])
    assert all(part is None or 0 <= part <= 100 for part in (found.some, found.full))
