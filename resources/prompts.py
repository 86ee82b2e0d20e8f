"""Sources of templates: which files there are, which of them changed, and what they hold.

What one file says belongs in `resources/template_files.py`; what its renderings have in common is the domain's to
find (`warmers/prefixes.py`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import sha256
from itertools import chain

from resources.objects import Objects, Stamp
from resources.placeholders import REVISION
from resources.template_files import ParsedTemplate, TemplateFile, Unreadable, digest_of
from warmers.changes import Entry, Listing, SourceFile
from warmers.errors import SourceUnavailable, StateUnavailable, TemplateError
from warmers.templates import Failed, Template

TEMPLATE_SUFFIXES = (".yaml", ".yml", ".json", ".txt", ".md")
READERS = 16
"""Files read at once; from S3, one after the other would take minutes for ten thousand."""
WRITTEN = "changed or went away while it was read"
UNKNOWN = SourceFile("", ())
NOTHING = Listing()


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a source holds: templates, one for every context and one without, and what could not be read."""

    templates: tuple[Template, ...] = ()
    failed: tuple[Failed, ...] = ()
    listing: Listing = NOTHING
    """What it is compared by; broken files are in it as they last were."""

    @property
    def digest(self) -> str:
        """Changes when any template changes, appears or disappears; 16 hex digits."""
        return self.listing.digest

    def by_label(self) -> dict[str, Template]:
        """Templates by `name` or `name/context`."""
        return {template.label: template for template in self.templates}


@dataclass(slots=True)
class _Reading:
    """What came of some of a source's files."""

    templates: dict[str, list[Template]] = field(default_factory=dict)
    """By file."""
    failed: dict[str, str] = field(default_factory=dict)
    files: dict[str, SourceFile] = field(default_factory=dict)
    """Those that need not be read again as long as they stay as they are."""
    written: set[str] = field(default_factory=set)
    """Those that changed while they were read."""

    @property
    def listing(self) -> Listing:
        entries = {t.label: _entry(t) for found in self.templates.values() for t in found}
        return Listing(entries, self.failed, self.files)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Template files at the top of a directory or below an S3 prefix; folders in it may hold documents they name."""

    objects: Objects
    include: Sequence[str] = ("*",)

    def stamps(self) -> dict[str, Stamp]:
        """Every file, templates and documents. Raises SourceUnavailable."""
        with _source(self.objects):
            return self.objects.stamps()

    def read(self, before: Listing = NOTHING, rendered: Listing = NOTHING) -> Prompts:
        """Every template; a file that cannot be read is reported and harms no other. Raises SourceUnavailable.

        `before`: what the source held when it was last looked at. It says whose a name is that two files claim.
        `rendered`: what the last prefixes were made from. Of a file that cannot be read, that is what stays in force.
        """
        files = self.stamps()
        reading = self._read(self._templates(files), files, before)
        for path in reading.written:
            reading.failed[path] = str(TemplateFile(path, b"").refused(f"it {WRITTEN}", "Run again."))
        failed = (Failed(path, reason, path) for path, reason in sorted(reading.failed.items()))
        templates = chain.from_iterable(found for _, found in sorted(reading.templates.items()))
        return Prompts(tuple(templates), tuple(failed), reading.listing.keeping(rendered))

    def changed(self, before: Listing, files: Mapping[str, Stamp]) -> dict[str, float]:
        """Template files that are not as they were `before`, and when they were written, in seconds since the epoch.

        One that went away was written at 0.
        """
        there = self._templates(files)
        gone = dict.fromkeys((before.files.keys() | before.broken.keys()) - set(there), 0.0)
        known = before.files
        return gone | {
            path: max(s.modified_at for s in _own(path, known.get(path, UNKNOWN).documents, files))
            for path in there
            if path not in known or known[path].stamp != _stamp(path, known[path].documents, files)
        }

    def look(self, before: Listing, files: Mapping[str, Stamp], changed: Collection[str]) -> Listing:
        """What the source holds now; reads what `changed`, and what was broken. Raises SourceUnavailable."""
        there = self._templates(files)
        read = [path for path in there if path in changed or path in before.broken]
        reading = self._read(read, files, before)
        return reading.listing.keeping(before, {*there} - {*read} | reading.written)

    def _templates(self, files: Iterable[str]) -> list[str]:
        return [path for path in sorted(files) if is_template(path, self.include)]

    def _read(self, paths: Sequence[str], files: Mapping[str, Stamp], before: Listing) -> _Reading:
        reading, parsed = _Reading(), dict[str, ParsedTemplate]()
        contents = self._contents(paths)
        for path in paths:
            with _reported(path, reading.failed):
                parsed[path] = TemplateFile(path, contents[path]).parse()
        documents = self._contents(sorted({d for p in parsed.values() for d in p.documents if d in files}))
        owners = _owners(parsed, before, self._templates(files))
        for path, file in parsed.items():
            with _reported(path, reading.failed):
                if owners[file.name] != path:
                    other = f"its name {file.name!r} is that of {owners[file.name]}"
                    raise TemplateFile(path, b"").refused(other, "Give it another name.")
                reading.templates[path] = TemplateFile(path, b"").templates(file, documents)
        after = self.stamps() if paths else files
        for path in paths:
            named = parsed[path].documents if path in parsed else ()
            if _stamp(path, named, files) != _stamp(path, named, after):
                reading.written.add(path)
                reading.templates.pop(path, None)
                reading.failed.pop(path, None)
            elif not any(isinstance(content, Unreadable) for content in (contents[path], *map(documents.get, named))):
                reading.files[path] = SourceFile(_stamp(path, named, files), named)
        return reading

    def _contents(self, paths: Sequence[str]) -> dict[str, bytes | Unreadable]:
        with ThreadPoolExecutor(READERS, "templates") as pool:
            return dict(zip(paths, pool.map(self._content, paths), strict=True))

    def _content(self, path: str) -> bytes | Unreadable:
        """What kept one file from being read is that file's trouble alone."""
        try:
            found = self.objects.read(path)
        except StateUnavailable as error:
            return Unreadable(f"cannot be read: {error.seen}", "Make it readable.")
        return found[0] if found else Unreadable(WRITTEN, "Put it back, or correct the name.")


def is_template(path: str, include: Sequence[str]) -> bool:
    """Whether a file is a template of the fleet: at the top, of a known kind, by a name that it includes."""
    return "/" not in path and path.endswith(TEMPLATE_SUFFIXES) and any(fnmatchcase(path, name) for name in include)


@contextmanager
def _reported(path: str, failed: dict[str, str]) -> Iterator[None]:
    """Keep what is wrong with one file from harming others, whatever its author got PyYAML or Jinja to raise."""
    try:
        yield
    except TemplateError as error:
        failed[path] = str(error)
    except Exception as error:
        failed[path] = str(TemplateFile(path, b"").refused(f"{type(error).__name__}: {error}", "Correct it."))


def _owners(parsed: Mapping[str, ParsedTemplate], before: Listing, there: Collection[str]) -> dict[str, str]:
    """The file that has each name: that which had it before, unless it is gone or renamed, else the first by path."""
    owners = {parsed[path].name: path for path in sorted(parsed, reverse=True)}
    present = set(there)
    for label, entry in before.templates.items():
        name = label.partition("/")[0]
        if entry.source in present and (entry.source not in parsed or parsed[entry.source].name == name):
            owners[name] = entry.source
    return owners


def _entry(template: Template) -> Entry:
    whole = digest_of([template.digest, template.salt, template.adapter, template.weight])
    return Entry(template.source, whole[:16])


def _stamp(path: str, documents: Iterable[str], files: Mapping[str, Stamp]) -> str:
    """Of a file, of documents that it names, whether there or not, and of how it is read; 16 hex digits."""
    versions = [REVISION, *(files[name].version if name in files else None for name in (path, *documents))]
    return sha256(repr(versions).encode()).hexdigest()[:16]


def _own(path: str, documents: Iterable[str], files: Mapping[str, Stamp]) -> list[Stamp]:
    return [files[name] for name in (path, *documents) if name in files]


@contextmanager
def _source(objects: Objects) -> Iterator[None]:
    try:
        yield
    except StateUnavailable as error:
        raise SourceUnavailable(
            f"listing the templates in {objects}", seen=error.seen, do="Correct prompts.directory, or its access."
        ) from error
