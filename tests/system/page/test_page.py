"""The page at `/` in a real browser: an image goes in, and the boxes that a program gets are on the canvas."""

from base64 import b64encode
from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from PIL import Image
from playwright.async_api import Browser, Page, expect

from app.model.heads import HEADS
from tests.browser import opened
from tests.faults.serving import Gateway
from tests.support import json, sample_image
from tests.system.page.conftest import BOSS, KEY, SCENE, TURNED, ask, choose, enlarged_scene

pytestmark = pytest.mark.usefixtures("served")
TRANSPARENT, FILLED, LINE = 0, 102, 255

EDGES = """
    async ([boxes, size]) => {
      const canvas = document.getElementById("boxes");
      const context = canvas.getContext("2d");
      const pixel = (x, y) => [...context.getImageData(Math.round(x), Math.round(y), 1, 1).data];
      const [across, down] = [canvas.width / size.width, canvas.height / size.height];
      const inset = window.devicePixelRatio;  // the middle of a line of two CSS pixels that lies inside the box
      return boxes.map(({ x1, y1, x2, y2 }) => {
        const [left, top, right, bottom] = [x1 * across, y1 * down, x2 * across, y2 * down];
        const [x, y] = [(left + right) / 2, (top + bottom) / 2];
        return {
          edges: [pixel(left + inset, y), pixel(right - inset - 1, y), pixel(x, top + inset), pixel(x, bottom - inset - 1)],
          inside: pixel(x, y),
        };
      });
    }
"""
"""Reads the canvas in the middle of each edge of boxes, and inside them."""

ALPHAS = """
    ([points, size]) => {
      const canvas = document.getElementById("boxes");
      const [across, down] = [canvas.width / size.width, canvas.height / size.height];
      const context = canvas.getContext("2d");
      return points.map(([x, y]) => context.getImageData(Math.round(x * across), Math.round(y * down), 1, 1).data[3]);
    }
"""
"""Reads how opaque the canvas is at points of the image."""

SWATCHES = """
    (elements) => elements.map((element) => {
      const canvas = new OffscreenCanvas(1, 1);
      const context = canvas.getContext("2d");
      context.fillStyle = getComputedStyle(element).backgroundColor;
      context.fillRect(0, 0, 1, 1);
      return [...context.getImageData(0, 0, 1, 1).data];
    })
"""
"""Reads the colours of the classes in the list."""

CALL = """
    async ([url, method, key, image]) => {
      const body = image && Uint8Array.from(atob(image), (character) => character.charCodeAt(0));
      try {
        const response = await fetch(url, { method, headers: key ? { Authorization: `Bearer ${key}` } : {}, body });
        return [response.status, await response.json(), response.headers.has("X-Request-ID")];
      } catch (error) {
        return error.name;
      }
    }
"""
"""Makes a request, and returns what a page can read of the response, or the name of the browser's error."""


async def shown(page: Page) -> list[str]:
    return await page.locator("#detections button > span:nth-of-type(2)").all_inner_texts()


async def check_canvas(page: Page, answer: dict[str, Any]) -> None:
    """Check that the canvas has the boxes of an answer, each in the colour that the list has for it, and lies on the image."""
    found = answer["detections"]
    await expect(page.locator("#detections li")).to_have_count(len(found))
    assert await shown(page) == [detection["class_name"] for detection in found]
    colours = await page.locator("#detections .swatch").evaluate_all(SWATCHES)
    for seen, colour in zip(await page.evaluate(EDGES, [found, answer["image"]]), colours, strict=True):
        assert seen["edges"] == [colour] * 4
        assert seen["inside"][3] == TRANSPARENT
    canvas, image = await page.locator("#boxes").bounding_box(), await page.locator("#image").bounding_box()
    assert canvas is not None
    assert canvas == image
    assert canvas["width"] / canvas["height"] == pytest.approx(answer["image"]["width"] / answer["image"]["height"], rel=0.01)
    ratio = await page.evaluate("devicePixelRatio")
    assert await page.evaluate("document.getElementById('boxes').width") == round(canvas["width"] * ratio)


async def paste(page: Page, image: bytes) -> None:
    """Put it into the clipboard, which takes nothing but PNG, and press Ctrl-V."""
    file = BytesIO()
    with Image.open(BytesIO(image)) as decoded:
        decoded.save(file, "PNG")
    put = """(text) => {
      const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
      return navigator.clipboard.write([new ClipboardItem({ "image/png": new Blob([bytes], { type: "image/png" }) })]);
    }"""
    await page.evaluate(put, b64encode(file.getvalue()).decode())
    await page.keyboard.press("Control+V")


async def drop(page: Page, image: bytes) -> None:
    make = """(text) => {
      const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
      const transfer = new DataTransfer();
      transfer.items.add(new File([bytes], "scene.jpg", { type: "image/jpeg" }));
      return transfer;
    }"""
    transfer = await page.evaluate_handle(make, b64encode(image).decode())
    for event in ("dragenter", "dragover", "drop"):
        await page.dispatch_event("#stage", event, {"dataTransfer": transfer})


@pytest.mark.parametrize("hand_over", [choose, paste, drop])
async def test_an_image_gets_its_boxes(page: Page, gateway: Gateway, hand_over: Callable[[Page, bytes], Awaitable[None]]) -> None:
    answer = await ask(gateway, SCENE)
    await hand_over(page, SCENE)

    assert [found["class_name"] for found in answer["detections"]] == ["red", "blue"]
    await check_canvas(page, answer)
    await expect(page.get_by_role("status")).to_contain_text("2 objects · ")
    await expect(page.get_by_role("status")).to_contain_text("800 \u00d7 400 pixels · six_columns")
    await expect(page.get_by_role("img", name="Objects: red")).to_be_visible()


async def test_a_large_photo_may_be_sent_smaller(page: Page, gateway: Gateway) -> None:
    """It is stored turned: browser and gateway both apply its orientation. The boxes are drawn on the photo itself."""
    photo = enlarged_scene(orientation=TURNED, times=16)
    whole = await ask(gateway, photo)
    await choose(page, photo)
    await check_canvas(page, whole)
    async with page.expect_response("**/detect*") as responding:
        await page.get_by_label("Send").select_option("at most 1280 pixels, as JPEG")
    small = await (await responding.value).json()

    assert (whole["image"], small["image"]) == ({"width": 3200, "height": 1600}, {"width": 1280, "height": 640})
    for one, other in zip(small["detections"], whole["detections"], strict=True):
        assert [one[name] * 2.5 for name in ("x1", "y1", "x2", "y2")] == pytest.approx(
            [other[name] for name in ("x1", "y1", "x2", "y2")],
            abs=50,  # two pixels of the model
        )
    await expect(page.get_by_role("status")).to_contain_text("1280 \u00d7 640 pixels")
    await check_canvas(page, small)


async def test_confidence_overlap_and_classes_are_chosen_and_only_the_overlap_needs_another_request(
    page: Page, gateway: Gateway
) -> None:
    """The answer contains all detections above the lowest confidence."""
    asked: list[dict[str, list[str]]] = []
    page.on("request", lambda request: asked.append(parse_qs(urlsplit(request.url).query)) if "/detect?" in request.url else None)
    answer = await ask(gateway, SCENE)
    await choose(page, SCENE)
    await expect(page.locator("#detections li")).to_have_count(2)
    scores = [float(text.removesuffix(" %")) / 100 for text in await page.locator("#detections .score").all_inner_texts()]
    between = f"{(scores[0] + scores[1]) / 2:.2f}"
    await page.locator("#confidence").fill(between)
    await expect(page.locator("#detections li")).to_have_count(1)
    await expect(page.locator("#confidence-value")).to_have_text(between)
    await expect(page.locator("#code")).to_contain_text(f"confidence={float(between):g}")
    await page.locator("#confidence").fill("0.05")

    red = page.get_by_role("group", name="Classes to show").get_by_role("button", name="red")
    await red.click()
    await expect(red).to_have_attribute("aria-pressed", "false")
    seen = await page.evaluate(EDGES, [answer["detections"], answer["image"]])
    assert await shown(page) == ["blue"]
    assert [edge[3] for edge in seen[0]["edges"]] == [TRANSPARENT] * 4
    await red.click()
    await check_canvas(page, answer)

    assert [query["confidence"] for query in asked] == [["0.05"]]
    await page.get_by_label("Overlap (IoU), at most").focus()
    async with page.expect_response("**/detect*"):
        for _ in range(4):
            await page.keyboard.press("ArrowLeft")
    await expect(page.locator("#iou-value")).to_have_text("0.50")
    assert [query.get("iou") for query in asked] == [None, ["0.5"]]


async def test_another_model_can_be_chosen(page: Page, gateway: Gateway) -> None:
    await choose(page, SCENE)
    await expect(page.get_by_role("status")).to_contain_text("six_columns")
    select = page.get_by_label("Model")
    names = await select.locator("option").evaluate_all("(options) => options.map((option) => option.value)")
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        listed = json(await client.get("/models"))["models"]
    await select.select_option("yolo_head")

    await expect(page.get_by_role("status")).to_contain_text("yolo_head")
    assert names == [model["name"] for model in listed if model["state"] == "ready" and model["task"] in HEADS]
    assert await shown(page) == ["red", "blue"]


@pytest.mark.parametrize(
    ("task", "route", "shape", "expected"),
    [
        ("segmentation", "segment", {"mask": [[100, 100, 300, 100, 100, 300]]}, [FILLED, LINE, TRANSPARENT]),
        ("pose", "pose", {"keypoints": [{"x": 150, "y": 150, "confidence": 0.9, "name": "0"}]}, [LINE, LINE, TRANSPARENT]),
        ("obb", "obb", {"corners": [[100, 200], [200, 100], [300, 200], [200, 300]]}, [LINE, TRANSPARENT, TRANSPARENT]),
    ],
)
async def test_masks_keypoints_and_oriented_boxes_are_shown(  # noqa: PLR0913, PLR0917 - a case
    browser: Browser, gateway: Gateway, task: str, route: str, shape: dict[str, Any], expected: list[int]
) -> None:
    """Drawn is what the route of the model's task answers: at (150, 150), on the upper side of its box, and in a lower corner."""
    box = {"x1": 100, "y1": 100, "x2": 300, "y2": 300, "class_id": 0, "class_name": "red", "confidence": 0.9}
    model = {"name": "shapes", "task": task, "state": "ready", "width": 64, "height": 64}
    answer = {
        "detections": [{**box, **shape}],
        "image": {"width": 800, "height": 400},
        "model": {"name": "shapes"},
        "total_time_ms": 1,
    }
    async with opened(browser, "about:blank") as page:
        await page.route("**/models", lambda call: call.fulfill(json={"default": "shapes", "models": [model]}))
        await page.route(f"**/{route}?*", lambda call: call.fulfill(json=answer))
        await page.goto(gateway.url)
        await expect(page.get_by_label("Model")).to_have_value("shapes")
        await choose(page, SCENE)
        await expect(page.locator("#detections li")).to_have_count(1)
        await expect(page.locator("#code")).to_contain_text(f"/{route}?")
        seen = await page.evaluate(ALPHAS, [[[150, 150], [250, 101], [280, 280]], answer["image"]])

    assert [alpha if alpha in {TRANSPARENT, FILLED} else LINE for alpha in seen] == expected


@pytest.mark.usefixtures("networks")
async def test_a_sample_can_be_tried_without_a_mouse(browser: Browser, gateway: Gateway) -> None:
    async with opened(browser, gateway.url) as page:
        await page.get_by_label("Model").select_option("yolo11n")
        await page.evaluate("document.activeElement.blur()")

        async def focus(name: str) -> None:
            for _ in range(20):
                await page.keyboard.press("Tab")
                if await page.evaluate("document.activeElement.id || document.activeElement.innerText") == name:
                    return
                if name in await page.evaluate("document.activeElement.querySelector?.('img')?.alt ?? ''"):
                    return
            pytest.fail(f"Tab does not lead to {name}")

        await focus("Sample: a cat")
        assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        await page.keyboard.press("Enter")
        answer = await ask(gateway, sample_image("chelsea.jpg"), model="yolo11n")
        assert [found["class_name"] for found in answer["detections"]] == ["cat"]
        await check_canvas(page, answer)
        await focus("confidence")
        await page.keyboard.press("End")
        await expect(page.locator("#detections li")).to_have_count(0)
        await expect(page.get_by_text("No objects with this confidence.")).to_be_visible()


async def test_page_fits_a_phone_without_scrolling_sideways(browser: Browser, gateway: Gateway) -> None:
    size = {"width": 360, "height": 740}
    async with opened(browser, gateway.url, viewport=size, device_scale_factor=3, has_touch=True, is_mobile=True) as page:
        answer = await ask(gateway, SCENE)
        await choose(page, SCENE)
        await check_canvas(page, answer)

        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        async with page.expect_file_chooser() as chooser:
            await page.get_by_role("button", name="Take picture").tap()
        assert await (await chooser.value).element.get_attribute("capture") == "environment"


async def test_an_error_is_told_in_words(browser: Browser, gateway: Gateway) -> None:
    async with opened(browser, gateway.url, "415") as page:
        await choose(page, b"no image")
        await expect(page.get_by_role("alert")).to_contain_text("415 · unsupported_format · request ")
        await choose(page, SCENE)
        await expect(page.get_by_role("alert")).to_be_hidden()


async def test_failed_request_can_be_tried_again(browser: Browser, gateway: Gateway) -> None:
    async with opened(browser, "about:blank", "503", "ERR_FAILED") as page:
        unavailable = {"title": "Triton is not available", "detail": "it restarts", "code": "triton_unavailable"}
        await page.route("**/models", lambda route: route.fulfill(status=503, json=unavailable))
        await page.route("**/detect?*", lambda route: route.abort())
        await page.goto(gateway.url)
        alert = page.get_by_role("alert")
        await expect(alert).to_contain_text("it restarts")
        await choose(page, SCENE)
        await expect(alert).to_contain_text("The gateway cannot be reached")
        await page.unroute_all()
        await page.get_by_role("button", name="Try again").click()

        await expect(page.locator("#detections li")).to_have_count(2)
        await expect(alert).to_be_hidden()
        await expect(page.get_by_label("Model")).to_have_value("six_columns")


async def test_a_key_is_asked_for_where_one_is_needed(browser: Browser, keyed_gateway: Gateway) -> None:
    """The key is kept in memory only and is not part of the code."""
    async with opened(browser, keyed_gateway.url, "401") as page:
        await choose(page, SCENE)
        await expect(page.get_by_role("alert")).to_contain_text("A valid API key is needed")
        await page.get_by_label("API key").fill(KEY)
        await page.keyboard.press("Enter")
        await expect(page.locator("#detections li")).to_have_count(2)

        await expect(page.get_by_label("API key")).to_be_hidden()
        for language in ("JavaScript", "Python", "curl"):
            await page.get_by_role("button", name=language, exact=True).click()
            await expect(page.locator("#code")).to_contain_text("Authorization")
            await expect(page.locator("#code")).not_to_contain_text(KEY)
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert KEY not in await page.evaluate(kept)
        await page.reload()
        await expect(page.get_by_label("API key")).to_be_visible()


async def test_pages_of_listed_origins_read_all_but_changes_of_models_and_others_read_nothing(
    browser: Browser, keyed_gateway: Gateway, site: str
) -> None:
    """The same page under another name of the machine is of another origin."""
    refused, told = "TypeError", ("blocked by CORS policy", "ERR_FAILED")  # to the page, and in the console

    async def call(page: Page, method: str, path: str, key: str = "", image: bytes = b"") -> Any:  # noqa: ANN401
        return await page.evaluate(CALL, [keyed_gateway.url + path, method, key, b64encode(image).decode() or None])

    async with opened(browser, site, "401", *told) as page:
        found = await call(page, "POST", "/detect", KEY, SCENE)
        rejected = await call(page, "POST", "/detect", "camera.wrong", SCENE)
        models = await call(page, "GET", "/models", KEY)
        assert [await call(page, method, "/models/doors", BOSS) for method in ("POST", "DELETE")] == [refused] * 2
    async with opened(browser, site.replace("127.0.0.1", "localhost"), *told) as page:
        assert await call(page, "POST", "/detect", KEY, SCENE) == refused
        assert await call(page, "GET", "/") == refused  # without a preflight request

    assert [answer[::2] for answer in (found, rejected, models)] == [[200, True], [401, True], [200, True]]
    assert [detection["class_name"] for detection in found[1]["detections"]] == ["red", "blue"]
    assert rejected[1]["code"] == "unauthorized"
