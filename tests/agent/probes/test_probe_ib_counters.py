"""Port counters in bytes, and rates that are unknown rather than wrong."""

from __future__ import annotations

import shutil
import tarfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.probes import ib_counters
from agent.probes.ib_counters import Counters, rates
from agent.probes.root import Root

if TYPE_CHECKING:
    from pathlib import Path

PORT = "/sys/class/infiniband/mlx5_0/ports/1"
KEY = ("mlx5_0", 1)
N64 = 2**64 - 1
N32 = 2**32 - 1


def test_words_become_bytes_and_errors_are_named(machine):
    root = machine(
        {
            f"{PORT}/counters/port_xmit_data": "1000\n",
            f"{PORT}/counters/port_rcv_data": "0\n",
            f"{PORT}/counters/link_downed": "3\n",
            f"{PORT}/counters/symbol_error": "N/A (no PMA)\n",
            f"{PORT}/hw_counters/out_of_sequence": "0\n",
        }
    )
    assert ib_counters.read_counters(root) == {
        KEY: Counters(4000, 0, {"link_downed": 3, "out_of_sequence": 0})
    }


@pytest.mark.parametrize(
    ("files", "tx", "rx"),
    [
        ({}, None, None),
        ({"counters/port_xmit_data": "N/A (no PMA)\n"}, None, None),
        ({"counters/port_xmit_data": f"{N32}\n", "counters/port_rcv_data": "1\n"}, None, 4),
        ({"counters/port_xmit_data": f"{N64}\n"}, None, None),
        ({"counters/port_xmit_data": f"{N32 + 1}\n"}, 4 * 2**32, None),
        (
            {"counters/port_xmit_data": f"{N32}\n", "counters_ext/port_xmit_data_64": "9\n"},
            36,
            None,
        ),
        ({"hw_counters/tx_bytes": "9\n", "hw_counters/rx_bytes": "8\n"}, 9, 8),
    ],
)
def test_where_bytes_are_counted(machine, files, tx, rx):
    root = machine({f"{PORT}/{path}": text for path, text in files.items()} | {f"{PORT}/x": ""})
    found = ib_counters.read_counters(root)[KEY]
    assert (found.tx_bytes, found.rx_bytes) == (tx, rx)


@pytest.mark.parametrize("text", ["", "-1", "1e9", "0x10", "٣", f"{N64 + 1}", "1" * 5000, None])
def test_what_is_no_count_is_unknown(text):
    assert ib_counters.parse_count(text) is None


@pytest.mark.parametrize(
    ("before", "after", "seconds", "rate"),
    [
        (Counters(1000, 500), Counters(6000, 500), 5.0, (1000.0, 0.0)),
        (Counters(1000, 500), Counters(10, 1500), 5.0, (None, 200.0)),  # sent was reset
        (Counters(None, 500), Counters(10, None), 5.0, (None, None)),
        (Counters(1, 1), Counters(2, 2), 0.0, (None, None)),
        (Counters(1, 1), Counters(2, 2), float("nan"), (None, None)),
    ],
)
def test_rates(before, after, seconds, rate):
    assert rates({KEY: before}, {KEY: after}, seconds) == {KEY: rate}


def test_a_port_that_was_not_there_has_no_rate():
    assert rates({}, {KEY: Counters(5, 5)}, 5) == {KEY: (None, None)}
    assert rates({KEY: Counters(5, 5)}, {}, 5) == {}


@given(
    st.none() | st.integers(0, N64 * 4),
    st.none() | st.integers(0, N64 * 4),
    st.floats(-1, 1e9),
)
def test_no_rate_is_negative(before, after, seconds):
    ((tx, _),) = rates({KEY: Counters(before)}, {KEY: Counters(after)}, seconds).values()
    assert tx is None or tx >= 0


def test_ports_are_bounded_and_numbers_only(machine):
    files = {f"/sys/class/infiniband/mlx5_0/ports/{name}/state": "" for name in ("1", "2", "x")}
    assert ib_counters.ports(machine(files)) == [("mlx5_0", 1), ("mlx5_0", 2)]


def test_h100_counters(captures, tmp_path: Path):
    with tarfile.open(captures / "sysfs/h100-class-infiniband.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    found = ib_counters.read_counters(Root(prefix=tmp_path))
    assert len(found) == 9
    assert found["mlx5_0", 1].tx_bytes == 4 * 230442669431839
    assert found["mlx5_1", 1].rx_bytes == 4 * 205128687774249
    assert found["mlx5_bond_0", 1].tx_bytes == 4 * 230442669431839
    assert ib_counters.not_zero(found["mlx5_0", 1].errors) == {
        "port_rcv_errors": 14,
        "port_rcv_switch_relay_errors": 1,
        "excessive_buffer_overrun_errors": 15,
        "roce_adp_retrans": 3,
    }


def test_a_reset_card_between_two_reads_of_a_tree(captures, tmp_path: Path):
    place = tmp_path / "sys/class/infiniband"
    shutil.copytree(captures / "sysfs/h100-class-infiniband", place)
    root = Root(prefix=tmp_path)
    before = ib_counters.read_counters(root)
    counters = place / "mlx5_4/ports/1/counters"
    (counters / "port_xmit_data").write_text(f"{230442669431839 + 62_500_000_000}\n")
    (counters / "port_rcv_data").write_text("12\n")
    after = ib_counters.read_counters(root)
    # 50 GB/s is what 400 Gbit/s carry: the unit is right.
    assert rates(before, after, 5) == {
        ("mlx5_0", 1): (0.0, 0.0),
        ("mlx5_4", 1): (50e9, None),
    }
