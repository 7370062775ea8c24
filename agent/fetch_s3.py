"""Download one object, or all objects below a prefix, from S3 or what speaks like it.

boto3 signs, retries and reads the usual settings: AWS_ENDPOINT_URL, AWS_REGION, credentials from
the environment, ~/.aws or the machine's role; without any, requests are unsigned. Runs in the child
process of agent.fetch.
"""

from __future__ import annotations

import base64
import json
import re
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from agent.fetch_many import WORKERS, bring, place_of
from agent.fetch_room import folder_bytes
from agent.fetch_verify import (
    Brought,
    Checksum,
    FetchError,
    facts_of,
    finish,
    part_said,
    verify,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from agent.source import Source

CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 30
TRIES = 5
"""Tries in a row that came no further than an earlier one; any progress starts the count again."""
BLOCK = 256 << 10
_PLAIN_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Thing:
    """One object: its key, its name below the prefix, its size in bytes and its version."""

    key: str
    name: str
    size: int
    etag: str


def fetch_s3(
    source: Source,
    folder: Path,
    room: Callable[[int | None], None],
    progress: Callable[[int, int | None], None],
) -> Brought:
    """Bring the source's objects into `folder`, each verified; raises FetchError."""
    try:
        import boto3  # noqa: F401
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise FetchError(
            f"{source.text} needs boto3 in the agent's environment: pip install 'llmgw[s3]'"
        ) from None
    try:
        store = Store(source)
        things = store.listed()
        single = things[0].name if [t.key for t in things] == [source.key] else None
        if source.sha256 and single is None:
            raise FetchError(f"{source.text} names a folder, and a sha256 is of one object")
        jobs = {}
        for thing in things:
            path = place_of(folder, thing.name, source.text)
            jobs[thing.name] = partial(store.bring, thing, path)
        total = sum(thing.size for thing in things)
        room(max(0, total - folder_bytes(folder)))
        return Brought(bring(jobs, folder, total, progress), single)
    except (BotoCoreError, ClientError) as error:
        raise FetchError(f"{source.text} cannot be fetched: {error}") from error


class Store:
    """A source's bucket."""

    def __init__(self, source: Source) -> None:
        self._source, self._bucket = source, source.bucket or ""
        self._client = _client()

    def listed(self) -> list[Thing]:
        """The object that the source names, or all below it as a folder; FetchError for none."""
        wanted = self._source.key or ""
        below = wanted if wanted.endswith("/") or not wanted else f"{wanted}/"
        found = []
        for key, size, etag in self._pages(wanted):
            if key == wanted:
                return [Thing(key, key.rpartition("/")[2], size, etag)]
            if key.startswith(below) and not key.endswith("/"):
                found.append(Thing(key, key.removeprefix(below), size, etag))
        if not found:
            raise FetchError(
                f"{self._source.text}: bucket {self._bucket} has no object {wanted!r} and none "
                f"below {below!r}"
            )
        return found

    def _pages(self, prefix: str) -> Iterator[tuple[str, int, str]]:
        pages = self._client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self._bucket, Prefix=prefix):
            for item in page.get("Contents", ()):
                yield item["Key"], int(item["Size"]), str(item.get("ETag", ""))

    def bring(self, thing: Thing, path: Path) -> str:
        """One object; bytes of this version that are here already stay. How it was verified."""
        checksum = self._checksum(thing)
        if path.is_file() and path.stat().st_size == thing.size:
            return checksum.kind if checksum else "size"  # verified before it got its name
        part = path.with_name(path.name + ".part")
        if version_of(part) != thing.etag:
            part.unlink(missing_ok=True)
        part.touch()
        facts_of(part).write_text(json.dumps(thing.etag))
        self._copy_all(thing, part)
        verified = verify(part, thing.size, checksum, f"s3:{self._bucket}/{thing.key}")
        finish(part, path)
        return verified

    def _copy_all(self, thing: Thing, part: Path) -> None:
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        failures, furthest = 0, part.stat().st_size
        while (before := part.stat().st_size) < thing.size:
            reason: Exception | str = "the answer ended early"
            try:
                self._copy(thing, part, before)
            except (HTTPClientError, IncompleteReadError) as error:
                reason = error
            if part.stat().st_size >= thing.size:
                return
            failures = failures + 1 if part.stat().st_size <= furthest else 1
            furthest = max(furthest, part.stat().st_size)
            if failures >= TRIES:
                raise FetchError(
                    f"s3:{self._bucket}/{thing.key} failed {failures} times without progress: "
                    f"{reason}"
                )
            time.sleep(min(30.0, 0.2 * 2**failures))

    def _copy(self, thing: Thing, part: Path, have: int) -> None:
        from botocore.exceptions import ClientError

        given = {"Range": f"bytes={have}-"} if have else {}
        try:
            answer = self._client.get_object(
                Bucket=self._bucket, Key=thing.key, IfMatch=thing.etag, **given
            )
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (412, 416):
                raise
            part.unlink()
            raise FetchError(
                f"s3:{self._bucket}/{thing.key} was replaced while it was fetched: it starts over"
            ) from error
        partial_answer = answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        with part.open("r+b") as file, answer["Body"] as body:
            if partial_answer and part_said(answer.get("ContentRange"))[0] == have:
                file.seek(have)
            elif partial_answer:  # of another place: two parts that do not meet are no file
                file.truncate()
                return
            else:
                file.truncate()
            while block := body.read(BLOCK):
                file.write(block)
                file.flush()

    def _checksum(self, thing: Thing) -> Checksum | None:
        """What the store tells of the bytes, where it tells something that we can compute."""
        if self._source.sha256:
            return Checksum("sha256", self._source.sha256)
        head = self._client.head_object(Bucket=self._bucket, Key=thing.key, ChecksumMode="ENABLED")
        sha256 = head.get("ChecksumSHA256", "")
        if sha256 and "-" not in sha256:  # with a dash it is the checksum of parts' checksums
            return Checksum("sha256", base64.b64decode(sha256).hex())
        etag = thing.etag.strip('"')
        encrypted = str(head.get("ServerSideEncryption", "AES256")) != "AES256"
        if encrypted or "SSECustomerAlgorithm" in head or not _PLAIN_MD5.fullmatch(etag):
            return None
        return Checksum("md5", etag)


def _client() -> Any:
    import boto3
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config

    known = botocore.session.get_session()
    session = boto3.session.Session(botocore_session=known)
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "max_attempts": TRIES},
        max_pool_connections=WORKERS,
        response_checksum_validation="when_required",  # verify() does it, over what was resumed too
    )
    if session.get_credentials() is None:
        config = config.merge(Config(signature_version=UNSIGNED))
    region = session.region_name or "us-east-1"
    client = session.client("s3", region_name=region, config=config)
    own = "amazonaws.com" not in client.meta.endpoint_url
    if own and not (known.get_scoped_config().get("s3") or {}).get("addressing_style"):
        # Few stores besides Amazon's have a host name for each bucket.
        config = config.merge(Config(s3={"addressing_style": "path"}))
        client = session.client("s3", region_name=region, config=config)
    return client
