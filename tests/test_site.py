"""The site, built without warnings and opened in a real browser, which may talk to nobody."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--window-size=1300,1500",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "The built site; myst-nb writes beside it, hence two folders deep."
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(out / "doctrees")]
    done = subprocess.run([*words, str(ROOT / "nbs"), str(out / "docs" / "html")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "docs" / "html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program, driver = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    os.environ.setdefault("SE_AVOID_STATS", "true")
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    found.set_page_load_timeout(300)
    found.get("about:blank")
    complaints(found)  # what the browser asked itself while it started
    yield found
    found.quit()


def wait(browser, script, seconds=60):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds).until(lambda b: b.execute_script(script))


def complaints(browser):
    "Errors on the console, and addresses outside the site, since the last call."
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return errors + [url for url in asked if urlsplit(url).scheme not in ("file", "data", "blob", "about")]


def pages():
    return sorted(p.stem for p in (ROOT / "nbs").glob("[0-9]*.ipynb"))


def test_every_chapter_has_a_page_with_its_api(site):
    for page in pages():
        text = (site / f"{page}.html").read_text(encoding="utf-8")
        assert "API of" in text and "default_exp" not in text and "#| export" not in text, page


def test_arguments_are_documented_from_their_comments(site):
    text = (site / "00_core.html").read_text(encoding="utf-8")
    assert "called with a binary file object" in text


def test_start_page_leads_to_every_chapter(site, browser):
    browser.get((site / "index.html").as_uri())
    assert "Zipformer Recipes" in browser.title
    links = browser.execute_script("return [...document.links].map(a => a.href.split('/').pop())")
    assert {f"{page}.html" for page in pages()} <= set(links)
    assert not complaints(browser)


def test_all_pages_are_quiet_and_show_their_plots(site, browser):
    plots = 0
    for page in pages():
        browser.get((site / f"{page}.html").as_uri())
        wait(browser, "return document.readyState == 'complete'")
        sizes = browser.execute_script("return [...document.querySelectorAll('article img')].map(i => i.naturalWidth)")
        assert all(width > 0 for width in sizes), f"{page}: a picture did not load"
        heading = browser.execute_script("return document.querySelector('article h1').textContent")
        assert heading and not complaints(browser), page
        plots += len(sizes)
    assert plots > 0


def test_search_finds_a_function(site, browser):
    browser.get((site / "search.html").as_uri() + "?q=atomic_write")
    found = wait(browser, "return [...document.querySelectorAll('#search-results li a')].map(a => a.href)")
    assert any("00_core.html" in href for href in found)
    assert not complaints(browser)


def test_search_of_nothing_finds_nothing(site, browser):
    browser.get((site / "search.html").as_uri() + "?q=qqxxzzqq")
    text = wait(browser, "return document.querySelector('#search-results').textContent.includes('did not match')")
    assert text
