"""The files that settings name, judged before a process starts: each where its setting has a name.

Whoever opens such a file later could only say that something is wrong with it. All raise ValueError
that names setting and path; none shows what is in a file. Used by `config.py` alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from controller.router.engine_key import read_key

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def judge_tokens(path: Path) -> None:
    """The admin port's tokens. Imports late: most controllers listen on loopback without any."""
    from controller.api.access import read_tokens

    _can_read("admin_token_file", path)
    try:
        known = read_tokens(path)
    except ValueError as error:
        raise ValueError(f"admin_token_file: {error}") from None
    if not known:
        raise ValueError(f"admin_token_file {path} holds no token")


def judge_pair(cert_name: str, cert: Path | None, key_name: str, key: Path | None) -> None:
    """A certificate and its key, by the names of their settings. Imports late: few have TLS."""
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise ValueError(f"{cert_name} and {key_name} go together: one of them is missing")
    from controller.router.tls import server_context

    _can_read(cert_name, cert)
    _can_read(key_name, key)
    try:
        server_context(cert, key)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{cert_name} {cert} and {key_name} {key} are no certificate and its key in PEM: "
            f"{error}"
        ) from None


def judge_endpoint_keys(paths: Mapping[str, Path], endpoints: Collection[str]) -> None:
    """The keys of fixed replicas: each of an endpoint that there is, in a file that holds one."""
    for name, path in paths.items():
        if name not in endpoints:
            known = ", ".join(sorted(endpoints)) or "none"
            raise ValueError(f"endpoint_keys: {name!r} is no id of endpoints, which are: {known}")
        _can_read(f"endpoint_keys: {name}:", path)
        try:
            read_key(path)
        except ValueError as error:
            raise ValueError(f"endpoint_keys: {name}: {error}") from None


def judge_log(path: Path) -> None:
    """The access log, which is made when its first line is written, long after the start."""
    folder = path.parent
    why = None
    try:
        path.exists()
    except OSError as error:
        raise ValueError(f"access_log {path} cannot be written: {error.strerror}") from None
    if not folder.is_dir():
        why = f"there is no folder {folder}: make it, owned by the user of llmgw-controller"
    elif path.is_dir():
        why = "it is a folder: name a file in it"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        what = "the file" if path.exists() else f"the folder {folder}"
        why = f"this user may not write {what}: give it to the user of llmgw-controller"
    if why is not None:
        raise ValueError(f'access_log {path} cannot be written, {why}; or log to "stdout"')


def judge_folder(name: str, path: Path, most_bytes: int) -> None:
    """A folder that is made where it is not there, for sockets, whose paths are bounded."""
    if len(os.fsencode(path)) > most_bytes:
        raise ValueError(f"{name} {path} is too long for sockets: it may have {most_bytes} bytes")
    try:
        place = next(
            place for place in (path.absolute(), *path.absolute().parents) if place.exists()
        )
        usable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be used: {error.strerror}") from None
    if not usable:
        raise ValueError(f"{name} {path} cannot be used: {place} is no folder, or not this user's")


def _can_read(name: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be read: {error.strerror}") from None
