"""One run of ibnetdiscover: the output as it is, and an error beside it where there is one."""

from __future__ import annotations

import shlex

import pytest

from agent.probes import scan

FABRIC = """#
# Topology file: generated on Sun Nov 29 14:25:22 2026
#
vendid=0x2c9
devid=0xd2f2
switchguid=0xfc6a1c0300000700(fc6a1c0300000700)
Switch\t64 "S-fc6a1c0300000700"\t\t# "leaf08" enhanced port 0 lid 10 lmc 0
[1]\t"H-a088c20300000070"[1](a088c20300000071) \t\t# "dgx01 mlx5_7" lid 39 4xHDR
"""
PRINT = f"printf %s {shlex.quote(FABRIC)}"


async def run(machine, script: str, **options: float) -> scan.Scan:
    return await scan.scan(machine({}, {"ibnetdiscover": script}), "mlx5_0", 1, **options)


async def test_output_is_kept_as_it_is(machine):
    found = await run(machine, PRINT)
    assert (found.text, found.error) == (FABRIC, None)
    assert found.took_ms >= 0


async def test_the_chosen_port_is_scanned(machine):
    found = await run(machine, 'echo "$@"')
    assert found.text == "-C mlx5_0 -P 1\n"
    assert "printed no node of a fabric" in found.error


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"{PRINT}; exit 1", "exit status 1; what was found before is kept"),
        pytest.param(
            f"{PRINT}; exec sleep 600",
            "no answer within 2 s; killed; what was found before is",
            marks=pytest.mark.slow,
        ),
        (
            f"{PRINT}; echo 'ibwarn: [8] _do_madrpc: send failed; Invalid argument' >&2",
            "not all of it answered: ibwarn: _do_madrpc: send failed",
        ),
    ],
)
async def test_good_output_is_kept_beside_an_error(machine, script, words):
    found = await run(machine, script, timeout_s=2.0 if "sleep" in script else 60)
    assert found.text == FABRIC
    assert words in found.error


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exec sleep 600", "no answer within 0.2 s; killed; a large fabric needs a longer"),
        ('echo "can\'t open UMAD port (mlx5_0:1)" >&2; exit 255', "run the agent as root"),
        ("echo 'ibnetdiscover: iberror: failed: discover failed'; exit 255", "discover failed"),
        ("exit 0", "printed no node"),
    ],
)
async def test_no_output_has_a_reason(machine, script, words):
    timeout_s = 0.2 if "sleep" in script else 60
    assert words in (await run(machine, script, timeout_s=timeout_s)).error


async def test_a_missing_tool_has_a_reason(machine):
    found = await scan.scan(machine({}), "mlx5_0", 1)
    assert found.error == "ibnetdiscover is not installed: install the package infiniband-diags"


@pytest.mark.parametrize(("hca", "port"), [("-x", 1), ("", 1), ("a b", 1), ("a" * 65, 1), ("a", 0)])
async def test_no_odd_name_reaches_the_tool(machine, hca, port, tmp_path):
    root = machine({}, {"ibnetdiscover": f"touch {tmp_path}/ran"})
    found = await scan.scan(root, hca, port)
    assert "is not the name of a port" in found.error
    assert not (tmp_path / "ran").exists()


async def test_output_larger_than_a_tool_may_print_else_is_cut_at_its_own_cap(machine, monkeypatch):
    monkeypatch.setattr(scan, "OUTPUT_LIMIT", 100_000)
    found = await run(machine, f"{PRINT}; exec /usr/bin/yes")
    assert len(found.text) == 100_000
    assert "more than 100000 bytes of output; the rest was cut off; what was found" in found.error


async def test_binary_output_can_be_stored(machine):
    found = await run(machine, f"{PRINT}; printf '\\000\\377'")
    assert found.text == f"{FABRIC}\ufffd\ufffd"
    assert found.error is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ibnetdiscover-gb200-superpod.txt", None),
        ("ibnetdiscover-azure-ndv4.txt", None),
        ("ibnetdiscover-full-sim-4dgx-8rail.txt", None),
        ("ibnetdiscover-single-ca-no-links.txt", None),
        ("ibnetdiscover-no-hardware.txt", "modprobe ib_umad"),
    ],
)
async def test_captured_scans(captures, machine, name, words):
    file = captures / "infiniband" / name
    found = await run(machine, f"cat {shlex.quote(str(file))}")
    assert found.text == file.read_text()
    assert (found.error is None) if words is None else words in found.error
