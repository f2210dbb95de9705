"""The HTML report: one file, no network, a value table that sorts and is searched.

"text, sort and search asserted in the DOM in headless Chromium"; without a browser the
structure alone is looked at.
"""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from remat import Report, policies, remat, report
from remat.__main__ import main
from tests.reporting.models import batch, block, loss_of, parameters

BROWSER = shutil.which("chromium")

# Uses the page as a reader does, by events, and writes down what is to be seen.
VISIT = """
<script>
{
const rows = () => [...document.querySelectorAll("#values tbody tr")]
  .filter((row) => !row.hidden).map((row) => row.cells[0].textContent);
const sizes = () => [...document.querySelectorAll("#values tbody tr")]
  .map((row) => Number(row.cells[1].dataset.key));
const seen = { first: rows() };
const heads = document.querySelectorAll("#values th button");
heads[1].focus();
seen.focused = document.activeElement === heads[1];
heads[1].click();
seen.down = rows();
seen.bytes = sizes();
seen.sort = heads[1].parentElement.getAttribute("aria-sort");
heads[1].click();
seen.up = sizes();
const field = document.querySelector("input[type=search]");
field.value = "ATTN block";
field.dispatchEvent(new Event("input"));
seen.found = rows();
seen.count = document.querySelector("output").textContent;
field.value = "";
field.dispatchEvent(new Event("input"));
seen.again = rows().length;
seen.requests = performance.getEntriesByType("resource").length;
document.body.dataset.seen = JSON.stringify(seen);
}
</script>
"""


@pytest.fixture(scope="module")
def found() -> Report:
    """Three layers that save their attention."""
    layer = remat(block, policy=policies.save_attention_outputs)
    return report(loss_of(layer), parameters(3), batch())


@pytest.fixture(scope="module")
def page(found: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the report."""
    path = tmp_path_factory.mktemp("html") / "report.html"
    found.to_html(path)
    return path


class _Tags(HTMLParser):
    """The tags of a page, and whether all are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action")]
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole(page: Path) -> None:
    """Every tag is closed, nothing is fetched, and the drawing has a name."""
    parser = _Tags()
    text = page.read_text()
    parser.feed(text)

    assert parser.open == []
    assert parser.addresses == []
    assert "default-src 'none'" in text
    assert text.count('role="img" aria-label=') == 1
    assert parser.tags.count("table") == 3


def test_the_page_has_the_figures(page: Path, found: Report) -> None:
    """The text of the report, its regions, what saving more costs, and its values."""
    text = page.read_text()

    for part in ("wait for the backward", "next: ", "models.py:", "attn", "live bytes"):
        assert part in text
    polygons = re.findall(r"<polygon points=\"([^\"]*)\"", text)
    assert len(polygons) == len(found.timeline.groups)
    assert f'data-key="{found.values[0].size_bytes}"' in text
    (rows,) = re.findall(
        r'<table id="frontier">.*?<tbody>(.*?)</tbody>', text, re.DOTALL
    )
    assert rows.count("<tr>") == len(found.frontier)
    for point in found.frontier:
        assert f'data-key="{point.saved_bytes}"' in rows


def test_words_are_escaped(tmp_path: Path) -> None:
    """The name of a lambda, with its brackets, is no tag."""
    path = tmp_path / "r.html"

    report(remat(lambda x: x.sin().sin()), torch.ones(3)).to_html(path)

    assert "&lt;lambda&gt;" in path.read_text()
    assert "<lambda>" not in path.read_text()


def test_the_command_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--html writes it beside what is printed."""
    path = tmp_path / "r.html"

    assert main(["report", "torch:sin", "x=3", "--html", str(path)]) == 0

    assert path.read_text().startswith("<!doctype html>")
    assert "one forward and its backward" in capsys.readouterr().out


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_the_page_in_a_browser(page: Path, found: Report, tmp_path: Path) -> None:
    """Sorted by a button in the head, filtered by words, and nothing is requested."""
    visited = tmp_path / "visited.html"
    visited.write_text(page.read_text().replace("</body>", f"{VISIT}</body>"))
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]

    dom = subprocess.run(
        [BROWSER, *flags, f"--user-data-dir={tmp_path / 'user'}", visited.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout

    (said,) = re.findall(r'data-seen="([^"]*)"', dom)
    seen = json.loads(said.replace("&quot;", '"'))
    values = sorted([*found.values, *found.recomputed], key=lambda v: -v.size_bytes)
    sizes = [value.size_bytes for value in values]
    assert len(seen["first"]) == len(sizes)
    assert seen["focused"]
    assert seen["sort"] == "descending"
    assert seen["bytes"] == sizes
    assert seen["up"] == sizes[::-1]
    assert sorted(seen["down"]) == sorted(seen["first"])
    assert seen["found"]
    assert all("attn" in name for name in seen["found"])
    assert seen["count"] == f"{len(seen['found'])} shown"
    assert seen["again"] == len(sizes)
    assert seen["requests"] == 0
