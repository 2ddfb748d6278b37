#!/usr/bin/env python3
"""Checks sdrun's page in a headless Chromium against any server.

    page_test.py URL [--screenshots DIR] [--long-steps N] [--long-count N]

Prints one line per check; exits with 1 when one failed. Needs selenium,
chromium and chromedriver.
"""
import argparse, base64, sys, tempfile, time
from pathlib import Path
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

sys.path.append(str(Path(__file__).parent.parent))
import browser

# Keeps the orders that the page sends, and what the CSP refused.
SPY = """
window.__orders = []; window.__violations = [];
document.addEventListener("securitypolicyviolation", (e) => __violations.push(e.violatedDirective + " " + e.blockedURI));
const real = window.fetch;
window.fetch = (path, options) => {
  if (String(path).endsWith("/api/jobs") && options?.method === "POST") __orders.push(JSON.parse(options.body));
  return real(path, options);
};
"""


class Page:
    def __init__(self, url):
        self.driver = browser.start(SPY)
        self.url, self.logs, self.violations = url, [], []
        self.size(1280, 900)
        self.open()

    def open(self):
        self.driver.get(self.url)
        self.wait(lambda: self.js("return document.querySelector('#model').value !== ''"), "the models to load")
        self.wait(lambda: self.js("return document.querySelector('#width').placeholder !== ''"), "the model's usual values")

    def size(self, width, height):
        browser.size(self.driver, width, height)

    def theme(self, name):
        browser.theme(self.driver, name)

    def js(self, script, *args):
        return self.driver.execute_script(script, *args)

    def get(self, id):
        return self.driver.find_element(By.ID, id)

    def wait(self, condition, what, seconds=120):
        try:
            return WebDriverWait(self.driver, seconds, .1).until(lambda _: condition())
        except Exception as error:
            if "Timeout" in type(error).__name__:
                raise AssertionError(f"waited {seconds} s for {what}; the message is: {self.message()!r}") from None
            raise

    def fill(self, id, text):
        """Types into a field, opening what hides it."""
        field = self.get(id)
        self.js("for (let box = arguments[0].closest('details'); box; box = box.parentElement.closest('details')) box.open = true;", field)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(Keys.DELETE)
        field.send_keys(text)

    def press(self, selector):
        """Clicks, after bringing it clear of the bar."""
        element = self.driver.find_element(By.CSS_SELECTOR, selector)
        self.js("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", element)
        element.click()

    def draw(self, prompt, **fields):
        for id, text in {"prompt": prompt, **fields}.items():
            self.fill(id, str(text))
        self.get("draw").click()

    def message(self):
        return self.get("message").text

    def busy(self):
        return self.get("cancel").is_enabled()

    def result(self):
        return self.js("const r = document.querySelector('#result'); return r.complete && r.naturalWidth > 0 && r.checkVisibility() ? r.src : null")

    def pictures(self):
        return self.js("return document.querySelectorAll('#gallery li').length")

    def idle(self):
        self.wait(lambda: not self.busy(), "the job to end")

    def orders(self):
        return self.js("return window.__orders")

    def shot(self, folder, name):
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))

    def collect(self):
        self.logs += [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        self.violations += self.js("const v = window.__violations; window.__violations = []; return v")


def check_draw(page, folder):
    before = page.pictures()
    page.draw("a red circle left of a blue square", seed="7")
    page.wait(lambda: page.pictures() > before, "a picture in the gallery")
    page.wait(page.result, "the picture in #result")
    page.idle()
    assert page.orders()[-1]["seed"] == 7, page.orders()
    page.first = page.result()
    page.shot(folder, "drawn")


def check_cancel(page, folder):
    page.draw("a green square", steps=page.long_steps, count=page.long_count, seed="")
    page.wait(page.busy, "the job to start")
    time.sleep(1.5)
    page.shot(folder, "progress")
    assert page.get("progress").is_displayed(), "no progress bar"
    page.get("cancel").click()
    page.wait(lambda: "cancelled" in page.message().lower(), "the message")
    page.idle()
    page.fill("steps", "")
    page.fill("count", "")


def check_others(page, folder):
    """A reload finds this tab's own job again. The job of somebody else is not the page's to cancel."""
    other = page.driver.execute_async_script("""
        const done = arguments[1];
        const headers = { "Content-Type": "application/json" };
        const body = JSON.stringify({ prompt: "a red square", steps: arguments[0], count: 64 });
        fetch("/api/jobs", { method: "POST", headers, body }).then((r) => r.json()).then((job) => done(job.id));""",
        page.long_steps)
    page.open()
    page.wait(lambda: page.get("draw").is_enabled(), "the page")
    time.sleep(1)
    assert not page.busy(), "the page follows the job of somebody else"
    page.draw("a green circle", steps=page.long_steps, count=page.long_count, seed="")
    page.wait(page.busy, "the job to wait")
    page.open()
    page.wait(page.busy, "the job after a reload")
    page.get("cancel").click()
    page.wait(lambda: "cancelled" in page.message().lower(), "the message")
    state = page.driver.execute_async_script("""
        const done = arguments[1], job = `/api/jobs/${arguments[0]}`;
        fetch(job).then((r) => r.json()).then(({ state }) =>
          fetch(`${job}/cancel`, { method: "POST" }).then(() => done(state)));""", other)
    assert state == "running", f"the other job is {state}"
    page.idle()
    page.fill("steps", "")
    page.fill("count", "")


def check_restore(page, folder):
    data = page.driver.execute_async_script("""
        const done = arguments[1];
        fetch(arguments[0]).then((r) => r.blob()).then((blob) => {
          const reader = new FileReader();
          reader.onload = () => done(reader.result.split(",")[1]);
          reader.readAsDataURL(blob);
        });""", page.first)
    for id in ("prompt", "seed"):
        page.fill(id, "1")
    with tempfile.TemporaryDirectory() as box:
        file = Path(box) / "drawn.png"
        file.write_bytes(base64.b64decode(data))
        page.get("restore-file").send_keys(str(file))
        page.wait(lambda: page.get("seed").get_attribute("value") == "7", "the seed in the form")
    prompt = page.get("prompt").get_attribute("value")
    assert prompt == "a red circle left of a blue square", prompt


def check_keyboard(page, folder):
    page.open()
    page.js("document.activeElement.blur(); window.getSelection().removeAllRanges()")
    page.driver.execute_cdp_cmd("Page.bringToFront", {})
    page.get("prompt").clear()
    page.js("document.activeElement.blur()")
    page.js("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    seen = []
    for _ in range(80):
        ActionChains(page.driver).send_keys(Keys.TAB).perform()
        seen.append(page.js("return document.activeElement.id"))
        if seen[-1] == "draw":
            break
    assert "prompt" in seen and "draw" in seen, f"Tab reached only {seen}"
    assert seen.index("prompt") < seen.index("draw"), seen
    before = page.pictures()
    page.get("prompt").send_keys("a blue circle")
    page.get("prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    page.wait(lambda: page.pictures() > before, "a picture after Ctrl+Enter")
    page.idle()


def check_phone(page, folder):
    page.size(375, 800)
    page.open()
    page.js("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    wide, room = page.js("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    small = page.js("""return [...document.querySelectorAll("button, select, input:not([type=file], [type=checkbox]), textarea, summary, .file, .check")]
        .filter((e) => e.checkVisibility()).map((e) => [e.id || e.textContent.trim().slice(0, 20), e.getBoundingClientRect()])
        .filter(([, box]) => box.height < 40 || box.width < 40).map(([name, box]) => `${name} ${box.width}x${box.height}`)""")
    page.size(1280, 900)
    assert wide <= room, f"the page is {wide} px wide in {room} px"
    assert not small, f"touch targets under 40 px: {small}"


def check_mask(page, folder):
    data = page.js("""
        const c = Object.assign(document.createElement("canvas"), { width: 64, height: 64 });
        const x = c.getContext("2d"); x.fillStyle = "#c33"; x.fillRect(0, 0, 64, 64); x.fillStyle = "#33c"; x.fillRect(20, 20, 24, 24);
        return c.toDataURL("image/png").split(",")[1]""")
    with tempfile.TemporaryDirectory() as box:
        file = Path(box) / "start.png"
        file.write_bytes(base64.b64decode(data))
        page.get("start-file").send_keys(str(file))
        page.wait(lambda: page.get("mask-canvas").is_displayed(), "the mask canvas")
    canvas = page.get("mask-canvas")
    page.js("arguments[0].scrollIntoView({ block: 'center' })", canvas)
    ActionChains(page.driver).move_to_element_with_offset(canvas, -50, 0).click_and_hold().move_by_offset(50, 20).move_by_offset(50, -20).release().perform()
    page.shot(folder, "mask")
    page.draw("a yellow square")
    page.wait(page.busy, "the job to start", 20)
    start = page.orders()[-1].get("start") or {}
    page.idle()
    assert start.get("picture"), "the order has no start picture"
    assert start.get("mask"), "the order has no mask"
    white = page.driver.execute_async_script("""
        const done = arguments[1], image = new Image();
        image.onload = () => {
          const c = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
          const x = c.getContext("2d"); x.drawImage(image, 0, 0);
          const d = x.getImageData(0, 0, c.width, c.height).data;
          let white = 0; for (let i = 0; i < d.length; i += 4) if (d[i] > 127) white++;
          done(white / (d.length / 4));
        };
        image.src = arguments[0];""", start["mask"])
    assert 0.02 < white < 0.6, f"{white:.0%} of the mask is white"
    assert "error" not in page.get("message").get_attribute("innerHTML"), page.message()
    page.press("#start-remove")


def check_gallery(page, folder):
    page.open()
    page.wait(page.result, "the pictures after a reload")
    page.press("#gallery button")
    page.wait(lambda: page.js("return document.querySelector('#viewer-image').naturalWidth > 0"), "the large picture")
    page.shot(folder, "viewer")
    assert page.get("viewer-parameters").text, "no settings text"
    page.get("viewer-again").click()
    page.wait(lambda: page.get("seed").get_attribute("value") != "", "the seed in the form")
    assert not page.get("viewer").is_displayed(), "the dialog is still open"


def check_quiet(page, folder):
    page.collect()
    assert not page.violations, page.violations
    assert not page.logs, [entry["message"] for entry in page.logs]


CHECKS = [
    ("a prompt and Draw give a picture", check_draw),
    ("Cancel stops a long job and says so", check_cancel),
    ("Jobs of others go on", check_others),
    ("a picture's settings come back", check_restore),
    ("the keyboard is enough", check_keyboard),
    ("a phone shows it without sideways scroll", check_phone),
    ("a painted mask goes with the order", check_mask),
    ("the gallery outlives a reload; Again fills the form", check_gallery),
    ("no console errors and no CSP violations", check_quiet),
]


def portraits(page, folder):
    for theme in ("light", "dark"):
        page.theme(theme)
        for width, height in ((1280, 900), (375, 800)):
            page.size(width, height)
            page.js("scrollTo(0, 0); document.querySelector('#fields').scrollTop = 0")
            time.sleep(.3)
            page.shot(folder, f"page-{width}-{theme}")
            if width < 600:
                page.js("document.querySelector('#stage').scrollIntoView({ block: 'start' })")
                time.sleep(.3)
                page.shot(folder, f"stage-{width}-{theme}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--screenshots", metavar="DIR")
    parser.add_argument("--long-steps", type=int, default=150, help="steps of the job that is cancelled")
    parser.add_argument("--long-count", type=int, default=16, help="and its pictures")
    args = parser.parse_args()
    page, failed = Page(args.url), 0
    page.long_steps, page.long_count = args.long_steps, args.long_count
    try:
        for name, check in CHECKS:
            try:
                check(page, args.screenshots)
                print(f"ok    {name}", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAIL  {name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}", flush=True)
                page.shot(args.screenshots, f"failed-{check.__name__}")
            page.collect()
        if args.screenshots:
            portraits(page, args.screenshots)
    finally:
        page.driver.quit()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
