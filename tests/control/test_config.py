"""Settings: where they come from, what is refused and how it is said."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import BaseModel

from controller.__main__ import main
from controller.config import (
    BadConfig,
    Settings,
    child_environment,
    host_port,
    is_loopback,
    load,
    runtime_dir,
    shown,
)
from controller.endpoint import endpoint
from controller.reload import reloaded
from controller.route import router_config
from controller.router.config import StaticEndpoint
from tests.certificates import certificate

README = Path(__file__).parents[2] / "controller" / "README.md"
ENDPOINT = "a=http://10.0.0.7:8000=llama"
STATIC = f'endpoints = ["{ENDPOINT}"]\n'


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """Nothing of the machine's own settings."""
    for name in (*Settings.model_fields, "database_url"):
        monkeypatch.delenv(f"LLMGW_{name.upper()}", raising=False)
    return monkeypatch


@pytest.fixture
def of(tmp_path):
    """Settings of a file's text and flags."""

    def read(text: str = STATIC, **flags: Any) -> Settings:
        path = tmp_path / "llmgw.toml"
        path.write_text(text)
        return load(path, flags)

    return read


def fault(of, text: str = STATIC, **flags: Any) -> str:
    with pytest.raises(BadConfig) as caught:
        of(text, **flags)
    return str(caught.value)


def test_flags_win_over_environment_over_file(of, bare):
    text = STATIC + 'listen = ":1"\nworkers = 2\nlog_level = "debug"\n'
    assert (of(text).listen, of(text).workers) == (":1", 2)
    bare.setenv("LLMGW_LISTEN", ":2")
    bare.setenv("LLMGW_WORKERS", "3")
    assert (of(text).listen, of(text).workers) == (":2", 3)
    found = of(text, listen=":3", workers=None, endpoints=())
    assert (found.listen, found.workers, found.log_level) == (":3", 3, "debug")


def test_defaults_are_the_contracts(of):
    found = of()
    assert host_port(found.listen) == ("0.0.0.0", 8080)
    assert found.admin_listen == "127.0.0.1:9090"
    assert (found.role, found.drain) == ("all", 30)


def test_durations_and_sizes_are_written_with_units_and_reach_the_router(of, tmp_path):
    found = of(
        STATIC
        + 'drain = "5m"\n[timeouts]\nidle = "90s"\n[limits]\nbody = "1GiB"\nconnections = 7\n'
    )
    config = router_config(found, tmp_path, 1, "me")
    assert (config.timeouts.drain_s, config.timeouts.idle_s) == (300, 90)
    assert (config.limits.body_bytes, config.limits.connections) == (2**30, 7)
    assert config.stats_socket == str(tmp_path / "router-1.sock")
    assert "not a size" in fault(of, STATIC + "[limits]\nbody = 5\n")
    assert "not a duration" in fault(of, STATIC + 'drain = "soon"\n')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wokers = 2\n", "unknown field 'wokers', did you mean 'workers'?"),
        ("[timeouts]\nidel = 1\n", "timeouts: unknown field 'idel', did you mean 'idle'?"),
        ('[database]\nurl = "x"\npoolsize = 3\n', "did you mean 'pool_size'?"),
        ("workers = 0\n", "workers: must be greater than or equal to 1, not '0'"),
        ('listen = "8080"\n', '\'8080\' is not host:port, as "0.0.0.0:8080" or ":8080"'),
        ('role = "router "\n', "role: must be 'all', 'control' or 'router'"),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_right_name(of, text, said):
    assert said in fault(of, text if "[" not in text else STATIC + text)


def test_a_file_that_cannot_be_read_or_parsed(of, tmp_path):
    assert "is no TOML" in fault(of, "listen = :8080")
    with pytest.raises(BadConfig, match=r"cannot be read: No such file"):
        load(tmp_path / "nowhere.toml", {})
    latin = tmp_path / "latin.toml"
    latin.write_bytes(STATIC.encode() + b"# f\xfcr uns\n")
    with pytest.raises(BadConfig, match=r"latin\.toml is no UTF-8: "):
        load(latin, {})


def test_a_runtime_folder_that_no_socket_can_be_in_is_refused(of, tmp_path):
    long = tmp_path / ("x" * 100)
    assert f"runtime_dir {long} is too long for sockets" in fault(of, runtime_dir=long)
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "run"
    told = f"runtime_dir {inside} cannot be used: {tmp_path}/file is no folder"
    assert told in fault(of, runtime_dir=inside)
    assert of(runtime_dir=tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()  # --check-config leaves nothing behind


@pytest.mark.parametrize("name", ["connect", "headers", "first_token", "idle", "total"])
def test_a_deadline_that_no_request_could_keep_is_refused(of, name):
    told = fault(of, STATIC + f'[timeouts]\n{name} = "0s"\n')
    assert told == f"timeouts: {name}: must be greater than 0, not '0.0'"


@pytest.mark.parametrize("secret", ["", " ", "sk-x\\n", " sk-x", "x" * 501])
def test_a_secret_that_lets_all_in_or_nobody_is_refused(of, secret):
    def keys(secret: str) -> str:
        return STATIC + f'[[keys]]\nid = "k"\nsecret = "{secret}"\n'

    assert "keys number 1: secret: it must have 1 to 500 bytes" in fault(of, keys(secret))
    assert of(keys("x" * 500))


def test_nothing_to_serve_is_exit_2():
    done = CliRunner().invoke(main, [])
    assert done.exit_code == 2
    assert "nothing to serve: name a database (LLMGW_DATABASE_URL" in done.stderr


def test_the_databases_url_comes_from_the_environment_and_other_settings_from_the_file(of, bare):
    bare.setenv("LLMGW_DATABASE_URL", "postgresql://from-env")
    found = of("[database]\npool_size = 9\n").database
    assert found is not None
    assert (found.url.get_secret_value(), found.pool_size) == ("postgresql://from-env", 9)
    # A string in place of the table is a fault, not a crash, and may hold a password.
    for text in (
        'database = "postgresql://u:hunter2@h/d"\n',
        '[database]\nurl = "mysql://hunter2"\n',
    ):
        bare.delenv("LLMGW_DATABASE_URL", raising=False)
        assert "hunter2" not in fault(of, text)
    for url in ("", "mysql://h/d", "h:5432"):
        bare.setenv("LLMGW_DATABASE_URL", url)
        assert "database: url: it does not begin with postgresql://" in fault(of)


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    """A token file, and a certificate with its key."""
    names = ("admin_token_file", "admin_tls_cert", "admin_tls_key")
    found = {name: tmp_path / name for name in names}
    found["admin_token_file"].write_text("a-token-of-some-length  me\n")
    certificate(found["admin_tls_cert"], found["admin_tls_key"])
    return found


WIDE = {"admin_listen": "0.0.0.0:9090"}


def test_an_admin_port_that_others_can_reach_needs_token_and_tls(of, files):
    token = {"admin_token_file": files["admin_token_file"]}
    assert "set admin_token_file" in fault(of, **WIDE)
    assert "set admin_token_file" in fault(of, **WIDE, insecure=True)
    assert "would send tokens in clear text" in fault(of, **WIDE, **token)
    assert of(**WIDE, **token, insecure=True).insecure
    assert of(**WIDE, **files)
    # A router opens no admin port.
    assert of(**WIDE, role="router")


def test_files_of_the_admin_port_are_judged_before_it_opens(of, files, tmp_path):
    cert, key, token = (files[f"admin_{name}"] for name in ("tls_cert", "tls_key", "token_file"))
    assert "one of them is missing" in fault(of, admin_tls_cert=cert)
    assert "in PEM" in fault(of, admin_tls_cert=key, admin_tls_key=cert)
    gone = tmp_path / "gone"
    assert f"admin_tls_key {gone} cannot be read: No such file" in fault(
        of, admin_tls_cert=cert, admin_tls_key=gone
    )
    token.write_text("short")
    assert "line 1: a token has at least 16 characters" in fault(of, admin_token_file=token)
    token.write_text("# nobody yet")
    assert "holds no token" in fault(of, admin_token_file=token)


def test_the_client_ports_certificate_is_judged_as_the_admin_ports(of, files, tmp_path):
    cert, key = files["admin_tls_cert"], files["admin_tls_key"]
    assert "tls_cert and tls_key go together" in fault(of, tls_cert=cert)
    assert f"tls_cert {key} and tls_key {cert} are no certificate" in fault(
        of, tls_cert=key, tls_key=cert
    )
    locked = tmp_path / "locked"
    subprocess.run(
        ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", key, "-out", locked],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    assert "in PEM" in fault(of, tls_cert=cert, tls_key=locked)  # and nobody is asked for the word
    assert of(tls_cert=cert, tls_key=cert, role="control")  # a control process opens no such port
    config = router_config(of(tls_cert=cert, tls_key=key), tmp_path, 0, "me")
    assert (config.tls_cert, config.tls_key) == (cert, key)


def test_the_access_log_is_off_or_has_a_place_and_a_share(of, tmp_path):
    def routed(text: str) -> tuple[str | None, float]:
        config = router_config(of(STATIC + text), tmp_path, 0, "me")
        return config.access_log, config.access_log_sample

    assert routed("") == (None, 1.0)
    assert routed('access_log = "errors"\n') == ("stdout", 0.0)
    assert routed('access_log = "stdout"\naccess_log_sample = 0.1\n') == ("stdout", 0.1)
    assert routed(f'access_log = "{tmp_path}/x"\n') == (f"{tmp_path}/x", 1.0)
    assert "a path from /" in fault(of, STATIC + 'access_log = "on"\n')
    assert "less than or equal to 1" in fault(of, STATIC + "access_log_sample = 2.0\n")


def test_an_access_log_that_could_not_be_written_is_refused_at_start(of, tmp_path, bare):
    def told(path: Path) -> str:
        return fault(of, STATIC + f'access_log = "{path}"\n')

    place = tmp_path / "gone" / "access.log"
    assert told(place) == (
        f"access_log {place} cannot be written, there is no folder {place.parent}: make it, owned "
        'by the user of llmgw-controller; or log to "stdout"'
    )
    assert "it is a folder: name a file in it" in told(tmp_path)
    assert "cannot be written: File name too long" in told(tmp_path / ("x" * 300))
    place.parent.mkdir()
    text = STATIC + f'access_log = "{place}"\n'
    assert of(text).access_log == str(place)
    assert not place.exists()  # --check-config leaves nothing behind
    place.touch()
    assert of(text)
    bare.setattr("os.access", lambda *_: False)  # root may write everywhere
    assert "this user may not write the file: give it to" in told(place)
    assert f"may not write the folder {tmp_path}: " in told(tmp_path / "other.log")
    # A control process writes none.
    assert of(STATIC + 'access_log = "/gone/access.log"\n', role="control")


def test_keys_of_endpoints_are_files_that_are_judged_at_start(of, tmp_path):
    key = tmp_path / "key"

    def told(name: str = "a", path: Path = key) -> str:
        return fault(of, STATIC + f'[endpoint_keys]\n{name} = "{path}"\n')

    gone = tmp_path / "gone"
    assert told(path=gone) == f"endpoint_keys: a: {gone} cannot be read: No such file or directory"
    assert "Is a directory" in told(path=tmp_path)
    for text, why in (("\n", "is empty"), ("sk-secret\nsk-2\n", "one line of printable ASCII")):
        key.write_text(text)
        assert f"endpoint_keys: a: {key} {why}" in told().replace(
            "must hold the engine's key alone: ", ""
        )
        assert "sk-" not in told()
    key.write_text("sk-secret\n")
    assert told("b") == "endpoint_keys: 'b' is no id of endpoints, which are: a"
    text = STATIC + f'[endpoint_keys]\na = "{key}"\n'
    (fixed,) = router_config(of(text), tmp_path, 0, "me").endpoints
    assert (fixed.id, fixed.key_file) == ("a", key)
    assert "sk-secret" not in repr(of(text)) + str(shown(of(text)))
    assert of(text.replace(str(key), str(gone)), role="control")  # which asks no engine


def test_rows_that_wait_are_kept_where_systemd_says_unless_a_setting_does(of, bare, tmp_path):
    def spool(settings):
        return router_config(settings, tmp_path, 0, "x").spool

    assert spool(of()) == tmp_path / "spool"
    bare.setenv("STATE_DIRECTORY", "/var/lib/llmgw-controller:/var/lib/more")
    assert spool(of()) == Path("/var/lib/llmgw-controller/spool")
    assert spool(of(STATIC + 'state_dir = "/srv/llmgw"\n')) == Path("/srv/llmgw/spool")
    bare.setenv("LLMGW_STATE_DIR", "/srv/other")
    assert spool(of()) == Path("/srv/other/spool")
    bounded = of(STATIC + '[limits]\nspool = "32MiB"\n')
    assert router_config(bounded, tmp_path, 0, "x").limits.spool_bytes == 32 << 20
    assert "greater than or equal to 16" in fault(of, STATIC + '[limits]\nspool = "1MiB"\n')


def test_two_static_keys_cannot_have_one_secret(of):
    """Requests with it were the later key's, and nobody was told."""
    first, other = '[[keys]]\nid = "a"\nsecret = "{}"\n', '[[keys]]\nid = "b"\nsecret = "{}"\n'
    told = fault(of, STATIC + first.format("s3cret") + other.format("s3cret"))
    assert "'a' and 'b' have the same secret: give each its own" in told
    assert "s3cret" not in told
    both = of(STATIC + first.format("s1") + first.format("s2") + other.format("s3"))
    assert [key.id for key in both.keys] == ["a", "a", "b"]  # one that is being changed has two


def test_a_reload_takes_what_can_change_and_names_the_rest(of):
    now = of()
    in_force, later = reloaded(now, of(STATIC + 'log_level = "debug"\nworkers = 5\ndrain = "1m"\n'))
    assert (in_force.log_level, in_force.workers, in_force.drain) == ("debug", 1, 30)
    assert later == ["workers", "drain"]
    assert reloaded(now, of()) == (now, [])


def test_check_config_prints_everything_and_no_secret(of, tmp_path, bare):
    path = tmp_path / "llmgw.toml"
    path.write_text(
        'migrate_url = "postgresql://m:hunter3@h/d"\n[database]\nurl = "postgresql://u:hunter2@h/d"\n'
        '[[keys]]\nid = "k"\nsecret = "hunter4"\n'
    )
    done = CliRunner().invoke(main, ["--config", str(path), "--check-config", "--workers", "3"])
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert (document["workers"], document["keys"][0]["id"]) == (3, "k")
    assert "hunter" not in done.output
    assert "hunter" not in repr(load(path, {})) + str(shown(load(path, {})))


def models_of(form: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [
        value.default_factory and type(value.default_factory())  # type: ignore[call-arg, misc]
        for value in form.model_fields.values()
    ]
    return [form, *(m for m in inner if isinstance(m, type) and issubclass(m, BaseModel))]


@pytest.mark.parametrize("form", models_of(Settings), ids=lambda form: form.__name__)
def test_every_setting_says_what_it_is_for(form):
    assert {name: f.description for name, f in form.model_fields.items() if not f.description} == {}


def test_an_id_of_two_endpoints_is_refused(of):
    with pytest.raises(BadConfig, match="the id 'a' is used twice"):
        of('endpoints = ["a=http://h:1=m", "a=http://h:2=m"]\n')


def test_endpoints():
    found = endpoint("a=http://10.0.0.7:8000=llama,big")
    assert (found.id, found.url, found.models) == ("a", "http://10.0.0.7:8000", ("llama", "big"))
    # A path in the URL may hold "=" too.
    assert endpoint("a=http://h/x=1=m").url == "http://h/x=1"
    assert endpoint("a=http://h=m,n,m").models == ("m", "n")
    assert found.depth is None
    assert endpoint("a=http://h:1=m,n;depth=32") == StaticEndpoint(
        "a", "http://h:1", ("m", "n"), 32
    )
    for bad in ("0", "-1", "x", "", "1.5", "9" * 10):
        with pytest.raises(ValueError, match="how many requests it gets at once"):
            endpoint(f"a=http://h=m;depth={bad}")
    for bad in ("a", "a=b", "=http://h=m", "a=http://h=", "a=ftp://h=m"):
        with pytest.raises(ValueError, match="is not id=URL=model"):
            endpoint(bad)


def test_a_fixed_replicas_depth_is_shared_by_the_workers(of, tmp_path):
    found = of(f'endpoints = ["{ENDPOINT};depth=5", "b=http://h=m"]\nworkers = 2\n')
    shared = router_config(found, tmp_path, 0, "name").endpoints
    assert [fixed.depth for fixed in shared] == [3, None]


def test_addresses():
    assert host_port("[::1]:80") == ("::1", 80)
    assert host_port(":80") == ("0.0.0.0", 80)
    assert [is_loopback(h) for h in ("127.0.0.9", "::1", "localhost", "0.0.0.0", "h")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    for bad in ("80", "h:", "h:99999", "h:-1", ""):
        with pytest.raises(ValueError, match="is not host:port"):
            host_port(bad)


def test_a_made_runtime_folder_is_private_and_goes_again(of, tmp_path):
    with runtime_dir(of()) as made:
        assert made.stat().st_mode & 0o777 == 0o700
        (made / "router-0.sock").touch()
    assert not made.exists()
    kept = of(STATIC + f'runtime_dir = "{tmp_path / "run"}"\n')
    with runtime_dir(kept) as given_:
        assert child_environment(given_)["LLMGW_RUNTIME_DIR"] == str(tmp_path / "run")
    assert given_.is_dir()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=5), SCALARS)


def refusal(document: dict[str, Any]) -> str | None:
    """Why these settings are refused, or None when they are taken."""
    try:
        load(None, document)
    except BadConfig as error:
        return str(error)
    return None


@examples(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(st.dictionaries(st.sampled_from(sorted(Settings.model_fields)), VALUES, max_size=5))
def test_any_value_is_taken_or_refused_in_words(document):
    assert refusal(document) != ""


def test_the_readme_names_settings_that_exist(of):
    blocks = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        assert of(block)


def test_A37_origins_are_a_list_or_every_one_and_reach_the_router(of, bare, tmp_path):
    text = STATIC + 'cors = ["https://a.example", "http://b.example:3000"]\n'
    config = router_config(of(text), tmp_path, 0, "me")
    assert config.cors == {"https://a.example", "http://b.example:3000"}
    assert of().cors == ()
    assert "is no origin" in fault(of, STATIC + 'cors = ["a.example"]\n')
    assert "is no origin" in fault(of, STATIC + 'cors = ["https://a.example/"]\n')
    bare.setenv("LLMGW_CORS", "*")
    assert of().cors == ("*",)


def test_an_endpoint_that_nobody_asks_for_its_models_must_name_them(of):
    never = '[replicas]\nhealth = "0s"\n'
    assert of(STATIC + never).replicas.health == 0
    told = fault(of, 'endpoints = ["a=http://h:1=m", "b=http://h:2"]\n' + never)
    assert told.startswith("endpoints: 'b=http://h:2' names no model, and with replicas.health = 0")


def test_an_alias_or_fallback_of_a_model_that_nobody_has_is_refused(of, bare):
    known = STATIC + 'aliases = { chat = "llama" }\n'
    two = 'endpoints = ["a=http://h:1=llama,small"]\naliases = { chat = "small" }\n'
    assert of(two + 'fallbacks = { llama = ["chat"] }\n').fallbacks == {"llama": ("chat",)}
    told = fault(of, STATIC + 'fallbacks = { llama = ["other"] }\n')
    serve = "fixed replicas (endpoints) serve llama"
    assert told == f"fallbacks: 'llama' falls back to 'other', but {serve}"
    of_a_stranger = STATIC + 'fallbacks = { other = ["llama"] }\n'
    assert "'other' is no model of ours" in fault(of, of_a_stranger)
    assert "'chat' means 'other', but" in fault(of, STATIC + 'aliases = { chat = "other" }\n')
    own = fault(of, STATIC + 'aliases = { llama = "llama" }\n')
    assert own == "aliases: 'llama' is a model's own name: choose another"
    for other in ("llama", "chat"):
        told = fault(of, known + f'fallbacks = {{ llama = ["{other}"] }}\n')
        assert told == "fallbacks: 'llama' falls back to itself: name another model"
    assert of(
        'endpoints = ["a=http://h:1"]\n' + of_a_stranger.removeprefix(STATIC)
    )  # it may be there
    bare.setenv("LLMGW_DATABASE_URL", "postgresql://h/d")
    assert of(STATIC + 'fallbacks = { llama = ["other"] }\n')  # it may be in the catalog
    assert "'other' is no model of ours" in fault(of, of_a_stranger)
