"""The HTML report: one file, no network, a value table that sorts and is searched.

"text, sort and search asserted in the DOM in headless Chromium"; without a browser the
structure alone is looked at.
"""

import functools
import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remat import Report, __version__, modules, policies, remat, report
from remat.__main__ import main
from remat.reporting._show.html import _ticks
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
seen.beyond = [400, 1280].map((width) => {
  document.documentElement.style.width = `${width}px`;  // no window is narrower than 500
  return [...document.querySelectorAll("body *:not(.wide *)")].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.left < 0 || box.right > width;
  }).map((each) => each.outerHTML.slice(0, 80));
});
seen.scrolled = [...document.querySelectorAll(".wide")]  // on the wider one
  .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.firstElementChild.id);
seen.tiles = getComputedStyle(document.querySelector(".patterns rect")).stroke;
seen.paper = getComputedStyle(document.body).backgroundColor;
seen.sortable = getComputedStyle(heads[2], "::after").content;
seen.requests = performance.getEntriesByType("resource").length;
document.body.dataset.seen = JSON.stringify(seen);
}
</script>
"""

# For pictures: no window is narrower than 500 pixels, but a frame in one may be.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<body style="margin: 0"><iframe style="{style}" src="{page}"></iframe>"""


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


def test_the_head_says_how_the_page_was_made(page: Path) -> None:
    """Shapes, versions, device and command, and where the backward begins."""
    text = html.unescape(page.read_text())

    parts = [
        "1: float32[",
        f"remat {__version__}, torch {torch.__version__}",
        f"on {torch.get_default_device()}",
        shlex.join(["python", *sys.orig_argv[1:]]),
        "<span>forward</span>",
        '<line class="turn"',
    ]
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("most", "figures"),
    [
        (6.2, ["0", "2", "4", "6"]),
        (5, ["0", "1", "2", "3", "4", "5"]),
        (0.0312, ["0", "0.01", "0.02", "0.03"]),
        (0, ["0"]),
    ],
)
def test_figures_along_an_axis_are_round(most: float, figures: list[str]) -> None:
    """None lies beyond what is drawn."""
    ticks = _ticks(most, "left")

    assert re.findall(r">([\d.]+)<", ticks) == figures
    places = [float(each) for each in re.findall(r"left:([\d.]+)%", ticks)]
    assert places == sorted(places)
    assert max(places) <= 100


def test_layers_have_their_names_in_the_model() -> None:
    """Also of one that a helper reaches; and a partial function that of what it calls."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    model = modules.apply(nn.Sequential(*layers), lambda path, _: len(path) == 1)

    def scaled(scale: float, x: torch.Tensor) -> torch.Tensor:
        return (x * scale).sin().exp()

    partial = remat(functools.partial(scaled, 2.0))

    def helper(x: torch.Tensor) -> torch.Tensor:
        return model(x).sin()

    found = report(model, torch.ones(2, 4))
    by_helper = report(lambda x: helper(x).sum(), torch.ones(2, 4))
    of_partial = report(lambda x: partial(x).sin(), torch.ones(3))

    names = [each.modules for each in found.regions[0].layers]
    assert [name for own in names for name in own] == ["0", "1", "2"]
    assert [each.modules for each in by_helper.regions[0].layers] == names
    assert [region.name for region in of_partial.regions] == [scaled.__qualname__]


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


def seen_in(page: Path, folder: Path, *flags: str) -> dict[str, Any]:
    """What a reader sees who uses the page in a browser."""
    visited = folder / "visited.html"
    visited.write_text(page.read_text().replace("</body>", f"{VISIT}</body>"))
    dom = browse(visited, folder, "--dump-dom", *flags)
    (said,) = re.findall(r'data-seen="([^"]*)"', dom)
    return json.loads(said.replace("&quot;", '"'))


def browse(page: Path, folder: Path, *flags: str) -> str:
    """What a headless browser prints that opens a page."""
    assert BROWSER is not None
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    user = f"--user-data-dir={folder / 'user'}"
    return subprocess.run(
        [BROWSER, *common, *flags, user, page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize(
    ("scheme", "paper"), [(1, "rgb(255, 255, 255)"), (0, "rgb(22, 24, 28)")]
)
def test_the_page_fits_light_and_dark(
    scheme: int, paper: str, page: Path, tmp_path: Path
) -> None:
    """On 400 and 1280 pixels nothing reaches beyond, and the paper is as the reader likes it.

    What it looks like is in the pictures, which stay with pytest's other temporary files.
    """
    preferred = f"--blink-settings=preferredColorScheme={scheme}"
    seen = seen_in(page, tmp_path, preferred, "--window-size=1280,900")

    assert seen["beyond"] == [[], []]
    assert seen["scrolled"] == []
    assert seen["paper"] == paper
    assert seen["tiles"] == "none"
    for width in (400, 1280):
        frame, picture = tmp_path / f"{width}.html", tmp_path / f"{width}.png"
        style = f"border: 0; width: {width}px; height: 1900px"
        frame.write_text(FRAME.format(style=style, page=page.as_uri()))
        size = f"--window-size={width},1900"
        browse(frame, tmp_path, preferred, size, f"--screenshot={picture}")
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_the_page_in_a_browser(page: Path, found: Report, tmp_path: Path) -> None:
    """Sorted by a button in the head, filtered by words, and nothing is requested."""
    seen = seen_in(page, tmp_path)

    values = sorted([*found.values, *found.recomputed], key=lambda v: -v.size_bytes)
    sizes = [value.size_bytes for value in values]
    assert len(seen["first"]) == len(sizes)
    assert seen["focused"]
    assert "\u2195" in seen["sortable"]
    assert seen["sort"] == "descending"
    assert seen["bytes"] == sizes
    assert seen["up"] == sizes[::-1]
    assert sorted(seen["down"]) == sorted(seen["first"])
    assert seen["found"]
    assert all("attn" in name for name in seen["found"])
    assert seen["count"] == f"{len(seen['found'])} shown"
    assert seen["again"] == len(sizes)
    assert seen["requests"] == 0
