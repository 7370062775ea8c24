"""`ops/bench router`: the router beside other gateways, on one rig, in one run.

The rig (a mock engine and a load generator in C, and a runner that starts gateways in turn) is no
part of this repository: `--rig` names its folder. llmgw runs as it does at work: keys from a real
Postgres, a budget above them, usage rows written to it, metrics and access log on. Other gateways
are those that the rig's `setup_peers.sh` installed into `--peers`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import psycopg

from ops.benchmarks import postgres, processes, report
from ops.benchmarks.growth import Growth, edges
from ops.benchmarks.router_bars import judge

ROOT = Path(__file__).resolve().parents[2]
RIG = ROOT.parent / "shared" / "tools" / "gwbench"
GATEWAY = """[llmgw]
cmd = ["{python}", "-m", "controller", "--role", "router", "--config", "@WORK@/llmgw.toml",
       "--listen", "127.0.0.1:@PORT@",
       "--endpoint", "e1=http://127.0.0.1:@ENGINE1@=@MODEL@",
       "--endpoint", "e2=http://127.0.0.1:@ENGINE2@=@MODEL@"]
files = ["llmgw.toml"]
workers = [1]
auth = "keys of Postgres, a budget above them"
"""
SETTINGS = 'log_level = "warning"\naccess_log = "@WORK@/access.log"\n'
MORE = {
    "s1000": ("1000", "2000", {"itl_ms": 20, "ttft_ms": 20}),
    "idle5000": ("5000", "2000", {"itl_ms": 50, "ttft_ms": 50}),
    "soak": ("400", "100", {"itl_ms": 20, "ttft_ms": 20}),
}
"""Name -> streams, tokens of each, what the engines are told."""
SOAK_S = "LLMGW_BENCH_SOAK_S"
STREAMED = [
    ("chunks/s", "chunks_s"),
    ("relay p50 us", "relay.p50"),
    ("relay p99 us", "relay.p99"),
    ("cpu s/1k chunks", "cpu_s_per_1k_chunks"),
    ("gw cpus", "cpus"),
    ("rss MB", "rss_mb"),
    ("errors", "errors"),
]


@click.command()
@click.option("--rig", type=click.Path(path_type=Path), default=RIG, help="Folder of the rig.")
@click.option("--peers", type=click.Path(path_type=Path), help="Where its peers are installed.")
@click.option("--only", default="llmgw:1,nginx:1", show_default=True, help="NAME:WORKERS, ...")
@click.option("--scenarios", default="ns1,ns32,s40,s400,s1000,cancel,cancel-ns", show_default=True,
              help="The rig's; and s1000, idle5000, soak (whether memory grows).")  # fmt: skip
@click.option("--rounds", default=3, show_default=True)
@click.option("--secs", default=5.0, show_default=True, help="Measured seconds of a scenario.")
@click.option("--soak", "soak_s", default=600.0, show_default=True, help="Seconds of the soak.")
@click.option(
    "--compiled/--plain",
    default=None,
    help="llmgw as ops/compile makes it (default if it can) or as it lies here.",
)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all figures here.")
def router(
    rig: Path, peers: Path | None, only: str, scenarios: str, rounds: int, secs: float,
    soak_s: float, compiled: bool | None, file: Path | None,
) -> None:  # fmt: skip
    """Requests a second, added latency, CPU of each request and chunk, time to cancel."""
    if not (rig / "run.py").exists():
        raise click.ClickException(f"no rig in {rig}: name its folder with --rig")
    compiled = _can_compile() if compiled is None else compiled
    with tempfile.TemporaryDirectory(prefix="llmgw-rig-") as folder, postgres.database(30) as base:
        copy = Path(folder) / "rig"
        shutil.copytree(rig, copy, copy_function=shutil.copyfile)
        subprocess.run(["make", "-s", "-C", str(copy)], check=True)
        _allow_key(base.server.url)
        (copy / "peers" / "llmgw.toml").write_text(SETTINGS)
        (copy / "llmgw.toml").write_text(GATEWAY.format(python=sys.executable))
        if compiled:
            _compile(Path(folder))
        out = Path(folder) / "results.json"
        words = ["--peers", str(copy / "llmgw.toml"), "--only", only, "--scenarios", scenarios]
        words += ["--rounds", str(rounds), "--secs", str(secs), "--out", str(out)]
        words += ["--root", str(peers or Path(folder))]
        os.environ["LLMGW_DATABASE_URL"] = base.controller_url
        os.environ[SOAK_S] = str(soak_s)
        with Growth(lambda command: "--role router" in command and "llmgw.toml" in command) as seen:
            argv = [sys.executable, __file__, str(copy / "run.py"), *words]
            status = subprocess.run(argv, check=False).returncode
        if status:
            raise click.ClickException(f"the rig ended with status {status}: it said why")
        found = json.loads(out.read_text()) | {"usage_rows": _rows(base.server.url)}
        found["memory_mib"] = seen.mib
    how = "--compiled" if compiled else "--plain"
    _show(found, f"ops/bench router {how} --only {only} --scenarios {scenarios}")
    if file is not None:
        file.write_text(json.dumps(found, indent=1))


def _can_compile() -> bool:
    """Says on stderr why not."""
    return subprocess.run([ROOT / "ops" / "compile", "--can"], check=False).returncode == 0


def _compile(folder: Path) -> None:
    """The processes that start from here on run the compiled router."""
    made = subprocess.run(
        [ROOT / "ops" / "compile", folder], check=True, stdout=subprocess.PIPE, text=True
    )
    library = folder / "library"
    zipfile.ZipFile(made.stdout.strip()).extractall(library)
    os.environ |= {"PYTHONPATH": str(library), "PYTHONSAFEPATH": "1"}


def _allow_key(url: str) -> None:
    """The key that the rig's load sends, in an organisation with a budget, and a price."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("select llmgw.scope_create_v1('bench', 'org', 'acme', null, null)")
        connection.execute(
            "insert into llmgw_core.api_key (id, name, hash, created_by, scope_id)"
            " select 'gwbench', 'bench', %s, 'bench', id from llmgw_core.scope where name = 'acme'",
            (sha256(b"sk-gwbench").digest(),),
        )
        connection.execute(
            "select llmgw_core.price_put('bench', 'mock-model', %s)",
            (json.dumps({"prompt": 150_000, "completion": 600_000}),),
        )
        connection.execute(
            "select llmgw.budget_put_v1('bench', 'acme', null, %s, 'month', null, null)", (10**15,)
        )


def _rows(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("select count(*) from llmgw_core.usage_event").fetchone()
    return int(row[0]) if row else 0


def _show(found: dict[str, Any], command: str) -> None:
    report.heading(command, processes.machine())
    for name, peer in found["peers"].items():
        print(f"{name}: {peer.get('version') or peer.get('error', '')} ({peer.get('auth', '')})")
    print(f"usage rows written: {found['usage_rows']}")
    grown = edges(found["memory_mib"])
    if grown is not None and any(one["scenario"] == "soak" for one in found["results"]):
        print(
            f"memory of llmgw, first and last tenth of the soak: {grown[0]:.0f}, {grown[1]:.0f} MiB"
        )
    for bar, value, holds in judge(found["results"]):
        print(f"{'holds' if holds else 'FAILS':5}  {bar}: {value}")


class _Patient:
    """`subprocess` with time for a soak."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, argv: list[str], **more: Any) -> Any:
        """With so much longer to end."""
        if "timeout" in more:
            more["timeout"] += float(os.environ[SOAK_S])
        return subprocess.run(argv, **more)  # noqa: PLW1510 (its caller says)


def _run_rig(argv: list[str]) -> None:
    """In a process of its own: the rig's runner with our scenarios beside its own."""
    program, *words = argv
    sys.path.insert(0, str(Path(program).parent))
    import run  # type: ignore[import-not-found]

    for name, (streams, tokens, engines) in MORE.items():
        load = ["stream", "--conns", streams, "--tokens", tokens, "--warmup", "5"]
        if name == "soak":
            load += ["--duration", os.environ[SOAK_S]]
        run.SCENARIOS[name] = (load, engines, STREAMED)
    _check_scenarios(words[words.index("--scenarios") + 1], {*run.SCENARIOS, "max"})
    run.subprocess = _Patient()  # the rig gives a load three minutes; a soak takes longer
    sys.argv = [program, *words]
    run.main()


def _check_scenarios(asked: str, known: set[str]) -> None:
    """Before the first is measured: the rig looks each up when its turn has come."""
    unknown = [name for name in asked.split(",") if name not in known]
    if unknown:
        names = ", ".join(sorted(known))
        sys.exit(f"no scenario {', '.join(unknown)} in this rig; --scenarios takes: {names}")


if __name__ == "__main__":
    _run_rig(sys.argv[1:])
