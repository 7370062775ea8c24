"""Who may use the admin port, and as whom: no token on loopback, an admin's token elsewhere.

On loopback any page in the operator's browser can send requests here, so a foreign Origin is
refused and the Host must be a loopback name (a page may resolve its own name to 127.0.0.1).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote, urlsplit

from controller.api.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from werkzeug.datastructures import Headers

ACTOR_HEADER: Final = "X-Llmgw-Actor"
UNNAMED: Final = "unnamed"
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_ODD: Final = re.compile(r"[^\w.@+ -]+")


class AdminSettings(Protocol):
    """What access reads of the controller's settings."""

    @property
    def admin_listen(self) -> str:
        """``host:port`` of the admin port."""
        ...

    @property
    def admin_token_file(self) -> Path | None:
        """File of admin tokens, one a line."""
        ...


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one admin port. ``tokens`` maps SHA-256 of a token to its name."""

    loopback: bool
    tokens: Mapping[bytes, str]

    def actor(self, headers: Headers, scheme: str) -> str:
        """Who asks, for the audit table; ApiError 401 or 403 when they may not."""
        self.own_site(headers, scheme)
        named = _ODD.sub("?", unquote(headers.get(ACTOR_HEADER) or ""))[:100].strip()
        if self.loopback:
            return named or UNNAMED
        token = self._token(headers.get("Authorization") or "")
        return f"{named} ({token})" if named else token

    def _token(self, authorization: str) -> str:
        scheme, _, secret = authorization.partition(" ")
        given = hashlib.sha256(secret.strip().encode()).digest()
        # Every known hash is compared, so that time tells nothing about which came near.
        found = [name for known, name in self.tokens.items() if hmac.compare_digest(known, given)]
        if scheme.lower() != "bearer" or not found:
            raise ApiError(
                401,
                "the admin API needs a token on this address: send Authorization: Bearer TOKEN "
                "(llmgwctl --token or LLMGW_TOKEN) that stands in admin_token_file",
                {"WWW-Authenticate": "Bearer"},
            )
        return found[0]

    def own_site(self, headers: Headers, scheme: str) -> None:
        """ApiError 403 for pages of others, and on loopback for names that are not loopback's."""
        host = headers.get("Host") or ""
        origin = headers.get("Origin")
        if origin is not None and origin.lower() != f"{scheme}://{host}".lower():
            raise ApiError(
                403,
                f"pages of {origin[:200]} may not use the admin API: CORS is off here, open the "
                "admin port's own pages instead",
            )
        if self.loopback and not is_loopback(urlsplit(f"//{host}").hostname or ""):
            raise ApiError(
                403,
                f"the admin port listens on loopback only and does not answer for host {host[:200]}"
                ": use 127.0.0.1 or localhost",
            )


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_tokens(path: Path) -> dict[bytes, str]:
    """Tokens of a file: one a line, clear or ``sha256:HEX``, then a name if wanted; # comments.

    Raises OSError when unreadable, ValueError for a token too short to be a secret.
    """
    tokens: dict[bytes, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        match = _HASH.fullmatch(words[0])
        if match is None and len(words[0]) < 16:
            raise ValueError(f"{path}, line {number}: a token has at least 16 characters")
        digest = bytes.fromhex(match[1]) if match else hashlib.sha256(words[0].encode()).digest()
        tokens[digest] = " ".join(words[1:]) or f"token {digest.hex()[:8]}"
    return tokens


def access_of(settings: AdminSettings) -> Access:
    """The rules for an admin port. Reads the token file once, at start."""
    host = urlsplit(f"//{settings.admin_listen}").hostname or ""
    path = settings.admin_token_file
    return Access(is_loopback(host), read_tokens(Path(path)) if path is not None else {})
