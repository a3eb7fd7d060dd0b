"""The pages in a real browser: nothing on its console, nothing wider than the screen, light and dark."""

import shutil

import pytest

from sft_play.commands.compare import compare_command
from sft_play.commands.report import write_report
from tests.unit.report.written_run import ATTACK, SECTIONS, begin, finished, train

pytestmark = pytest.mark.browser

LONG = "a" * 99
MISSING = "{} is not installed; run: {}"


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window, driven by Selenium."""
    reason = MISSING.format("selenium", ".venv/bin/python -m pip install --editable '.[browser]'")
    webdriver = pytest.importorskip("selenium.webdriver", reason=reason)
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        pytest.skip(MISSING.format("Chromium", "apt-get install chromium chromium-driver"))
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found[1]))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict:
    """The pages of a finished run, of a half-done one with a long name, and of both side by side."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [finished(folder / ATTACK.replace("/", "_")), train(begin(folder / LONG), steps=7)]
    whole, half = (write_report(run.path) for run in runs)
    return {
        "whole": whole,
        "half": half,
        "compared": compare_command([run.path.name for run in runs], folder)[1],
    }


def opened(browser, page, width: int, theme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


def brightness(colour: str) -> float:
    """The mean of the channels of `rgb(1, 2, 3)`."""
    return sum(map(float, colour[colour.index("(") + 1 : -1].split(",")[:3])) / 3


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["whole", "half", "compared"])
def test_a_page_is_readable(browser, pages, name, width, theme):
    opened(browser, pages[name], width, theme)
    assert browser.get_log("browser") == []
    root = "document.documentElement"
    assert browser.execute_script(f"return [innerWidth, {root}.scrollWidth]") == [width, width]
    page, ink, label = browser.execute_script(
        "const style = (name) => getComputedStyle(document.querySelector(name));"
        "return [style('body').backgroundColor, style('body').color, style('svg text').fill]"
    )
    assert abs(brightness(page) - brightness(ink)) > 150 and abs(brightness(page) - brightness(label)) > 150
    assert (brightness(page) < 128) is (theme == "dark")
    smallest = browser.execute_script(
        "return Math.min(...[...document.querySelectorAll('svg text')].map(text => "
        "Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b) * parseFloat(getComputedStyle(text).fontSize)))"
    )
    assert smallest >= 9


def test_all_sections_are_shown_and_no_text_of_a_person_runs(browser, pages):
    opened(browser, pages["whole"], 1280, "light")
    heights = browser.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('section')].map(s => [s.id, s.offsetHeight]))"
    )
    assert tuple(sorted(heights)) == tuple(sorted(SECTIONS)) and min(heights.values()) > 60
    assert browser.title == ATTACK.replace("/", "_")
    assert browser.execute_script("return document.scripts.length") == 0
    with pytest.raises(Exception, match="no such alert"):
        _ = browser.switch_to.alert


def test_labels_of_a_plot_do_not_overlap(browser, pages):
    opened(browser, pages["whole"], 390, "light")
    overlaps = browser.execute_script(
        """
        const overlaps = [];
        for (const svg of document.querySelectorAll("svg")) {
          const boxes = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
          boxes.forEach(([one, a], index) => boxes.slice(index + 1).forEach(([other, b]) => {
            if (a.left < b.right && b.left < a.right && a.top < b.bottom - 1 && b.top < a.bottom - 1)
              overlaps.push([svg.getAttribute("aria-label"), one, other]);
          }));
        }
        return overlaps;
        """
    )
    assert overlaps == []
