"""IMEX: every form of its tool, who runs it (E17), and whether nodes can share memory."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes import imex, imex_ctl, imex_owner, services
from agent.probes.imex import Imex, ImexNode

TABLE = """Connectivity Table Legend:
I - Invalid - Node wasn't reachable, no connection status available
N - Never Connected
!V! - Version mismatch, communication disabled.
C - Connected - Ready for operation

3/25/2026 10:39:43.659
Nodes:
Node #0   - 10.0.0.1          - READY                - Version: 580.95    - Hostname: rack1-a
Node #1   * 10.0.0.2 *        - READY                - Version: 580.95    - Hostname: rack1-b
Node #2   - fe80::3%eth0      - READY                - Version: 570.86    - Hostname: N/A
Node #3   - 10.0.0.4          - UNAVAILABLE          - Version:           - Hostname: rack1-d

 Nodes From\\To  0   1   2   3
       0        C   C   C   N
       1        C   C   !V! N
       2        C   R   C   N
       3        I   I   I   I
Domain State: DEGRADED
READY
"""
OLD = """3/25/2025 10:39:43.659
Nodes:
Node #0   - 10.136.206.48   - READY
Node #1   - 10.136.206.49   - INIT_GPU

 Nodes From\\To  0   1
       0        C   !M!
       1        A   C
Domain State: DOWN
"""
POD = "0::/kubepods.slice/kubepods-pod545812e1_e899_4d9d_9c5e_ce1a72cd9fa6.slice/x-{}.scope\n"
UNIT = "0::/system.slice/nvidia-imex.service\n"


def daemon(pid: int, cgroup: str, parent: int = 1) -> dict[str, str]:
    return {
        f"/proc/{pid}/comm": "nvidia-imex\n",
        f"/proc/{pid}/cmdline": "/usr/bin/nvidia-imex\x00-c\x00/etc/nvidia-imex/own.cfg\x00",
        f"/proc/{pid}/cgroup": cgroup,
        f"/proc/{pid}/status": f"Name:\tnvidia-imex\nPPid:\t{parent}\n",
    }


def tool(**outputs: str) -> str:
    """A nvidia-imex-ctl that answers by its options; what is not given fails."""
    cases = "\n".join(
        f"\"{options.replace('_', ' ')}\") cat <<'END'\n{text}\nEND\n;;"
        for options, text in outputs.items()
    )
    return f'case "$*" in\n{cases}\n*) echo "connection failed" >&2; exit 1;;\nesac'


def test_table_of_a_recent_release_marks_the_node_that_answers():
    answer = imex_ctl.parse(TABLE)
    assert (answer.domain_state, answer.own, answer.state) == ("DEGRADED", 1, "READY")
    assert answer.nodes[2] == ImexNode(2, "fe80::3%eth0", "READY", "570.86", None)
    assert answer.nodes[3] == ImexNode(3, "10.0.0.4", "UNAVAILABLE", None, "rack1-d")
    assert answer.connections[:2] == ((1, 2, "VERSION_MISMATCH"), (2, 1, "RECOVERING"))
    assert set(answer.connections[2:]) == {
        *((a, 3, "NEVER_CONNECTED") for a in (0, 1, 2)),
        *((3, b, "INVALID") for b in (0, 1, 2)),
    }


def test_table_of_an_old_release_has_neither_version_nor_host_name():
    answer = imex_ctl.parse("\x1b[4m" + OLD.replace("Node #1", "\x1b[0mNode #1"))
    assert answer.nodes == (
        ImexNode(0, "10.136.206.48", "READY"),
        ImexNode(1, "10.136.206.49", "INIT_GPU"),
    )
    assert answer.connections == ((0, 1, "NODE_MAP_MISMATCH"), (1, 0, "AUTHENTICATING"))
    assert (answer.domain_state, answer.state, answer.own) == ("DOWN", None, None)


def test_rack_of_18_nodes(captures):
    answer = imex_ctl.parse((captures / "imex/imex-ctl-N-gb200-18-nodes-up.txt").read_text())
    assert [node.index for node in answer.nodes] == list(range(18))
    assert answer.nodes[17] == ImexNode(17, "172.31.56.47", "READY", "570.172")
    assert (answer.domain_state, answer.state, answer.connections) == ("UP", "READY", ())


def test_json_and_table_give_the_same(captures):
    answer = imex_ctl.parse((captures / "imex/imex-ctl-N-j-H-2-nodes-up.json").read_text())
    assert answer.nodes == (
        ImexNode(0, "10.0.0.1", "READY", None, "gpu-node-a"),
        ImexNode(1, "10.0.0.2", "READY", None, "gpu-node-b"),
    )
    assert (answer.domain_state, answer.state, answer.connections) == ("UP", "READY", ())


def test_json_with_missing_parts_and_keys_in_any_order():
    text = json.dumps(
        {
            "nodes": {
                "10": {"status": "READY", "host": "10.0.0.11"},
                "2": {
                    "status": "READY",
                    "host": "10.0.0.3",
                    "hostName": "N/A",
                    "version": "580.95",
                    "connections": {
                        "10": {"host": "10.0.0.11", "status": "DISCONNECTED"},
                        "3": {"host": "10.0.0.4", "status": "CONNECTED"},
                    },
                },
                "3": {"status": "A_STATE_OF_2027", "connections": None},
                "x": {},
                "4": "READY",
            },
            "status": "DEGRADED",
        }
    )
    answer = imex_ctl.parse("warning: reading config\n" + text + "\ntrailing")
    assert [node.index for node in answer.nodes] == [2, 3, 10]
    assert answer.nodes[0] == ImexNode(2, "10.0.0.3", "READY", "580.95", None)
    assert answer.nodes[1].state == "A_STATE_OF_2027"
    # Node 10 told nothing of node 2: that is no connection until somebody says so.
    assert answer.connections == ((2, 10, "DISCONNECTED"), (10, 2, "UNKNOWN"))


def test_nodes_may_be_a_list():
    answer = imex_ctl.parse('{"nodes": [{"host": "10.0.0.1", "status": "READY"}]}')
    assert answer.nodes == (ImexNode(0, "10.0.0.1", "READY"),)


@pytest.mark.parametrize("state", [*sorted(imex_ctl.STATES), "SOME_NEW_STATE"])
def test_one_word(state):
    assert imex_ctl.parse(f"{state}\n") == imex_ctl.Answer(state=state)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "{}", '{"nodes": {}}', "Node #", "Failed to connect", "\x00\xff", "OK"]
)
def test_what_is_no_answer_has_a_reason_and_nothing_else(text):
    answer = imex_ctl.parse(text)
    assert answer.error
    assert answer == imex_ctl.Answer(error=answer.error)


def test_thousand_nodes_stay_small():
    count = 300
    nodes = "".join(f"Node #{n} - 10.0.{n // 256}.{n % 256} - READY\n" for n in range(count))
    columns = " ".join(map(str, range(count)))
    rows = "".join(f"{n} {'D ' * count}\n" for n in range(count))
    answer = imex_ctl.parse(f"{nodes} Nodes From\\To {columns}\n{rows}Domain State: DOWN\n")
    assert len(answer.nodes) == count
    assert len(answer.connections) == imex_ctl.MAX_PAIRS
    assert not answer.complete
    assert "broken" in imex.usable(Imex(nodes=answer.nodes, complete=False), ["10.0.0.1", "b"])
    assert "too many" in imex_ctl.parse('{"a": "' + "x" * imex_ctl.JSON_LIMIT + '"}').error


def test_degraded_because_of_others_does_not_block():
    answer = imex_ctl.parse(TABLE)
    seen = Imex("READY", "DEGRADED", None, answer.nodes, answer.connections, 1, True)
    assert imex.usable(seen, ["10.0.0.1", "10.0.0.2"]) is None
    assert imex.usable(seen, ["RACK1-A", "fe80:0:0::3"]) is None
    assert imex.usable(seen, ["10.0.0.4"]) is None
    assert "10.0.0.2 to fe80::3 is VERSION" in imex.usable(seen, ["10.0.0.2", "fe80::3"])
    assert "10.0.0.4 is UNAVAILABLE" in imex.usable(seen, ["10.0.0.1", "10.0.0.4"])
    assert "not in the IMEX domain" in imex.usable(seen, ["10.0.0.1", "10.9.9.9"])


def test_one_direction_is_not_enough():
    nodes = (ImexNode(0, "a", "READY"), ImexNode(1, "b", "READY"))
    seen = Imex("READY", "UP", None, nodes, ((1, 0, "DISCONNECTED"),))
    assert imex.usable(seen, ["a", "b"]) == "IMEX connection from b to a is DISCONNECTED"


def test_without_service_channel_or_answer_nothing_is_shared():
    nodes = (ImexNode(0, "a", "READY"), ImexNode(1, "b", "READY"))
    two = ["a", "b"]
    assert imex.usable(None, two) == "IMEX is not installed"
    assert imex.usable(None, ["a"]) is None
    assert "no IMEX channel in" in imex.usable(Imex(nodes=nodes, channels=0), two)
    assert "offers no IMEX channels" in imex.usable(Imex(nodes=nodes, has_major=False), two)
    assert "unknown: no answer" in imex.usable(Imex(), two)
    assert imex.usable(Imex(nodes=nodes), two) is None


def test_configuration(captures):
    text = "# all\n\nIMEX_CMD_PORT=50005\nSERVER_PORT = 50000 # peer\nBIND_IP=\nnonsense\n"
    assert imex.parse_config(text) == {"IMEX_CMD_PORT": "50005", "SERVER_PORT": "50000"}
    assert imex.parse_members("# rack 1\n10.0.0.1\r\n\n fd00::2 # b\n") == ("10.0.0.1", "fd00::2")
    members = imex.parse_members((captures / "imex/nodes_config.cfg").read_text())
    assert (members[0], len(members)) == ("172.31.48.81", 4)


def test_major_number():
    text = "Character devices:\n  1 mem\n235 nvidia-caps-imex-channels\n\nBlock devices:\n"
    assert imex.parse_major(text) is True
    assert imex.parse_major("Character devices:\n195 nvidia\n") is False
    assert imex.parse_major(None) is None


@pytest.mark.parametrize(
    ("cgroup", "parents", "expected"),
    [
        (UNIT, ["systemd"], "systemd nvidia-imex.service"),
        ("4:memory:/system.slice/my-imex@1.service\n0::/\n", ["systemd"], "systemd my-imex@1.serv"),
        (POD.format("ab" * 32), ["nvidia-cdi"], "process 8 (nvidia-imex), started by the kubelet"),
        ("0::/system.slice/docker-0123456789abcdef.scope\n", [], "started by docker in container"),
        ("0::/system.slice/slurmstepd.scope/job_77/step_0\n", [], "slurm job 77: process 8"),
        ("0::/system.slice/slurmd.service\n", ["bash"], "slurm: process 8"),
        ("0::/\n", ["sh", "slurmstepd", "systemd"], "slurm: process 8"),
        (
            "0::/\n",
            ["containerd-shim", "systemd"],
            "process 8 (nvidia-imex), started by containerd",
        ),
        ("0::/user.slice/user-0.slice/session-3.scope\n", ["bash"], "started by bash"),
        ("", [], "started by hand"),
    ],
)
def test_E17_who_started_it(cgroup, parents, expected):
    assert expected in imex_owner.started_by(8, cgroup, parents).name


async def test_E17_host_service_and_cluster_manager_at_once(machine):
    files = daemon(812, UNIT) | daemon(813, UNIT, 812) | daemon(4000, POD.format("ab" * 32), 9)
    show = "Id=nvidia-imex.service\nLoadState=loaded\nActiveState=active\nMainPID=812\n"
    root = machine(
        files | {"/dev/nvidia-caps-imex-channels/channel0": ""},
        {"systemctl": f"cat <<'END'\n{show}END", "nvidia-imex-ctl": tool(**{"-N_-j_-H": TABLE})},
    )
    seen = await imex.read(root)
    pod = "process 4000 (nvidia-imex), started by the kubelet in pod 545812e1-e899-4d9d-9c5e"
    assert seen.owners[0] == "systemd nvidia-imex.service"
    assert seen.owners[1].startswith(pod)
    assert len(seen.owners) == 2
    assert "`systemctl disable --now nvidia-imex.service` or the ComputeDomain" in seen.error
    # Several nodes are refused with that sentence, one node alone is not concerned.
    assert imex.usable(seen, ["10.0.0.1", "10.0.0.2"]) == seen.error
    assert imex.usable(seen, ["10.0.0.1"]) is None


async def test_E17_one_owner_is_no_conflict(machine):
    own = "-c_/etc/nvidia-imex/own.cfg"
    root = machine(
        daemon(812, UNIT)
        | {
            "/etc/nvidia-imex/own.cfg": "IMEX_NODE_CONFIG_FILE=/opt/nodes\nIMEX_CMD_ENABLED=1\n",
            "/opt/nodes": "10.0.0.1\n10.0.0.2\n",
            "/proc/devices": "Character devices:\n235 nvidia-caps-imex-channels\n",
            "/dev/nvidia-caps-imex-channels/channel0": "",
            "/dev/nvidia-caps-imex-channels/channel17": "",
            "/dev/nvidia-caps-imex-channels/other": "",
        },
        {"nvidia-imex-ctl": tool(**{f"{own}_-N": OLD, f"{own}_-q": "READY"})},
    )
    seen = await imex.read(root, services.Service("nvidia-imex", "active"))
    assert (seen.owner, seen.error) == ("systemd nvidia-imex.service", None)
    assert (seen.channels, seen.has_major) == (2, True)
    assert (seen.domain_state, len(seen.nodes)) == ("DOWN", 2)
    assert seen.members == ("10.0.0.1", "10.0.0.2")


async def test_state_comes_from_the_daemon_itself(machine):
    both = tool(**{"-N_-j_-H": OLD, "-q": "WAITING_FOR_PEERS"})
    seen = await imex.read(machine({}, {"nvidia-imex-ctl": both}))
    assert (seen.state, seen.domain_state, seen.owner) == ("WAITING_FOR_PEERS", "DOWN", None)


async def test_no_sign_of_imex_asks_nobody(machine):
    assert await imex.read(machine({"/proc/devices": "235 nvidia-caps-imex-channels\n"})) is None


async def test_installed_and_never_started_says_why(machine):
    files = {"/etc/nvidia-imex/config.cfg": "IMEX_CMD_ENABLED=0\n", "/dev/null": ""}
    seen = await imex.read(machine(files, {"nvidia-imex-ctl": tool(), "systemctl": "exit 1"}))
    assert (seen.state, seen.owner, seen.channels) == (None, None, 0)
    assert seen.error.startswith("nvidia-imex-ctl: connection failed; IMEX_CMD_ENABLED=0 in")


async def test_configuration_without_the_tool_says_so(machine):
    seen = await imex.read(machine({"/etc/nvidia-imex/config.cfg": "IMEX_CMD_PORT=1\n"}))
    assert seen.error == "nvidia-imex-ctl: no such program in PATH"


async def test_good_output_with_a_bad_exit_status_is_used(machine):
    root = machine({}, {"nvidia-imex-ctl": f"cat <<'END'\n{TABLE}END\nexit 3"})
    seen = await imex.read(root)
    assert (seen.version, seen.domain_state, seen.error) == ("580.95", "DEGRADED", None)


@pytest.mark.slow
async def test_hanging_tool_costs_its_deadline_only(machine, monkeypatch):
    monkeypatch.setattr(imex, "DOMAIN_TIMEOUT_S", 2.0)
    monkeypatch.setattr(imex, "STATE_TIMEOUT_S", 2.0)
    root = machine({}, {"nvidia-imex-ctl": f"cat <<'END'\n{OLD[:65]}\nEND\nsleep 60"})
    seen = await imex.read(root)
    assert "no answer within 2 s" in seen.error
    assert seen.nodes == (ImexNode(0, "10.136.206.48", "READY"),)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_output_never_raises(data):
    text = data.draw(st.sampled_from([TABLE, OLD, '{"nodes": {"0": {"status": "READY"}}}']))
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, len(text)))
    answer = imex_ctl.parse(text[:at] + data.draw(st.text(max_size=20)) + text[end:])
    assert answer.told or answer.state or answer.error
    assert all(len(node.state or "") <= imex_ctl.MAX_WORD for node in answer.nodes)
    seen = Imex(nodes=answer.nodes, connections=answer.connections, complete=answer.complete)
    imex.usable(seen, ["10.0.0.1", "10.0.0.2"])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200), st.text(max_size=40))
def test_any_text_never_raises(text, other):
    imex_ctl.parse(text)
    imex.parse_config(text)
    imex.parse_members(text)
    imex.parse_major(text)
    imex_owner.started_by(1, text, [other])


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["nodes", "0", "1", "status", "host", "connections"]),
                inner,
                max_size=5,
            )
        ),
        max_leaves=20,
    )
)
def test_any_json_never_raises(document):
    imex_ctl.parse(json.dumps({"nodes": document, "status": document}))
