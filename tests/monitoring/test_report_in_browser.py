"""The report in a real Chromium: drawn, silent, without network, for pointer and keyboard."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dg_lightning.cli import main

HOSTILE = "<script>window.broken=1</script>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real, short study, into whose files somebody has written hostile names."""
    pytest.importorskip("optuna", reason="needs the extra study")
    folder = tmp_path_factory.mktemp("study")
    config = folder / "study.yaml"
    config.write_text(
        "dataset: digits\npaper: mnist\nnotes: a < b\nvariants:\n  baseline: {}\n"
        "  dynamicgate: {options: [trainer.callbacks.weight=5.0]}\n"
        "  dynamicgate_input: {}\n"
    )
    options = ["--seeds=1", "--set=[trainer.max_epochs=3]", "--quiet"]
    out = folder / "out"
    main(["study", f"--config={config}", f"--output={out}", *options])
    results = out / "results.csv"
    lines = results.read_text().splitlines()
    lines.append(lines[-1].replace("dynamicgate_input", HOSTILE))
    results.write_text("\n".join(lines) + "\n")
    for name in ("confusion.csv", "config.yaml", "gates/layers.csv", "gates/units.csv"):
        path = out / "runs" / "dynamicgate" / "seed_0" / name
        path.write_text(
            path.read_text().replace("true class", HOSTILE).replace("hidden.1", HOSTILE)
        )
    main(["report", str(out), "--quiet"])
    return out / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


class Opened:
    """A page, and everything that it has complained about or asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")


@pytest.fixture(params=["desktop", "phone"])
def opened(request: pytest.FixtureRequest, browser: Any, study: Path) -> Iterator[Opened]:
    if request.param == "desktop":
        found = Opened(browser, study, viewport={"width": 1280, "height": 900})
    else:
        size = {"width": 390, "height": 844}
        found = Opened(browser, study, viewport=size, color_scheme="dark", has_touch=True)
    yield found
    found.page.close()


def test_no_console_error_no_request_and_everything_drawn(opened: Opened, study: Path) -> None:
    page = opened.page
    assert opened.complaints == []
    assert opened.requests == [study.as_uri()]
    for kind in ("points", "lines", "bars"):
        sizes = page.locator(f".chart.{kind} svg").evaluate_all(
            "all => all.map(svg => svg.getBBox().height)"
        )
        assert sizes, kind
        assert all(size > 50 for size in sizes)
    maps = page.locator(".map canvas").evaluate_all(
        """all => all.map(c => {
            const pixels = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
            const painted = pixels.filter((value, i) => i % 4 === 3 && value === 255).length;
            return [painted, c.width * c.height];
        })"""
    )
    assert len(maps) >= 8  # three and two gates over time, one as an image, classes, confusion
    assert all(painted == cells for painted, cells in maps)
    headings = page.locator("h2").all_inner_texts()
    assert headings == [
        "Accuracy against compute", "Summary", "Variants side by side", "Training curves",
        "Runs",
    ]  # fmt: skip
    parts = set(page.locator("h3").all_inner_texts())
    assert parts >= {"Results", "Open rates by layer", "Gate of inputs", "Schedules",
                     "Collapse log", "Compute by layer", "Confusion matrix"}  # fmt: skip


def test_nothing_is_wider_than_the_screen(opened: Opened) -> None:
    widths = opened.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]


def test_a_hostile_name_is_text(opened: Opened) -> None:
    assert opened.page.evaluate("window.broken") is None
    assert opened.page.locator("table").first.get_by_text(HOSTILE).count() == 1
    assert opened.page.locator("script").count() == 1
    assert opened.page.locator(".key", has_text=HOSTILE).count() >= 1
    assert opened.page.locator("h3", has_text=HOSTILE).count() == 1


def test_a_hover_shows_the_values_of_the_study_s_own_table(opened: Opened, study: Path) -> None:
    page = opened.page
    mark = page.locator(".chart.points [data-tip^='baseline:']")
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = page.locator("#tip")
    assert tip.is_visible()
    lines = (study.parent / "results.csv").read_text().splitlines()
    accuracy = float(next(line for line in lines if "baseline" in line).split(",")[3])
    assert f"baseline: {accuracy:.2%}" in tip.inner_text()
    page.mouse.move(0, 0)
    canvas = page.locator(".map canvas").first
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 5, "y": 5})
    assert tip.inner_text().startswith("true class 0, predicted class 0: ")


def test_the_keyboard_reaches_every_mark_and_the_screen_reader_hears_it(opened: Opened) -> None:
    page = opened.page
    chart = page.locator(".chart.points svg")
    chart.focus()
    tip = page.locator("#tip")
    heard = []
    for _ in range(page.locator(".chart.points [data-tip]").count()):
        page.keyboard.press("ArrowRight")
        heard.append(tip.inner_text())
    assert len(set(heard)) == len(heard) >= 5  # three of ours, and the paper's
    assert any("the paper: " in text for text in heard)
    assert tip.get_attribute("aria-live") == "polite"
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    canvas = page.locator(".map canvas").last
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert "true class 1, predicted class 0" in tip.inner_text()
    unnamed = page.evaluate(
        """[...document.querySelectorAll("[tabindex='0'], button, svg, canvas")].filter(
            e => !(e.getAttribute("aria-label") || e.textContent.trim())).length"""
    )
    assert unnamed == 0


def test_a_finger_that_taps_sees_values(browser: Any, study: Path) -> None:
    size = {"width": 390, "height": 844}
    page = Opened(browser, study, viewport=size, has_touch=True, is_mobile=True).page
    for what in (".chart.points [data-tip^='baseline:']", ".map canvas"):
        page.evaluate("document.getElementById('tip').hidden = true")
        target = page.locator(what).first
        target.scroll_into_view_if_needed()
        target.tap(force=True)
        assert page.locator("#tip").is_visible(), what
    page.close()


def test_a_click_on_a_head_sorts_the_rows_by_their_figures(opened: Opened) -> None:
    table = opened.page.locator("table").first
    head = table.locator("thead th", has_text="test accuracy")
    column = 1 + head.evaluate("cell => cell.cellIndex")
    for order, falls in (("descending", True), ("ascending", False)):
        head.locator("button").click()
        cells = table.locator(f"tbody tr > :nth-child({column})").all_inner_texts()
        figures = [float(cell.split("%")[0]) for cell in cells]
        assert figures == sorted(figures, reverse=falls)
        assert head.get_attribute("aria-sort") == order


def test_a_legend_switches_a_line_off_and_on(opened: Opened) -> None:
    page = opened.page
    chart = page.locator(".chart.lines").first
    series = chart.locator(".series").first
    key = chart.locator(".key").first
    assert series.is_visible()
    key.click()
    assert key.get_attribute("aria-pressed") == "false"
    assert not series.is_visible()
    key.click()
    assert series.is_visible()


def test_text_has_contrast_in_both_themes(browser: Any, study: Path) -> None:
    """At least 4.5 to 1, as the WCAG asks for; soft text and table heads included."""
    for scheme in ("light", "dark"):
        found = Opened(browser, study, color_scheme=scheme)
        ratios = found.page.evaluate(
            """() => {
                const level = (rgb) => rgb.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
                    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
                    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
                const ground = (e) => { for (; e; e = e.parentElement) {
                    const c = getComputedStyle(e).backgroundColor;
                    if (!c.endsWith(", 0)")) return c;
                } return "rgb(255, 255, 255)"; };
                return [...document.querySelectorAll("p, th, td, h1, h2, h3, svg text, .key")]
                    .filter(e => e.textContent.trim()).map(e => {
                        const style = getComputedStyle(e);
                        const ink = e.closest("svg") ? style.fill : style.color;
                        const pair = [level(ink), level(ground(e))].sort((a, b) => b - a);
                        return (pair[0] + .05) / (pair[1] + .05);
                    });
            }"""
        )
        found.page.close()
        assert len(ratios) > 100
        assert min(ratios) >= 4.5, scheme
