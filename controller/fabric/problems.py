"""What is wrong with a fabric, in sentences for people: each says what, how many, which.

Pure. Called by whoever answers for a fabric, with the graph of the last scan and what the agents
say now. "Usual" is always the majority among things of one kind, never a number of ours: a fabric
of older cards is not wrong, one slow cable among fast ones is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

from controller.fabric.ibnetdiscover import LANES
from controller.fabric.names import hca_label, series
from controller.fabric.rates import rate_word, slow_links

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from controller.fabric.model import CaPort, Graph, Host, Link
    from controller.fabric.rates import Usual

T = TypeVar("T")

NAMED: Final = 12
"""How many names a sentence lists before it counts the rest."""
SERIES: Final = 3
"""So many alike are needed before one of them can be unusual."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. `code` is stable, `text` is for people, `count` is how many things have it."""

    code: str
    text: str
    count: int


@dataclass(frozen=True, slots=True)
class LivePort:
    """What an agent says now of a port that belongs to this fabric; keyed by its port GUID."""

    node: str
    hca: str
    state: str | None = None
    """ACTIVE, INIT, ARMED, DOWN."""
    phys_state: str | None = None
    gbps: float | None = None


def problems(graph: Graph, live: Mapping[str, LivePort]) -> tuple[Problem, ...]:
    """All findings, worst kinds first. `live` may be empty; it must hold this fabric's ports only.

    A list of devices (`-l`) knows of no links, so only what it does say is judged.
    """
    title = _titles(graph)
    found: list[Iterable[Problem]] = [_duplicates(graph), _shared(graph)]
    if graph.links_known:
        found += [
            _slow(graph, title),
            _one_lane(graph, title),
            _one_end(graph, title),
            _few_ports(graph),
            _few_uplinks(graph),
            _wrong_rail(graph, title),
            _uncabled(graph),
            _no_hosts(graph),
            _against_agents(graph, live, title),
            _unlisted(graph, title),
        ]
    return tuple(chain(*found, _unmatched(graph)))


def _slow(graph: Graph, title: Mapping[str, str]) -> Iterator[Problem]:
    by_usual: dict[tuple[str, Usual], list[Link]] = {}
    for i, usual in slow_links(graph).items():
        by_usual.setdefault((graph.links[i].kind, usual), []).append(graph.links[i])
    for (kind, usual), links in sorted(by_usual.items(), key=lambda e: (e[0][0], e[0][1].gbps)):
        where = "between a host and a leaf" if kind == "host" else "between switches"
        told = _listed(
            [f"{_link(link, title)} at {_gbps(link.gbps)} ({rate_word(link)})" for link in links]
        )
        yield Problem(
            "slow_link",
            f"{counted(len(links), 'link')} {where} slower than the usual {_gbps(usual.gbps)}"
            f" ({usual.word}): {told}; reseat or replace the cable",
            len(links),
        )


def _one_lane(graph: Graph, title: Mapping[str, str]) -> Iterator[Problem]:
    """One lane is never meant on these cables, and all links of a kind may be so."""
    slow = slow_links(graph)
    links = [
        link
        for i, link in enumerate(graph.links)
        if i not in slow and link.kind in {"host", "trunk", "direct"} and _narrow(link)
    ]
    if links:
        told = _listed([f"{_link(link, title)} ({rate_word(link)})" for link in links])
        yield Problem(
            "narrow_link",
            f"{counted(len(links), 'link')} with one lane of four: {told};"
            " reseat or replace the cable",
            len(links),
        )


def _narrow(link: Link) -> bool:
    return LANES.get(link.width or "") == 1


def _one_end(graph: Graph, title: Mapping[str, str]) -> Iterator[Problem]:
    unlisted = set(graph.unlisted) | set(graph.aggregation)
    links = [k for k in graph.links if k.ends == 1 and not {k.a, k.b} & unlisted]
    if links:
        yield Problem(
            "one_end",
            f"{counted(len(links), 'link')} listed by one end only:"
            f" {_listed([_link(link, title) for link in links])};"
            " the scan was cut short or the cabling changed under it: scan again",
            len(links),
        )


def _few_ports(graph: Graph) -> Iterator[Problem]:
    """Hosts with fewer cabled ports than most of their series, grouped by what they lack."""
    for name, members in _series(graph.hosts):
        counts = {host.name: sum(p.peer is not None for p in host.ports) for host in members}
        usual = _usual(counts.values())
        slots = Counter(slot for host in members for slot in _slots(host))
        spelled = Counter(pair for host in members for pair in _slots(host).items())
        called = {slot: hca for (slot, hca), _ in reversed(spelled.most_common())}
        lacking: dict[tuple[int, frozenset[str]], list[str]] = {}
        for host in members:
            if usual is not None and counts[host.name] < usual:
                expected = {slot for slot in slots if 2 * slots[slot] > len(members)}
                missing = frozenset(called[slot] for slot in expected - set(_slots(host)))
                lacking.setdefault((counts[host.name], missing), []).append(host.name)
        for (count, missing), hosts in sorted(lacking.items(), key=lambda e: e[1]):
            without = f", without {', '.join(sorted(missing))}" if missing else ""
            yield Problem(
                "few_ports",
                f"{len(hosts)} of {len(members)} hosts like {name} with {counted(count, 'port')}"
                f" in the fabric where {usual} are usual{without}: {_listed(hosts)}",
                len(hosts),
            )


def _slots(host: Host) -> dict[tuple[int, str], str]:
    """The HCAs of a host that have a link: what is the same on its siblings -> the name here."""
    return {
        label: port.hca
        for port in host.ports
        if port.hca and port.peer is not None and (label := hca_label(port.hca))
    }


def _few_uplinks(graph: Graph) -> Iterator[Problem]:
    grouped: dict[str, list[tuple[str, int]]] = {}
    for leaf in graph.leaves:
        if leaf.listed:
            grouped.setdefault(series(leaf.name), []).append((leaf.name, leaf.uplinks))
    for members in grouped.values():
        usual = _usual(uplinks for _, uplinks in members) if len(members) >= SERIES else None
        few = [(name, n) for name, n in members if usual is not None and n < usual]
        if few:
            yield Problem(
                "few_uplinks",
                f"{len(few)} of {len(members)} leaves like {members[0][0]} with fewer than the"
                f" usual {usual} uplinks: {_listed([f'{name} has {n}' for name, n in few])}",
                len(few),
            )


def _wrong_rail(graph: Graph, title: Mapping[str, str]) -> Iterator[Problem]:
    crossed = [
        f"{_port(host, port)} is on rail {port.rail} ({title.get(port.leaf or '', port.leaf)}"
        f" port {port.leaf_port}), not on rail {port.rail_of_hca}"
        for host in graph.hosts
        if _is_in_series(graph, host)
        for port in host.ports
        if port.rail and port.rail_of_hca and port.rail != port.rail_of_hca
    ]
    if crossed:
        yield Problem(
            "wrong_rail",
            f"{counted(len(crossed), 'cable')} on another rail than the same HCA of the other"
            f" hosts: {_listed(crossed)}; swap the cables",
            len(crossed),
        )


def _is_in_series(graph: Graph, host: Host) -> bool:
    """Whether the host has all the ports that a rail-cabled host has: others go where they like."""
    rails = len(graph.rails or ())
    return host.named and sum(port.rail_of_hca is not None for port in host.ports) * 2 > rails


def _uncabled(graph: Graph) -> Iterator[Problem]:
    ports = [_port(host, port) for host, port in graph.uncabled]
    if ports:
        yield Problem(
            "uncabled",
            f"{counted(len(ports), 'adapter port')} without a link: {_listed(ports)};"
            " no cable, or the other end is off",
            len(ports),
        )


def _no_hosts(graph: Graph) -> Iterator[Problem]:
    names = [switch.name for switch in graph.without_hosts]
    if names:
        yield Problem(
            "no_hosts",
            f"{counted(len(names), 'switch', 'switches')} from which no host can be reached:"
            f" {_listed(names)}",
            len(names),
        )


def _duplicates(graph: Graph) -> Iterator[Problem]:
    if graph.duplicates:
        yield Problem(
            "duplicate_guid",
            f"{counted(len(graph.duplicates), 'GUID')} claimed by two devices:"
            f" {_listed(graph.duplicates)}; a cloned firmware, or two scans in one text",
            len(graph.duplicates),
        )


def _shared(graph: Graph) -> Iterator[Problem]:
    told = [f"'{text}' on {count}" for text, count in graph.shared_descriptions]
    if told:
        yield Problem(
            "duplicate_description",
            f"{counted(len(told), 'description')} on more than one device: {_listed(told)};"
            " such adapters cannot be told apart by name",
            len(told),
        )


def _against_agents(
    graph: Graph, live: Mapping[str, LivePort], title: Mapping[str, str]
) -> Iterator[Problem]:
    """The scan is a picture of the past, the agents' rows are of now: where do they differ?"""
    scanned = {guid: (host, p) for host in graph.hosts for p in host.ports for guid in _guids(p)}
    down, lost = [], []
    for guid, now in sorted(live.items(), key=lambda e: (e[1].node, e[1].hca, e[0])):
        _, port = scanned.get(guid, (None, None))
        cabled = port is not None and port.peer is not None
        words = f"{now.node} {now.hca}"
        if now.state == "DOWN" and port is not None and port.peer is not None:
            seen = f"{now.state}, {now.phys_state}" if now.phys_state else now.state
            down.append(f"{words} ({seen}), in the scan at {title.get(port.peer, port.peer)}")
        elif now.state == "ACTIVE" and not cabled:
            lost.append(words)
    if down:
        yield Problem(
            "down_now",
            f"{counted(len(down), 'port')} down for the agent but linked in the scan:"
            f" {_listed(down)}; the link was lost since, or the scan is old: scan again",
            len(down),
        )
    if lost:
        yield Problem(
            "not_in_scan",
            f"{counted(len(lost), 'port')} active for the agent but not linked in the scan:"
            f" {_listed(lost)}; the scan is old or belongs to another fabric: scan again",
            len(lost),
        )


def _unlisted(graph: Graph, title: Mapping[str, str]) -> Iterator[Problem]:
    if graph.unlisted:
        yield Problem(
            "unlisted",
            f"{counted(len(graph.unlisted), 'device')} known from the other end of a cable only:"
            f" {_listed([title.get(guid, guid) for guid in graph.unlisted])};"
            " the scan was cut short or could not ask",
            len(graph.unlisted),
        )


def _unmatched(graph: Graph) -> Iterator[Problem]:
    hosts = [host.name for host in graph.hosts if host.named and host.node is None]
    if hosts:
        yield Problem(
            "unmatched_hosts",
            f"{len(hosts)} of {counted(sum(h.named for h in graph.hosts), 'host')} with no agent"
            f" that reported their GUIDs, named by description: {_listed(hosts)}",
            len(hosts),
        )
    texts = Counter(h.ports[0].description.strip() for h in graph.hosts if not h.named and h.ports)
    if texts:
        told = [f"'{text}' ({n})" for text, n in sorted(texts.items(), key=lambda e: (-e[1], e[0]))]
        yield Problem(
            "unnamed_adapters",
            f"{counted(texts.total(), 'adapter')} of which nothing tells the host:"
            f" described as {_listed(told)}; install the agent there or set the node description",
            texts.total(),
        )


def _titles(graph: Graph) -> dict[str, str]:
    """GUID -> what to call it: a switch's name, or the host and HCA of an adapter."""
    shared = Counter(switch.name for switch in graph.switches)
    names = {
        s.guid: s.name if shared[s.name] == 1 else f"{s.name} ({s.guid})" for s in graph.switches
    }
    for host in graph.hosts:
        for port in host.ports:
            names.setdefault(port.device, _port(host, port))
    return names


def _port(host: Host, port: CaPort) -> str:
    if not host.named:
        return f"{port.description.strip() or 'adapter'} ({port.guid})"
    number = f" port {port.number}" if port.number > 1 else ""
    return f"{host.name} {port.hca or port.guid}{number}"


def _link(link: Link, title: Mapping[str, str]) -> str:
    one = title.get(link.a, link.a) + ("" if link.kind == "host" else f" port {link.a_port}")
    return f"{one} to {title.get(link.b, link.b)} port {link.b_port}"


def _guids(port: CaPort) -> set[str]:
    return {port.guid, port.device} if port.number <= 1 else {port.guid}


def _series(hosts: Iterable[Host]) -> Iterator[tuple[str, list[Host]]]:
    """Groups of hosts whose names differ in numbers only, large enough to speak of usual."""
    grouped: dict[str, list[Host]] = {}
    for host in hosts:
        if host.named:
            grouped.setdefault(series(host.name), []).append(host)
    for members in grouped.values():
        if len(members) >= SERIES:
            yield members[0].name, members


def _usual(values: Iterable[int]) -> int | None:
    """The most frequent value, the larger one where two are; None when no two are equal."""
    counts = Counter(values)
    if not counts:
        return None
    value, count = max(counts.items(), key=lambda item: (item[1], item[0]))
    return value if count > 1 else None


def _gbps(rate: float | None) -> str:
    return f"{rate:g} Gb/s" if rate is not None else "unknown speed"


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 leaf`, `2 leaves`; `many` where it is not the word with an s."""
    return f"1 {one}" if number == 1 else f"{number} {many or one + 's'}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
