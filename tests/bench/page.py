"""Opens a report of `sdrun bench --export html` in a browser and checks what a reader sees.

    python page.py REPORT.html REPORT.json

Needs selenium, Chromium and its driver.
"""

import base64
import json
import sys
from pathlib import Path

from selenium import webdriver

# The contrast of each text against the nearest background, by WCAG 2.
CONTRAST = """
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (colour) => {
  const [r, g, b] = numbers(colour).map((c) => { const s = c / 255; return s <= 0.03928 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if ((numbers(colour)[3] ?? 1) > 0) return colour;
  }
  return "rgb(255, 255, 255)";
};
const poor = [];
for (const element of document.querySelectorAll("h1, h2, h3, p, th, td, li, figcaption, svg text")) {
  if (!element.textContent.trim()) continue;
  const style = getComputedStyle(element);
  const [a, b] = [light(element instanceof SVGElement ? style.fill : style.color), light(ground(element))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${element.textContent.slice(0, 30)}: ${((a + 0.05) / (b + 0.05)).toFixed(1)}`);
}
return poor;
"""

# Marks of plots that lie outside their picture.
OUTSIDE = """
return [...document.querySelectorAll("svg")].flatMap((picture) => {
  const box = picture.getBoundingClientRect();
  return [...picture.querySelectorAll("text, circle, rect")].filter((mark) => {
    const { left, right, top, bottom } = mark.getBoundingClientRect();
    return left < box.left - 1 || right > box.right + 1 || top < box.top - 1 || bottom > box.bottom + 1;
  }).map((mark) => `${mark.tagName} ${mark.textContent}`);
});
"""


def check(driver, report, theme, width):
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600})
    driver.refresh()
    for case in report["cases"]:
        title = f"{case['model']}, {case['precision']}"
        rows = driver.execute_script(
            "const s = [...document.querySelectorAll('section')].find((s) => s.querySelector('h2').textContent === arguments[0]);"
            "return s && [s.querySelectorAll('tbody tr').length, s.querySelectorAll('svg circle, svg rect, svg polyline').length]",
            title,
        )
        assert rows, f"no section {title!r}"
        ran = [row for row in case["rows"] if row["stats"]]
        assert rows[0] == len(case["rows"]), f"{title}: {rows[0]} rows instead of {len(case['rows'])}"
        assert (rows[1] > 0) == bool(ran), f"{title}: {rows[1]} marks in the plots of {len(ran)} systems"
    wide, room = driver.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room, f"{theme}: the page is {wide} px wide in {room} px"
    poor = driver.execute_script(CONTRAST)
    assert not poor, f"{theme}: poor contrast: {poor}"
    outside = driver.execute_script(OUTSIDE)
    assert not outside, f"{theme}, {width} px: outside of a plot: {outside}"


def main(page, document):
    report = json.loads(Path(document).read_text())
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options)
    try:
        driver.get(Path(page).resolve().as_uri())
        logs = driver.get_log("browser")
        assert not logs, logs
        for theme in ("light", "dark"):
            for width in (1280, 375):
                check(driver, report, theme, width)
        text = driver.find_element("tag name", "main").text
        for case in report["cases"]:
            for row in case["rows"]:
                assert row["system"] in text and (row["reason"] or "").split(": ", 1)[-1].split("\n")[0] in text, row["reason"]
        logs = driver.get_log("browser")
        assert not logs, logs
        pdf = base64.b64decode(driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
        assert pdf.startswith(b"%PDF") and len(pdf) > 10_000
    finally:
        driver.quit()
    print("the page is right")


if __name__ == "__main__":
    main(*sys.argv[1:])
