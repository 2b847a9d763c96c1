"""The page: self-contained, nothing in it that a peer's message could break, and usable in a real browser."""

import html.parser
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from evoattn.bench import record as records
from evoattn.bench import report
from evoattn.bench.record import Ceilings, Problem, Record, Result, Timing
from evoattn.workloads import workload
from tests.helpers import browser

from .conftest import a_record

EVIL = '</script><script>window.broken = 1</script><img src=x onerror="window.broken = 2"> & <b>"\u2028'
"""A reason as an unfriendly library would word it."""


def a_full_record() -> Record:
    problems = []
    for dtype in ("bfloat16", "float16"):
        for place, name in enumerate(("tri64", "tri97", "tri128", "msa_row")):
            scale = (place + 1) * (1 if dtype == "bfloat16" else 2)
            results = [
                result("evoattn", 1.0 * scale, backend="hopper", **({"backward_backend": "triton"} if place else {})),
                result("flex", (0.8 + 0.4 * place) * scale),
                result("dense", 5.0 * scale),
                result("flash_unbiased", 0.1 * scale),
                Result("trifast", "failed", EVIL),
            ]
            problems.append(Problem(workload(name), dtype, 1 << 20, results))
    return Record(
        {"device": "a <GPU>", "torch": "2"},
        {"rounds": 3, "note": "a <cold> cache"},
        Ceilings(4e12, 4e12, "by hand", {"bfloat16": 8e14}),
        problems,
        "out of time",
        12.0,
    )


def result(name: str, forward: float, **more: str) -> Result:
    times = {"forward": Timing.of([forward, forward * 1.1]), "both": Timing.of([4 * forward])}
    peak = int(forward * 2**20)
    return Result(name, errors={"o": 2e-3}, first_call_s=0.5, peak_bytes=peak, host_us={"forward": 30.0}, times=times, **more)


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_needs_nothing_else() -> None:
    page = report.page(a_full_record())
    tags = Tags()
    tags.feed(page)
    for tag, attributes in tags.found:
        for name in ("src", "href", "action", "data", "srcset"):
            value = attributes.get(name) or ""
            assert not value or value.startswith(("#", "data:")), (tag, attributes)
    assert "@" not in re.sub(r"@(media|font-face)\b", "", page.split("<script type")[0]).replace("a &lt;GPU&gt;", "")
    assert not re.search(r"\b(import|fetch|XMLHttpRequest|WebSocket)\b\(", page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


def test_what_peers_say_cannot_break_out() -> None:
    record = a_full_record()
    page = report.page(record)
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "a &lt;GPU&gt;" in page and "a <GPU>" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    parsed = json.loads(data[1])
    assert parsed["problems"][0]["results"][4]["reason"] == EVIL
    assert parsed["titles"]["flash_unbiased"] == "torch flash kernel, no bias"


def test_a_page_of_nothing() -> None:
    assert "evoattn bench" in report.page(Record({}, {}))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    if browser.executable() is None:
        pytest.skip(f"no browser on this machine: any of {', '.join(browser.NAMES)}")
    folder = tmp_path_factory.mktemp("page")
    path = folder / "report.html"
    records.write_text(report.page(a_full_record()), path)
    with browser.open_page(path, folder / "profile") as page:
        yield page
        assert page.complaints() == []
        assert page.requests() == [path.as_uri()], "nothing is asked of the network"


def column(page: browser.Page, table: str, number: int) -> list[str]:
    cells: list[str] = page.ask(
        f"[...document.querySelectorAll('#{table} tbody tr')].map(r => r.children[{number}].textContent)"
    )
    return cells


def choose(page: browser.Page, selector: str, value: str) -> None:
    change = f"s.value = '{value}'; s.dispatchEvent(new Event('change'))"
    page.ask(f"(() => {{ const s = document.querySelector('{selector}'); {change} }})()")


def check_radio(page: browser.Page, name: str, value: str) -> None:
    page.ask(f"document.querySelector('input[name={name}][value={value}]').click()")


def test_it_shows_the_record(page: browser.Page) -> None:
    state = page.ask("document.getElementById('state').textContent")
    assert "budget ended" in state and state.endswith("Note: a <cold> cache.")
    assert column(page, "times", 0) == ["tri64", "tri97", "tri128", "msa_row"]
    assert column(page, "times", 1) == ["0.80x", "1.20x", "1.60x", "2.00x"], "against the fastest peer, and a bound is none"
    assert page.ask("document.querySelectorAll('#speedups rect').length") == 4
    assert page.ask("document.querySelectorAll('#length-time path').length") == 4
    assert page.ask("document.querySelector('#reasons td.words').textContent") == EVIL
    assert page.ask("document.querySelector('#detail tbody tr:last-child td').textContent") == f"failed: {EVIL}"
    assert page.ask("window.broken === undefined")
    shares = "[...document.querySelectorAll('#ceilings tbody tr:first-child td')].map(c => c.textContent)"
    products = 4 * 32 * 64 * 4 * 64 * 64 / 1.05e-3 / 8e14
    moved = (1 << 20) / 1.05e-3 / 4e12
    assert page.ask(shares)[2] == f"{100 * products:.2g}%" and page.ask(shares)[4] == f"{100 * moved:.2g}%"
    assert column(page, "times", 3) == ["hopper", *["hopper / triton"] * 3]
    assert page.ask("document.getElementById('answer').textContent") == (
        "forward, bfloat16: faster than the fastest peer at 3 of 4 workloads, slower at 1; 1.40x in the median, "
        "from 0.80x at tri64 to 2.00x at msa_row."
    )
    expected = 64 * 4 * 64 * 64 / 1.05e-3 / 4e12
    assert page.ask("document.querySelector('#ceilings td').textContent") == f"{100 * expected:.2g}%"


def test_clicks_on_a_heading_sort_the_table(page: browser.Page) -> None:
    head = "document.querySelectorAll('#times thead th')[1]"
    page.ask(f"{head}.querySelector('button').click()")
    assert page.ask(f"{head}.getAttribute('aria-sort')") == "ascending"
    page.ask(f"{head}.querySelector('button').click()")
    assert page.ask(f"{head}.getAttribute('aria-sort')") == "descending"
    assert column(page, "times", 1) == ["2.00x", "1.60x", "1.20x", "0.80x"]
    flex_errors = "document.querySelector('#detail tbody tr:last-child th').textContent"
    page.ask("document.querySelectorAll('#detail thead button')[1].click()")
    assert page.ask(flex_errors) == "TriFast", "what is missing comes last"
    page.ask("document.querySelectorAll('#detail thead button')[1].click()")
    assert page.ask(flex_errors) == "TriFast", "in either order"


def test_choices_on_the_page_change_what_it_shows(page: browser.Page) -> None:
    choose(page, "#workload", "msa_row")
    assert "MSA row attention" in page.ask("document.getElementById('one-note').textContent")
    assert page.ask("document.querySelector('#detail tr.ours').lastChild.textContent") == "backend hopper, backward triton"
    check_radio(page, "pass", "both")
    assert page.ask("document.getElementById('answer').textContent").startswith("forward + backward, bfloat16: faster than")
    assert column(page, "times", 2)[0] == "4.00"
    check_radio(page, "dtype", "float16")
    assert column(page, "times", 2)[0] == "8.00"
    choose(page, "#against", "dense")
    assert column(page, "times", 1)[0] == "5.00x"
    choose(page, "#family", "msa_row")
    assert "One length only" in page.ask("document.getElementById('length-time').textContent")
    choose(page, "#family", "tri")
    check_radio(page, "dtype", "bfloat16")
    check_radio(page, "pass", "forward")
    choose(page, "#against", "best")
    choose(page, "#workload", "tri64")


def test_by_keyboard(page: browser.Page) -> None:
    """Tab reaches every control in order, Enter sorts, arrows switch, and what has the focus is seen."""
    page.ask("document.activeElement.blur(); window.scrollTo(0, 0)")
    seen = []
    for _ in range(12):
        page.press("Tab")
        seen.append(page.ask("document.activeElement.id || document.activeElement.name || document.activeElement.textContent"))
    assert seen[:5] == ["#overview", "theme", "dtype", "pass", "against"] or seen[1:5] == ["theme", "dtype", "pass", "against"]
    assert "speed-up" in seen
    page.ask("document.querySelectorAll('#times thead button')[0].focus()")
    page.press("Enter")
    assert column(page, "times", 0) == ["msa_row", "tri128", "tri64", "tri97"]
    assert page.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.ask("document.querySelector('input[name=pass]:checked').focus()")
    page.press("ArrowRight")
    assert page.ask("document.querySelector('input[name=pass]:checked').value") == "both"
    check_radio(page, "pass", "forward")


def test_light_dark_and_phone(page: browser.Page) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    page.show_as(1280, 900, "dark")
    assert page.ask(back) == "rgb(13, 17, 23)"
    page.ask("document.getElementById('theme').click()")
    assert page.ask(back) == "rgb(255, 255, 255)", "the button's light beats the system's dark"
    page.ask("document.getElementById('theme').click()")
    page.show_as(390, 844, "light")
    assert page.ask(back) == "rgb(13, 17, 23)", "and its dark the system's light"
    page.ask("document.getElementById('theme').click()")
    assert page.ask("document.documentElement.scrollWidth <= 390"), "a phone scrolls tables, not the page"
    assert page.ask("document.querySelector('.wide').scrollWidth > document.querySelector('.wide').clientWidth")
    assert page.screenshot().startswith(b"\x89PNG")
    page.show_as(1280, 900)


def test_an_empty_record_says_so(tmp_path: Path) -> None:
    if browser.executable() is None:
        pytest.skip("no browser on this machine")
    path = tmp_path / "a.html"
    empty = a_record()
    empty.problems.clear()
    path.write_text(report.page(empty))
    with browser.open_page(path, tmp_path / "profile") as page:
        assert page.complaints() == []
        assert "holds no problem" in page.ask("document.getElementById('state').textContent")
