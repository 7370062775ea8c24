"""Walks a directory and finds the models in it, whatever the layout.

Called by weights_scan.py; blocking. Bounded in depth and entries; each directory is entered once,
so that loops of links end; names need not be text. What cannot be read is left out and told.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from agent.probes import hf_cache
from agent.probes.root import Root
from agent.probes.weights_document import Found, Listing, document, readable, unfinished
from agent.probes.weights_files import (
    File,
    Memory,
    Model,
    folder_model,
    gguf_groups,
    gguf_model,
    read_config,
)
from agent.source import NOTE, BadSource, Source, parse_source

MAX_DEPTH: Final = 8
MAX_ENTRIES: Final = 100_000
"""Entries looked at below one configured directory; more are no tree of weights."""
MAX_FILES: Final = 20_000
"""Files counted below one model."""
WHOLE: Final = frozenset({"config.json", "model_index.json"})
"""Files that make everything below their folder one model."""
SKIPPED: Final = ("datasets--", "spaces--")


class Tree:
    """One walk below one directory of `root`."""

    def __init__(self, root: Root, memory: Memory) -> None:
        self._root, self._memory = root, memory
        self._entered: set[tuple[int, int]] = set()
        self._count = 0
        self._unread: list[str] = []
        self._found: list[dict[str, Any]] = []

    def scan(self, path: Path) -> Found:
        """Documents of everything below `path`."""
        self._folder(self._root.at(path), 0)
        return Found(self._found, self._problem())

    def _problem(self) -> str | None:
        if self._count > MAX_ENTRIES:
            return f"has more than {MAX_ENTRIES} entries: only the first were looked at"
        if self._unread:
            more = f" and {len(self._unread) - 1} more" if len(self._unread) > 1 else ""
            return f"{self._unread[0]}{more}"
        return None

    def _folder(self, place: Path, depth: int) -> None:
        listing = self.entries(place)
        if listing is None:
            return
        names = {file.name for file in listing.files}
        folders = {folder.name for folder in listing.folders}
        if place.name.startswith("models--") and folders & {"snapshots", "blobs"}:
            self._found += hf_cache.documents(self, place, self._memory)
            return
        if NOTE in names and (document := self._download(place, listing)):
            self._found.append(document)
            return
        if "model_index.json" in names:  # an image model: its parts lie in folders of their own
            listing = self.below(place, listing=listing)
        self._found += self._ggufs(listing.files, place)
        own = self._model(place, listing)
        if own is not None:
            self._found.append(own)
            if names & WHOLE and own["format"] != "other":
                return  # its sub-folders are part of it
        if depth < MAX_DEPTH:
            for folder in listing.folders:
                if not folder.name.startswith((".", *SKIPPED)):
                    self._folder(folder, depth + 1)

    def entries(self, place: Path) -> Listing | None:
        """Entries of a directory; None when it was entered before or cannot be read."""
        listing = Listing()
        try:
            status = place.stat()
            if (status.st_dev, status.st_ino) in self._entered:
                return None
            self._entered.add((status.st_dev, status.st_ino))
            with os.scandir(place) as scan:
                for entry in scan:
                    self._count += 1
                    if self._count > MAX_ENTRIES:
                        break
                    _sort_in(entry, listing)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            self._unread.append(f"{self.path(place)} cannot be read: {why}")
            return None
        listing.files.sort(key=lambda file: file.name)
        listing.folders.sort()
        return listing

    def below(
        self, place: Path, prefix: str = "", depth: int = 0, listing: Listing | None = None
    ) -> Listing:
        """All files below a model's directory, named relative to it."""
        whole = Listing()
        listing = listing or self.entries(place)
        if listing is None or depth > MAX_DEPTH:
            return whole
        for file in listing.files:
            name = prefix + file.name
            whole.files.append(File(name, file.path, file.size, file.mtime_ns, file.inode))
        whole.dead += [prefix + name for name in listing.dead]
        for folder in listing.folders:
            part = self.below(folder, f"{prefix}{folder.name}/", depth + 1)
            whole.files += part.files[: MAX_FILES - len(whole.files)]
            whole.dead += part.dead[: MAX_FILES - len(whole.dead)]
        return whole

    def path(self, place: Path) -> str:
        """A place as the machine names it, as text that a database takes."""
        if not self._root.live:
            place = Path("/", place.relative_to(self._root.prefix))
        return readable(place)

    def _ggufs(self, files: list[File], place: Path) -> list[dict[str, Any]]:
        groups = gguf_groups(file for file in files if file.name.endswith(".gguf"))
        names = {file.name for file in files}
        found = []
        for first, group in groups.items():
            model = gguf_model(group, self._memory)
            if control := names & {f"{file.name}.aria2" for file in group}:
                model = unfinished(model, _not_finished(min(control)))
            name = readable(Path(first)).removesuffix(".gguf")
            path = self.path(place / first)
            found.append(document(path=path, name=name, model=model, files=group))
        return found

    def _model(self, place: Path, listing: Listing) -> dict[str, Any] | None:
        """The model of a plain folder. Sub-folders count where it says what it is."""
        model = folder_model(listing.files, listing.dead, self._memory)
        if model is None:
            return None
        ggufs = any(file.name.endswith(".gguf") for file in listing.files)
        if ggufs and model.format == "other" and not model.complete:
            return None  # the configuration belongs to the GGUF files beside it
        files = listing.files
        if any(file.name in WHOLE for file in files):
            parts = [self.below(f, f"{f.name}/").files for f in listing.folders]
            files = files + [file for part in parts for file in part]
        control = sorted(f.name for f in files if f.name.endswith((".aria2", ".incomplete")))
        if control and (not model.complete or control[0].endswith(".aria2")):
            reason = f"{model.reason}; " if model.reason else ""
            model = unfinished(model, reason + _not_finished(control[0]))
        return document(
            path=self.path(place), name=readable(Path(place.name)), model=model, files=files
        )

    def _download(self, place: Path, listing: Listing) -> dict[str, Any] | None:
        """Our own download: the note beside it says what it is and whether it was verified."""
        noted = next(file for file in listing.files if file.name == NOTE)
        note, _ = self._memory.ask(noted, read_config)
        text = note.get("source")
        if not isinstance(text, str) or not text.isprintable():
            return None
        source = _source(text)
        folders = [self.below(f, f"{f.name}/").files for f in listing.folders]
        files = listing.files + [file for part in folders for file in part]
        model = self._downloaded(source, files, listing)
        complete = note.get("complete") is True
        if not complete:
            model = unfinished(model, "its download is not finished")
        elif not model.cut:  # verified by its sizes or checksum: a header unknown to us is no fault
            model = Model(model.format, True, model.facts, model.reason)
        name = source.name if source else place.name
        found = document(path=self.path(place), name=readable(Path(name)), model=model, files=files)
        revision = {"revision": source.revision} if source and source.revision else {}
        return {"source": text, **found, "managed": True, **revision}

    def _downloaded(self, source: Source | None, files: list[File], listing: Listing) -> Model:
        """What a download holds: the file that the source names, or the whole folder."""
        single = source and source.single
        folder = folder_model(files, listing.dead, self._memory)
        if not single and folder is not None and folder.format != "other":
            return folder
        groups = gguf_groups(file for file in files if file.name.endswith(".gguf"))
        for group in groups.values():
            if not single or single in {file.name for file in group}:
                return gguf_model(group, self._memory)
        return folder or Model("other", True, {})


def _not_finished(control: str) -> str:
    """aria2 makes files of full size at once and notes beside them what is missing."""
    return f"{control} says that a download is not finished"


def _sort_in(entry: os.DirEntry[str], listing: Listing) -> None:
    try:
        if entry.is_dir():
            listing.folders.append(Path(entry.path))
        elif entry.is_file():
            status = entry.stat()
            inode = (status.st_dev, status.st_ino)
            listing.files.append(
                File(entry.name, Path(entry.path), status.st_size, status.st_mtime_ns, inode)
            )
        elif entry.is_symlink():
            listing.dead.append(entry.name)
    except (OSError, ValueError):
        listing.dead.append(entry.name)  # a loop of links, or gone while we looked


def _source(text: str) -> Source | None:
    try:
        return parse_source(text)
    except BadSource:
        return None


def describe_path(root: Root, path: Path, memory: Memory) -> dict[str, Any] | None:
    """The document of one file or folder that somebody names; None when it is not there."""
    found = _at(root, path, memory)
    if found is None:
        return None
    model, files = found
    return document(path=readable(path), name=readable(Path(path.name)), model=model, files=files)


def cut_because(path: Path) -> str | None:
    """What is missing of the weights that an engine would load from there, where that is known.

    Blocking. None for whole ones, and for what we do not understand: an engine may.
    """
    found = _at(Root(), path, Memory())
    return found[0].reason if found and found[0].cut and found[0].format != "other" else None


def _at(root: Root, path: Path, memory: Memory) -> tuple[Model, list[File]] | None:
    """The model of one file or folder, and its files; None when it is not there."""
    place, tree = root.at(path), Tree(root, memory)
    try:
        if not place.exists():
            return None
        if place.is_dir():
            whole = tree.below(place)
            model = folder_model(whole.files, whole.dead, memory)
            groups = list(gguf_groups(f for f in whole.files if f.name.endswith(".gguf")).values())
            if groups and (model is None or not model.complete):
                model = gguf_model(groups[0], memory)
            files = whole.files
        else:
            files = _beside(place)
            is_gguf = place.name.endswith(".gguf")
            model = gguf_model(files, memory) if is_gguf else folder_model(files, (), memory)
    except (OSError, ValueError):
        return None
    return model or _other(), files


def _other() -> Model:
    """Something that an operator names and we do not know: there it is, that is all we can say."""
    return Model("other", True, {})


def _beside(place: Path) -> list[File]:
    """A file, with the other parts where it is the first of a split one."""
    listing = Listing()
    with os.scandir(place.parent) as entries:
        for number, entry in enumerate(entries):
            if number > MAX_ENTRIES:
                break
            if entry.name.endswith(".gguf") or entry.name == place.name:
                _sort_in(entry, listing)
    groups = gguf_groups(file for file in listing.files if file.name.endswith(".gguf"))
    for group in groups.values():
        if any(file.name == place.name for file in group):
            return group
    return [file for file in listing.files if file.name == place.name]
