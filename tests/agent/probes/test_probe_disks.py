"""Filesystems: each once, shared told apart, overlays, and a filer that never answers."""

from __future__ import annotations

import os
import threading
import time

import pytest

from agent.probes import disks, mounts, warnings
from agent.probes.disks import Disk
from agent.probes.root import Root


def table(*lines: str) -> tuple[mounts.Mount, ...]:
    return mounts.parse_mountinfo("\n".join(lines))


def space(total_mib: int, free_mib: int) -> os.statvfs_result:
    return os.statvfs_result((2**20, 2**20, total_mib, free_mib, free_mib, 0, 0, 0, 0, 255))


def test_parallel_filesystems_are_shared(small):
    text = (small / "proc/mountinfo-parallel-fs.synthetic.txt").read_text()
    found = {disk.mount: disk.kind for disk in disks.find(mounts.parse_mountinfo(text))}
    assert found.pop("/") == found.pop("/data disk") == "local"
    assert set(found.values()) == {"shared"}
    assert len(found) == 7


def test_kubernetes_node_counts_each_device_once(captures):
    text = (captures / "proc/mountinfo-k8s-lxc-node.txt").read_text()
    parsed = mounts.parse_mountinfo(text)
    assert len(parsed) == len(text.splitlines())
    found = disks.find(parsed)
    assert len(found) == 10
    assert {disk.filesystem for disk in found} == {"ext4", "fuse.testfs"}


def test_nfs_server_mounted_twice_is_one_filesystem(captures):
    text = (captures / "proc/mountinfo-nfs-proc26231").read_text()
    shared = [d for d in disks.find(mounts.parse_mountinfo(text)) if d.kind == "shared"]
    assert [disk.mount for disk in shared] == ["/mnt/nfs/test"]


def test_bind_mounts_subvolumes_and_datasets_count_once():
    found = disks.find(
        table(
            "1 0 259:2 / / rw - ext4 /dev/a rw",
            "2 1 259:2 /var /srv rw shared:1 - ext4 /dev/a rw",
            "3 1 0:40 /@ /b rw - btrfs /dev/b rw",
            "4 1 0:41 /@home /b/home rw - btrfs /dev/b rw",
            "5 1 0:50 / /tank rw - zfs tank rw",
            "6 1 0:51 / /tank/x rw - zfs tank/x rw",
        )
    )
    assert [disk.mount for disk in found] == ["/", "/b", "/tank"]


def test_hidden_mount_is_not_counted():
    lines = ("1 0 8:1 / /data rw - ext4 /dev/a rw", "2 0 8:2 / /data rw - xfs /dev/b rw")
    assert [disk.filesystem for disk in disks.find(table(*lines))] == ["xfs"]


def test_parts_of_one_filer_on_one_device_are_one_filesystem():
    found = disks.find(
        table(
            "1 0 0:42 / /home rw - nfs4 filer:/home rw",
            "2 0 0:42 /ann /home/ann rw - nfs4 filer:/home/ann rw",
            "3 0 0:43 / /home2 rw - nfs filer:/home rw",
            "4 0 0:44 / /net rw - autofs /etc/auto.net rw,fd=6",
            "5 0 0:45 / /misc rw - autofs systemd-1 rw",
        ),
        ["/home/ann/hub"],
    )
    assert [(disk.mount, disk.holds_weights) for disk in found] == [("/home", True)]


def test_image_files_are_part_of_the_disk_they_lie_on():
    lines = (
        "1 0 8:1 / / rw - ext4 /dev/a rw",
        "2 0 7:1 / /snap/core/1 ro - squashfs /dev/loop1 ro",
        "3 0 7:2 / /mnt/image rw - ext4 /dev/loop2 rw",
        "4 0 7:3 / /weights rw - ext4 /dev/loop3 rw",
    )
    found = disks.find(table(*lines), ["/weights"])
    assert [(disk.mount, disk.holds_weights) for disk in found] == [
        ("/", False),
        ("/weights", True),
    ]


def test_blanks_and_odd_line_ends_cost_no_line():
    lines = ("1 1 8:2 /  /a rw shared:8 - ext4 /dev/a rw", "2 0 8:3 / /b\u2028c rw - xfs /dev/b rw")
    assert [mount.mount for mount in table(*lines)] == ["/a", "/b\u2028c"]


def test_servers():
    names = ("filer:/x", "//smb/x", "a@o2ib:b@o2ib:/s", "JuiceFS:m", "[fd00::1]:/x")
    found = [mounts.server(mounts.Mount("", "/", "/", "t", name, ())) for name in names]
    assert found == [
        "t filer",
        "t smb",
        "t a@o2ib:b@o2ib",
        "t JuiceFS:m",
        "t [fd00::1]",
    ]


def test_unknown_types_by_their_source():
    kinds = [
        mounts.kind(mount)
        for mount in table(
            "1 0 8:1 / /a rw - newfs /dev/sdz rw",
            "2 0 0:9 / /b rw - netfs host:/vol rw",
            "3 0 0:9 / /c rw - cgroup9 none rw",
            "4 0 0:9 / /d rw - tmpfs tmpfs rw",
            "5 0 7:1 / /snap/x ro - squashfs /dev/loop1 ro",
        )
    ]
    assert kinds == ["local", "shared", "pseudo", "pseudo", "pseudo"]


def test_disk_that_holds_weights_by_the_longest_mount():
    lines = ("1 0 8:1 / / rw - ext4 /dev/a rw", "2 0 8:2 / /models rw - xfs /dev/b rw")
    found = disks.find(table(*lines), ["/models/hub"])
    assert [(d.mount, d.holds_weights) for d in found] == [("/", False), ("/models", True)]
    assert disks.find(table(*lines), ["/modelsX"])[0].holds_weights


def test_container_root_and_its_disk_count_once():
    found = (
        Disk("/", "overlay", "local", 100, 10),
        Disk("/etc/hosts", "ext4", "local", 100, 10, holds_weights=True),
        Disk("/data", "xfs", "local", 500, 10),
    )
    assert disks.merge_overlay(found) == (
        Disk("/", "overlay", "local", 100, 10, holds_weights=True),
        found[2],
    )


def test_container_root_takes_away_one_of_several_equal_disks():
    data = [Disk(f"/data{n}", "xfs", "local", 100_000, 90_000) for n in range(3)]
    etc = Disk("/etc/hosts", "xfs", "local", 100_000, 40_010)
    top = Disk("/", "overlay", "local", 100_000, 40_000)
    assert disks.merge_overlay([top, *data, etc]) == (top, *data)
    assert disks.merge_overlay([top, *data]) == (top, *data)


@pytest.mark.slow
async def test_dead_filer_costs_only_its_own_space(machine, monkeypatch):
    monkeypatch.setattr(disks, "STATVFS_TIMEOUT_S", 1.0)
    root = machine(
        {
            "/proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/a rw\n"
            "2 0 0:9 / /dead rw - nfs4 filer:/x rw\n3 0 8:3 / /stale rw - xfs /dev/c rw\n"
        }
    )
    release = threading.Event()

    def statvfs(path: str) -> os.statvfs_result:
        if path == "/dead":
            release.wait(120)
        if path == "/stale":
            raise OSError(116, "Stale file handle")
        return space(1000, 400)

    for _ in range(2):
        began = time.monotonic()
        found = await disks.read_disks(root, statvfs=statvfs)
        assert time.monotonic() - began < 60
        sizes = {disk.mount: disk.free_mib for disk in found}
        assert sizes == {"/": 400, "/dead": None, "/stale": None}
    release.set()


@pytest.mark.slow
async def test_dead_filer_with_many_mounts_holds_one_thread(machine, monkeypatch):
    monkeypatch.setattr(disks, "STATVFS_TIMEOUT_S", 1.0)
    lines = [f"{n} 0 0:{n} / /dead{n} rw - nfs4 deadfiler:/x{n} rw" for n in range(40)]
    lines += ["98 0 8:1 / / rw - ext4 /dev/a rw", "99 0 0:99 / /live rw - nfs4 livefiler:/x rw"]
    root = machine({"/proc/self/mountinfo": "\n".join(lines)})
    release, asked = threading.Event(), []

    def statvfs(path: str) -> os.statvfs_result:
        asked.append(path)
        if path.startswith("/dead"):
            release.wait(120)
        return space(1000, 400)

    found = await disks.read_disks(root, statvfs=statvfs)
    release.set()
    assert {disk.mount for disk in found if disk.free_mib == 400} == {"/", "/live"}
    assert sum(path.startswith("/dead") for path in asked) == 1


async def test_this_machine():
    found = await disks.read_disks(Root(), ["/"])
    [top] = [disk for disk in found if disk.mount == "/"]
    assert top.total_mib >= top.free_mib > 0
    assert top.holds_weights


def test_disk_pressure_is_a_warning():
    full = Disk("/", "ext4", "local", 100_000, 4_000)
    [warning] = warnings.disks([full])
    assert "/ has 3.9 GiB free of 98 GiB (4%)" in warning
    assert list(warnings.disks([Disk("/m", "xfs", "local", 100_000, 9_000, holds_weights=True)]))
    assert not list(warnings.disks([Disk("/boot", "xfs", "local", 1_000, 1)]))
    assert not list(warnings.disks([Disk("/", "nfs", "shared", 1_000, 1), Disk("/", "x", "local")]))
