"""Files beside the package: what they say of versions, commands and pages is so."""

import re
from pathlib import Path

import envoi

ROOT = Path(__file__).resolve().parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_in_the_changes_and_the_citation():
    assert f"\n## {envoi.__version__} (" in read("CHANGELOG.md")
    assert f"\nversion: {envoi.__version__}\n" in read("CITATION.cff")
    date = re.search(rf"## {re.escape(envoi.__version__)} \((.+)\)", read("CHANGELOG.md"))
    assert date is not None
    assert f"\ndate-released: {date.group(1)}\n" in read("CITATION.cff")


def test_every_page_is_in_the_navigation_and_every_note_in_its_index():
    listed = set(re.findall(r"- ([\w/.]+\.md)$", read("mkdocs.yml"), re.M))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert listed == pages | {"GLOSSARY.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    linked = set(re.findall(r"\(\.\./(notes/[\w.-]+)\)", read("docs/notes.md")))
    assert linked == {f"notes/{path.name}" for path in (ROOT / "notes").glob("*.md")}


def test_the_api_pages_name_what_there_is():
    named = {
        name
        for path in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", path.read_text(), re.M)
    }
    shown = {name.rpartition(".")[2] for name in named}
    public = set(envoi.__all__) - {"epilogue", "experts", "plan", "router", "EpilogueError"}
    assert public <= shown
