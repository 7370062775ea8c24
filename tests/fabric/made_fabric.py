"""A fabric made by hand and printed as the tool prints it: for tests without captures."""

from __future__ import annotations

from dataclasses import dataclass, field


def guid(number: int) -> str:
    return f"{0xA088C20300000000 + number:016x}"


@dataclass
class Made:
    """Devices by name, cables between (name, port); `text` prints all of it."""

    devices: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """Name -> letter, GUID, description."""
    cables: list[tuple[tuple[str, int], tuple[str, int], str]] = field(default_factory=list)
    systems: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, letter: str, description: str | None = None) -> None:
        number = 16 * (len(self.devices) + 1)
        self.devices[name] = (letter, guid(number), name if description is None else description)

    def cable(self, one: tuple[str, int], other: tuple[str, int], rate: str = "4xNDR") -> None:
        self.cables.append((one, other, rate))

    def guid(self, name: str) -> str:
        return self.devices[name][1]

    def port_guid(self, name: str) -> str:
        return f"{int(self.guid(name), 16) + 1:016x}"

    def stanzas(self, leave_out: tuple[str, ...] = ()) -> list[str]:
        return [self.stanza(name) for name in self.devices if name not in leave_out]

    def text(self, leave_out: tuple[str, ...] = ()) -> str:
        head = "#\n# Topology file: generated on Sun Nov 29 14:25:22 2026\n#\n"
        return head + "\n" + "\n".join(self.stanzas(leave_out))

    def stanza(self, name: str) -> str:
        letter, own, description = self.devices[name]
        word = {"S": "switch", "H": "ca", "R": "rt"}[letter]
        short, system = f"{int(own, 16):x}", self.systems.get(name, own)
        lines = ["vendid=0x2c9", "devid=0x1021", f"sysimgguid=0x{int(system, 16):x}"]
        lines.append(f"{word}guid=0x{short}" + (f"({short})" if letter == "S" else ""))
        title = {"S": "Switch", "H": "Ca", "R": "Rt"}[letter]
        tail = " enhanced port 0 lid 7 lmc 0" if letter == "S" else ""
        lines.append(f'{title}\t64 "{letter}-{own}"\t\t# "{description}"{tail}')
        ends = [(a, b, rate) for a, b, rate in self.cables if a[0] == name]
        ends += [(b, a, rate) for a, b, rate in self.cables if b[0] == name]
        lines += [self._port(mine[1], letter, name, other, rate) for mine, other, rate in ends]
        return "\n".join(lines) + "\n"

    def _port(self, number: int, mine: str, name: str, other: tuple[str, int], rate: str) -> str:
        letter, own, description = self.devices[other[0]]
        local = f"({self.port_guid(name)}) " if mine != "S" else ""
        remote = f"({self.port_guid(other[0])}) " if letter != "S" else ""
        lid = "lid 3 lmc 0 " if mine != "S" else ""
        return (
            f'[{number}]{local}\t"{letter}-{own}"[{other[1]}]{remote}\t\t'
            f'# {lid}"{description}" lid 9 {rate}'
        )


def by_rails(hosts: int = 4, rails: int = 2, spines: int = 2) -> Made:
    """`node1 mlx5_0` ... on `leaf0` ..., each leaf on each spine by one cable."""
    made = Made()
    for s in range(spines):
        made.add(f"spine{s}", "S", f"MF0;spine{s}:MQM9700/U1")
    for r in range(rails):
        made.add(f"leaf{r}", "S", f"MF0;leaf{r}:MQM9700/U1")
        for s in range(spines):
            made.cable((f"leaf{r}", 60 + s), (f"spine{s}", r + 1))
    for h in range(1, hosts + 1):
        for r in range(rails):
            made.add(f"node{h} mlx5_{r}", "H")
            made.cable((f"node{h} mlx5_{r}", 1), (f"leaf{r}", h))
    return made


def without(made: Made, name: str) -> Made:
    """The same fabric after the device and its cables are gone."""
    made.devices.pop(name)
    made.cables = [c for c in made.cables if name not in (c[0][0], c[1][0])]
    return made
