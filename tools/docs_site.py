"""Supplements of mkdocs.yml: pages from elsewhere in the repository, docstrings as Markdown, no outside request.

mkdocs loads this file as a hook (`on_..`), and mkdocstrings as an extension (`Docstrings`).
"""

import re
from pathlib import Path

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("GLOSSARY.md", "CONTRIBUTING.md", "CHANGELOG.md")
# What a browser fetches by itself; links that a reader follows aren't among it.
REQUEST = re.compile(
    r"<(?:script|img|iframe)[^>]+src=\"?(?:https?:)?//|<link[^>]+rel=\"?stylesheet[^>]+href=\"?https?://"
)
# A line of a docstring that begins an argument ("tokens: ..", "a [M, K], ..") or one of its closing sentences.
ENTRY = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*)(?=: | \[| \")|(?:Raises|Returns|Example)\b")


def on_files(files, config):
    """Add the repository's own pages and notes."""
    for path in [*(ROOT / name for name in PAGES), *sorted((ROOT / "notes").glob("*.md"))]:
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Put parts of the README where a page asks for them; links out of docs/ lead to the pages added above."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    start = readme.partition("\n")[2].partition("\n## ")[0].replace("(docs/", "(")
    pairs = readme.partition("<!-- pairs:")[2].partition("-->\n")[2].partition("<!-- /pairs -->")[0]
    for page_name, mark, part in (
        ("index.md", "<!-- the README's start -->", start),
        ("install.md", "<!-- the README's table of pairs -->", pairs),
    ):
        if page.file.src_uri == page_name:
            if mark not in markdown or not part.strip():
                raise PluginError(f"{page_name}: expected {mark}, and that part in README.md, got none")
            markdown = markdown.replace(mark, part.strip())
    return markdown.replace("](../", "](") if "/" not in page.file.src_uri else markdown


def on_post_page(output, page, config):
    """Refuse a page that requests something from elsewhere."""
    found = REQUEST.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri}: expected no request elsewhere, got {found[0]}")
    return output


class Docstrings(griffe.Extension):
    """Docstrings of the house's form as Markdown: a paragraph for each argument, its name as code."""

    def on_instance(self, *, obj, **kwargs):
        """Rewrite the docstring of a function, class, module or attribute."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring with an empty line before each entry; indented blocks after an empty line stay as they are."""
    lines: list[str] = []
    for line in text.split("\n"):
        entry = ENTRY.match(line)
        if entry and lines and lines[-1].strip():
            lines.append("")
        if entry and entry["names"]:
            names = entry["names"]
            line = ", ".join(f"`{name}`" for name in names.split(", ")) + line[len(names) :]
        lines.append(line)
    return "\n".join(lines)
