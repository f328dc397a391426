"""The pages of the service in a real browser, and what they may load."""

import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest
import uvicorn

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.serving.app import create_app
from drm_triton.serving.pages import PAGES, page
from tests.conftest import HANG

TOKEN = "a-token-of-the-tests"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_loads_nothing_from_elsewhere(path: str) -> None:
    html, headers = page(path)
    assert not re.search(r"https?://|//cdn|@import|url\(|<iframe|<img|src=", html)
    assert re.findall(r'<link [^>]*href="([^"]*)"', html) == ["data:,"]
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert 'style="' not in html  # the policy would ignore it
    assert not re.search(r"\son\w+=", html)


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium, or skip the tests clearly where there is none."""
    found = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        pytest.skip("no Chromium: install it, or name its program in the variable CHROMIUM")
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with api.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def model() -> DRM:
    users, items = generate(Shape(users=60, items=50, interactions=900), 2)
    frame = pl.DataFrame({"user": [f"u/{u} &" for u in users], "item": items})
    data = Dataset.from_frame(frame, ratios=(1, 0, 0))
    titled = data.items.with_columns(title=pl.format("Sóng <b>No. {}</b>", "id"))
    return DRM(factors=4, epochs=2).fit(Dataset(data.train, data.valid, data.test, data.users, titled))


@pytest.fixture(scope="module")
def fitted() -> DRM:
    return model()


def served(app: Any) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def open_service(fitted: DRM) -> Iterator[str]:
    yield from served(create_app(fitted, "songs"))


@pytest.fixture(scope="module")
def closed_service(fitted: DRM) -> Iterator[str]:
    yield from served(create_app(fitted, "songs", token=TOKEN))


class Tab:
    """A tab of the browser that notes what must not happen: errors, and requests to others."""

    def __init__(self, browser: Any, base: str, width: int, scheme: str) -> None:
        self.base, self.problems = base, list[str]()
        self.page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page.set_default_timeout(1e3 * HANG)
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "request", lambda sent: None if sent.url.startswith((base, "data:")) else self.problems.append(sent.url)
        )

    def wait_for(self, selector: str, texts: list[object]) -> None:
        """Wait until these elements have these texts."""
        from playwright.sync_api import expect

        expect(self.page.locator(selector)).to_have_text([str(text) for text in texts], timeout=1e3 * HANG)

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def fits(self) -> bool:
        """Return whether nothing is wider than the window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_choose_items_and_see_recommendations(
    browser: Any, open_service: str, fitted: DRM, width: int, scheme: str
) -> None:
    tab = Tab(browser, open_service, width, scheme)
    page = tab.page
    page.goto(open_service + "/")
    page.locator("#results li").nth(19).wait_for()
    assert tab.texts("#model") == ["songs: drm, 50 items, 60 users"]
    page.get_by_label("Search items by title or id").fill("song <B>no. 1")
    page.get_by_text("11 found").wait_for()  # 1 and 10 to 19, without accents; titles are text, not markup
    page.locator("#results li button", has_text="No. 17").click()
    page.locator("#results li button", has_text="No. 12").click()
    assert tab.texts("#picked li") == ["Sóng <b>No. 17</b>", "Sóng <b>No. 12</b>"]
    want = fitted.recommend_from([[17, 12]], k=5)["item"].to_list()
    page.get_by_label("Items", exact=True).select_option("5")
    tab.wait_for("#recommendations .id", want)
    page.locator("#recommendations button").nth(1).click()
    page.locator("#similar-items li").nth(4).wait_for()
    near = fitted.similar_items([want[1]], k=5)["similar"].to_list()
    assert tab.texts("#similar-items .id") == [str(item) for item in near]
    assert tab.texts("#similar-title") == [f"Similar to Sóng <b>No. {want[1]}</b>"]
    page.get_by_role("button", name="Remove Sóng <b>No. 17</b>").click()
    want = fitted.recommend_from([[12]], k=5)["item"].to_list()
    tab.wait_for("#recommendations .id", want)
    assert tab.fits()
    assert tab.problems == []
    page.close()


def test_choose_a_user(browser: Any, open_service: str, fitted: DRM) -> None:
    tab = Tab(browser, open_service, 390, "light")
    page = tab.page
    page.goto(open_service + "/")
    page.get_by_role("tab", name="From items").press("ArrowRight")  # tabs work with the keyboard
    page.get_by_label("User id").fill("u/7 &")
    page.get_by_label("User id").press("Enter")
    page.locator("#recommendations li").nth(9).wait_for()
    want = [str(item) for item in fitted.recommend(["u/7 &"])["item"]]
    assert tab.texts("#recommendations .id") == want
    page.goto(page.url)  # the address names the user
    page.reload()
    page.locator("#recommendations li").nth(9).wait_for()
    assert tab.texts("#recommendations .id") == want
    assert tab.problems == []
    page.get_by_label("User id").fill("nobody")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("alert").filter(has_text="unknown user id: 'nobody'").wait_for()
    assert tab.texts("#recommendations li") == []
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_description_of_requests_sends_them(browser: Any, open_service: str, width: int) -> None:
    tab = Tab(browser, open_service, width, "dark")
    page = tab.page
    page.goto(open_service + "/docs")
    page.locator(".operation").nth(6).wait_for()
    shown = {" ".join(text.split()[:2]) for text in tab.texts(".operation summary")}
    assert {"GET /recommendations", "POST /recommendations", "GET /items", "GET /metrics"} <= shown
    page.locator("#GET-similar summary").click()
    form = page.get_by_role("form", name="GET /similar")
    form.get_by_label("item").fill("17")
    form.get_by_role("button", name="Send").click()
    form.locator("pre", has_text='"item": 17').wait_for()
    page.locator("#POST-recommendations summary").click()
    form = page.get_by_role("form", name="POST /recommendations")
    form.get_by_label("Body").fill('{"liked": [17], "k": 1}')
    form.get_by_role("button", name="Send").click()
    form.locator("pre", has_text='"unknown": []').wait_for()
    assert tab.fits()
    assert tab.problems == []
    page.close()


def test_pages_ask_for_the_token(browser: Any, closed_service: str) -> None:
    tab = Tab(browser, closed_service, 1280, "light")
    page = tab.page
    page.goto(closed_service + "/")
    page.get_by_label("This service needs a token").fill(TOKEN)
    page.get_by_role("button", name="Use").click()
    page.locator("#results li").nth(19).wait_for()
    page.get_by_role("link", name="Requests").click()
    page.locator(".operation").nth(6).wait_for()
    assert not page.get_by_label("This service needs a token").is_visible()
    page.close()
