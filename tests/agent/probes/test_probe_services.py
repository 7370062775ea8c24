"""Services by systemd, and by their processes where systemd does not run them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import services
from agent.probes.services import Service

SHOW = """Id=nvidia-fabricmanager.service
Names=nvidia-fabricmanager.service
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
MainPID=1201
Result=success
ActiveEnterTimestamp=Tue 2026-01-06 10:11:12 UTC

MainPID=0
Result=exit-code
Id=nvidia-imex.service
LoadState=loaded
ActiveState=failed
SubState=failed
UnitFileState=disabled

Id=opensmd.service
Names=opensm.service opensmd.service
LoadState=loaded
ActiveState=inactive
UnitFileState=static

Id=nvidia-dcgm.service
LoadState=not-found
ActiveState=inactive
SubState=dead
UnitFileState=
"""
NAMES = ("nvidia-fabricmanager", "nvidia-imex", "opensm", "nvidia-dcgm", "other")


def show(text: str, status: int = 0) -> str:
    return f"cat <<'END'\n{text}END\nexit {status}"


def test_states_of_several_units():
    found = services.parse_show(SHOW, NAMES)
    since = "Tue 2026-01-06 10:11:12 UTC"
    assert found["nvidia-fabricmanager"] == Service(
        "nvidia-fabricmanager", "active", True, since, None, 1201
    )
    assert found["nvidia-imex"] == Service(
        "nvidia-imex",
        "failed",
        False,
        error="nvidia-imex: failed (exit-code): see journalctl -u nvidia-imex",
    )
    assert found["opensm"] == Service("opensm", "inactive", None)
    assert found["nvidia-dcgm"] == Service("nvidia-dcgm", "absent")
    assert "other" not in found


@pytest.mark.parametrize(
    ("fields", "state", "words"),
    [
        ("ActiveState=activating\nSubState=auto-restart\nResult=signal", "failed", "again"),
        ("ActiveState=activating\nSubState=start", "inactive", "is starting (start)"),
        ("ActiveState=reloading\nSubState=reload", "active", None),
        ("ActiveState=deactivating", "inactive", None),
        ("LoadState=masked\nActiveState=inactive\nUnitFileState=masked", "inactive", "unmask a"),
        ("LoadState=bad-setting\nActiveState=inactive", "inactive", "not usable (bad-setting)"),
        ("ActiveState=dancing", None, "neither active nor inactive (dancing)"),
        ("", None, "neither"),
    ],
)
def test_other_states(fields, state, words):
    found = services.parse_show(f"Id=a.service\n{fields}\n", ["a"])["a"]
    assert found.state == state
    assert words in found.error if words else found.error is None


async def test_one_question_for_all(machine):
    root = machine({}, {"systemctl": f'[ "$#" = 8 ] || exit 9\n{show(SHOW)}'})
    found = await services.read_services(root, [f"{name}.service" for name in NAMES])
    states = {name: service.state for name, service in found.items()}
    assert states == {
        "nvidia-fabricmanager": "active",
        "nvidia-imex": "failed",
        "opensm": "inactive",
        "nvidia-dcgm": "absent",
        "other": None,
    }
    assert found["other"].error == "systemctl show: no answer for it"


async def test_good_output_with_a_bad_exit_status_is_used(machine):
    root = machine({}, {"systemctl": show(SHOW, 4)})
    found = await services.read_services(root, ["nvidia-fabricmanager"])
    assert found["nvidia-fabricmanager"].pid == 1201


async def test_without_systemd_processes_tell(machine):
    root = machine(
        {
            "/proc/77/comm": "nv-fabricmanage\n",
            "/proc/77/cmdline": "/usr/bin/nv-fabricmanager\x00-c\x00x\x00",
            "/proc/78/comm": "nv-fabricmanage\n",
            "/proc/78/cmdline": "/opt/nv-fabricmanage-watch\x00",
            "/proc/9/comm": "opensm\n",
            "/proc/self/comm": "opensm\n",
        },
        {"systemctl": "echo 'Failed to connect to bus: Host is down' >&2; exit 1"},
    )
    names = ["nvidia-fabricmanager", "opensm", "nvidia-imex"]
    found = await services.read_services(root, names)
    assert found["nvidia-fabricmanager"] == Service(
        "nvidia-fabricmanager", "active", pid=77, unit=False
    )
    assert (found["opensm"].state, found["opensm"].pid) == ("active", 9)
    assert found["nvidia-imex"].state is None
    assert found["nvidia-imex"].error == "Failed to connect to bus: Host is down"


async def test_daemon_in_a_container_runs_although_its_unit_is_absent(machine):
    root = machine({"/proc/5/comm": "nv-hostengine\n"}, {"systemctl": show(SHOW)})
    found = (await services.read_services(root, ["nvidia-dcgm"]))["nvidia-dcgm"]
    assert (found.state, found.pid, found.unit) == ("active", 5, False)


async def test_process_of_a_starting_unit_is_the_units(machine):
    text = "Id=nvidia-imex.service\nActiveState=activating\nSubState=start\n"
    root = machine({"/proc/5/comm": "nvidia-imex\n"}, {"systemctl": show(text)})
    found = (await services.read_services(root, ["nvidia-imex"]))["nvidia-imex"]
    assert (found.state, found.pid, found.unit, found.starting) == ("inactive", 5, True, True)


async def test_no_systemctl_at_all(machine):
    found = await services.read_services(machine({}), ["a", "a.service"])
    assert found == {"a": Service("a", error="systemctl: no such program in PATH")}
    assert await services.read_services(machine({}), []) == {}


@pytest.mark.slow
async def test_hanging_systemctl_costs_its_deadline_only(machine, monkeypatch):
    monkeypatch.setattr(services, "TIMEOUT_S", 0.3)
    found = await services.read_services(machine({}, {"systemctl": "sleep 60"}), ["a"])
    assert "no answer within 0.3 s" in found["a"].error


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(SHOW)), st.integers(0, len(SHOW)), st.text(max_size=30))
def test_mutated_output_never_raises(begin, end, middle):
    found = services.parse_show(SHOW[:begin] + middle + SHOW[end:], NAMES)
    assert set(found) <= set(NAMES)
