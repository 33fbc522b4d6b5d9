"""Pages, charts and the README's numbers: made from the results, and those of the repository agree with its results."""

from pathlib import Path

from bench.pages import pages, render

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs" / "benchmarks"
REMEDY = "python -m bench --docs docs/benchmarks"


def test_the_pages_agree_with_the_results():
    wanted = pages(RESULTS)
    assert {path.name for path in DOCS.glob("*.md")} == set(wanted), REMEDY
    for name, text in wanted.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, REMEDY


def test_the_readme_agrees_with_the_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- bench:") > 6
    assert render(text, RESULTS) == text, REMEDY
