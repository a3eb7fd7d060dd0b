"""The pages in a real browser: nothing on its console, nothing wider than the screen, light and dark."""

import shutil
import threading
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from sft_play.commands.compare import compare_command
from sft_play.commands.report import write_report
from sft_play.runlog import RunDir, append_metrics
from sft_play.studio.server import serving
from tests.unit.report.written_run import (
    ATTACK,
    SECTIONS,
    begin,
    finish,
    finished,
    held,
    train,
    written_later,
)

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
    browser.get(page if isinstance(page, str) else page.as_uri())


def brightness(colour: str) -> float:
    """The mean of the channels of `rgb(1, 2, 3)`."""
    return sum(map(float, colour[colour.index("(") + 1 : -1].split(",")[:3])) / 3


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["whole", "half", "compared"])
def test_a_page_is_readable(browser, pages, name, width, theme):
    opened(browser, pages[name], width, theme)
    assert_readable(browser, width, theme, drawn=True)


def assert_readable(browser, width: int, theme: str, *, drawn: bool) -> None:
    """What is on the screen; `drawn`: whether plots are."""
    assert browser.get_log("browser") == []
    root = "document.documentElement"
    assert browser.execute_script(f"return [innerWidth, {root}.scrollWidth]") == [width, width]
    page, ink = browser.execute_script(
        "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
    )
    assert abs(brightness(page) - brightness(ink)) > 150
    assert (brightness(page) < 128) is (theme == "dark")
    if not drawn:
        return
    label = browser.execute_script("return getComputedStyle(document.querySelector('svg text')).fill")
    assert abs(brightness(page) - brightness(label)) > 150
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


PLAN = "/plan?model=meta-llama/Llama-3.2-1B&gpu=NVIDIA+L4&gpus=1&method=lora"


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> RunDir:
    """A run of five steps, beside four that are finished."""
    folder = tmp_path_factory.mktemp("studio")
    for name in ("one", "two", LONG, ATTACK.replace("/", "_")):
        finished(folder / name)
    return train(begin(folder / "live"), steps=5)


@pytest.fixture(scope="module")
def studio(live) -> Iterator[str]:
    """The address of a studio of these runs, while another process has the first."""
    with held(live), serving(live.path.parent, port=0) as server:
        written_later(live.plan)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.port}"
        server.shutdown()


def until(condition, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def text(browser) -> str:
    return browser.execute_script("return document.body.innerText")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", ["/", "/runs/live", "/runs/one", "/compare?run=one&run=live", "/plan", PLAN])
def test_a_page_of_the_studio_is_readable(browser, studio, page, width, theme):
    opened(browser, studio + page, width, theme)
    if page == PLAN:
        until(lambda: "fits on 1 x NVIDIA L4" in text(browser), timeout_s=180)
    assert_readable(browser, width, theme, drawn=page not in ("/", "/plan"))


def test_names_of_people_lead_to_their_runs_and_run_nothing(browser, studio):
    name = ATTACK.replace("/", "_")
    opened(browser, f"{studio}/", 1280, "light")
    link = browser.find_element("link text", name)
    assert link.get_attribute("href") == f"{studio}/runs/{quote(name)}"
    link.click()
    until(lambda: browser.title == name and "Before and after training" in text(browser))
    with pytest.raises(Exception, match="no such alert"):
        _ = browser.switch_to.alert


def test_the_list_updates_itself_and_marked_runs_stay_marked(browser, studio, live):
    opened(browser, f"{studio}/", 1280, "light")
    for name in ("one", "two"):
        browser.find_element("css selector", f"input[value={name}]").click()
    browser.execute_script("window.loaded = 1; document.querySelector('input[value=two]').focus()")
    append_metrics(live, {"step": 6, "train/loss": 0.125, "speed/step_seconds": 0.6})
    until(lambda: "step 6 of 20" in text(browser))
    script = "return [window.loaded, document.activeElement.value, document.querySelector('progress').value]"
    assert browser.execute_script(script) == [1, "two", 0.3]
    browser.find_element("css selector", "#runs button").click()
    until(lambda: browser.title == "one, two" and "Key numbers" in text(browser))


def test_curves_of_a_run_grow_until_it_ends_and_what_is_unfolded_stays_so(browser, tmp_path):
    run = train(begin(tmp_path / "live"), steps=5)
    with serving(tmp_path, port=0) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        with held(run):
            written_later(run.plan)
            opened(browser, f"http://127.0.0.1:{server.port}/runs/live", 1280, "light")
            assert "Running: step 5 of 20" in text(browser)
            browser.execute_script(
                "window.loaded = 1; document.querySelectorAll('details').forEach(one => one.open = true);"
                "window.memory = document.querySelector('#memory'); scrollTo(0, 400)"
            )
            hints = "return document.querySelectorAll('#training .hint').length"
            before = browser.execute_script(hints)
            train(run, steps=9)
            until(lambda: "step 9 of 20" in text(browser))
            assert browser.execute_script(hints) > before
            kept = "return [window.loaded, window.memory.isConnected, scrollY]"
            assert browser.execute_script(kept) == [1, True, 400]
        finish(run)
        until(lambda: "Done." in text(browser))
        assert browser.execute_script(
            "return [window.loaded, document.querySelector('#memory details').open]"
        ) == [1, True]
        assert browser.get_log("browser") == []
        browser.get(f"http://127.0.0.1:{server.port}/")
        server.shutdown()
    assert not browser.find_element("id", "stale").is_displayed()
    until(lambda: browser.find_element("id", "stale").is_displayed())
    browser.get_log("browser")  # that the server was not reached
