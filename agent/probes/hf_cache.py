"""One repository of a Hugging Face cache: a document for each revision that lies there.

Called by weights_tree.py; blocking. `models--org--name/` holds `blobs` (the files, by hash),
`snapshots/<revision>` (links to them, or real files where links are impossible) and `refs` (names
of revisions). Newer clients add `trees` and share blobs between repositories: links are followed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from agent.probes.weights_document import Listing, document, readable
from agent.probes.weights_files import Memory, Model, folder_model, gguf_groups, gguf_model
from agent.source import BadSource, parse_source

if TYPE_CHECKING:
    from agent.probes.weights_files import File

MAX_REFS: Final = 256


class Walk(Protocol):
    """What is needed of weights_tree.Tree."""

    def entries(self, place: Path) -> Listing | None:
        """Entries of a directory."""
        ...

    def below(self, place: Path) -> Listing:
        """All files below a directory."""
        ...

    def path(self, place: Path) -> str:
        """A place as reported."""
        ...


def repository(folder: str) -> str:
    """`models--org--name` -> `org/name`."""
    return readable(Path(folder.removeprefix("models--").replace("--", "/", 1)))


def documents(tree: Walk, place: Path, memory: Memory) -> list[dict[str, Any]]:
    """The revisions of one repository, the main one first; blobs are counted in the first."""
    repo, names = repository(place.name), _refs(tree, place / "refs")
    open_files = _unfinished(tree, place / "blobs")
    snapshots = tree.entries(place / "snapshots") if (place / "snapshots").is_dir() else None
    revisions = [folder.name for folder in snapshots.folders] if snapshots else []
    revisions.sort(key=lambda revision: (names.get(revision) != "main", revision))
    found: list[dict[str, Any]] = []
    counted: set[tuple[int, int]] = set()
    for revision in revisions:
        snapshot = place / "snapshots" / revision
        for model, files in _models(tree, snapshot, tree.below(snapshot), memory):
            name = model.pop("file", None)
            sizes = {file.inode: file.size for file in files}
            shared = sum(size for inode, size in sizes.items() if inode in counted)
            counted |= sizes.keys()
            _tell_unfinished(model, open_files)
            source = _source(repo, names.get(revision, revision), name)
            model |= {
                "source": source,
                "name": repo if name is None else f"{repo}/{name}",
                "revision": readable(Path(revision)),
                "shared_bytes": shared or None,
            }
            found.append({key: value for key, value in model.items() if value is not None})
    if not found and open_files:
        found.append(_only_begun(tree, place, repo, names, open_files))
    return found


def _models(
    tree: Walk, place: Path, whole: Listing, memory: Memory
) -> list[tuple[dict[str, Any], list[File]]]:
    """The models of one revision: all of it, or each GGUF file with `file`, its name."""
    model = folder_model(whole.files, whole.dead, memory)
    groups = gguf_groups(file for file in whole.files if file.name.endswith(".gguf"))
    if groups and (model is None or (model.format == "other" and not model.complete)):
        found = []
        for first, group in groups.items():
            model_document = document(
                path=tree.path(place / first),
                name=first,
                model=gguf_model(group, memory),
                files=group,
            )
            found.append(({**model_document, "file": readable(Path(first))}, group))
        return found
    if model is None:
        if not whole.files and not whole.dead:
            return []
        model = Model("other", False, {}, "holds no weights", cut=True)
    whole_document = document(
        path=tree.path(place), name=place.name, model=model, files=whole.files
    )
    return [(whole_document, whole.files)]


def _refs(tree: Walk, place: Path) -> dict[str, str]:
    """Revision -> the name that points to it, `main` before others."""
    found: dict[str, str] = {}
    if not place.is_dir():
        return found
    for file in sorted(tree.below(place).files[:MAX_REFS], key=lambda f: f.name != "main"):
        try:
            with file.path.open("rb") as opened:
                revision = opened.read(100).decode("ascii", "replace").strip()
        except OSError:
            continue  # removed while we looked
        found.setdefault(revision, file.name)
    return found


def _unfinished(tree: Walk, place: Path) -> list[File]:
    listing = tree.entries(place) if place.is_dir() else None
    return [f for f in listing.files if f.name.endswith(".incomplete")] if listing else []


def _source(repo: str, revision: str, name: str | None) -> str | None:
    """The words that a catalog uses for it; None when they would not be understood."""
    text = f"hf:{repo}" + ("" if revision == "main" else f"@{revision}")
    try:
        return parse_source(f"{text}/{name}" if name else text).text
    except BadSource:
        return None  # a repository without an owner, or an odd name of a revision


def _tell_unfinished(found: dict[str, Any], open_files: list[File]) -> None:
    if not found["complete"] and open_files:
        found["reason"] = f"{found.get('reason')}; {_words(open_files)}"


def _words(open_files: list[File]) -> str:
    count = len(open_files)
    return f"{count} downloads are not finished" if count > 1 else "1 download is not finished"


def _only_begun(
    tree: Walk, place: Path, repo: str, names: dict[str, str], open_files: list[File]
) -> dict[str, Any]:
    """A repository of which nothing has arrived whole yet."""
    model = Model("other", False, {}, _words(open_files), cut=True)
    found = document(path=tree.path(place), name=repo, model=model, files=open_files)
    found["source"] = _source(repo, "main", None)
    found["revision"] = next((r for r, name in names.items() if name == "main"), None)
    return {key: value for key, value in found.items() if value is not None}
