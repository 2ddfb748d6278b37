#!/usr/bin/env python3
"""Opens a report of `sdrun bench --export html` in a headless Chromium and checks what a reader sees.

    page.py REPORT.html [REPORT.json] [--screenshots DIR]

Without the JSON file, the report inside the page says what must be shown. Prints one line per check; exits with 1 when
one failed. Needs selenium, chromium and chromedriver.
"""
import argparse, base64, json, re, sys, zlib
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
import browser

# Keeps the errors and what the CSP refused.
SPY = """
window.__faults = [];
addEventListener("error", (e) => __faults.push(e.message));
addEventListener("unhandledrejection", (e) => __faults.push(String(e.reason)));
document.addEventListener("securitypolicyviolation", (e) => __faults.push(e.violatedDirective + " " + e.blockedURI));
"""

# Elements with a text of their own whose contrast with the nearest background is below 4.5 (WCAG 2).
CONTRAST = """
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (colour) => {
  const [r, g, b] = numbers(colour).slice(0, 3).map((c) => { const s = c / 255; return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if ((numbers(colour)[3] ?? 1) > 0) return colour;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "rgb(0, 0, 0)" : "rgb(255, 255, 255)";
};
const poor = [];
let seen = 0;
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  if (!own || element.closest("script, noscript, title, desc, defs")) continue;
  seen += 1;
  const style = getComputedStyle(element);
  const colour = element instanceof SVGElement ? style.fill : style.color;
  const [a, b] = [light(colour), light(ground(element))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5 || (numbers(colour)[3] ?? 1) < 1) poor.push(`${element.textContent.trim().slice(0, 30)}: ${ratio.toFixed(1)}`);
}
return [seen, poor];
"""

# Parts of plots that lie outside their picture, and texts of a plot that cover each other.
MISPLACED = """
return [...document.querySelectorAll("figure svg")].flatMap((picture) => {
  const box = picture.getBoundingClientRect(), found = [];
  for (const part of picture.querySelectorAll("text, circle, rect, path, polyline, line")) {
    const { left, right, top, bottom } = part.getBoundingClientRect();
    if (left < box.left - 2 || right > box.right + 2 || top < box.top - 2 || bottom > box.bottom + 2)
      found.push(`outside: ${part.tagName} ${part.textContent}`);
  }
  const texts = [...picture.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  texts.forEach(([text, a], at) => texts.slice(at + 1).forEach(([other, b]) => {
    if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4) found.push(`"${text}" covers "${other}"`);
  }));
  return found.map((what) => `${picture.querySelector("title").textContent}: ${what}`);
});
"""

# What a case's section shows.
SECTION = """
const section = document.getElementById(`case-${arguments[0]}`);
const heads = (selector) => [...section.querySelectorAll(selector)];
return section && {
  heading: section.querySelector("h2")?.textContent,
  rows: heads("tbody tr").map((row) => row.querySelector("th")?.textContent),
  scopes: heads("thead th").every((th) => th.scope === "col") && heads("tbody th").every((th) => th.scope === "row"),
  plots: heads("figure").map((figure) => [figure.querySelector("h3").textContent,
    figure.querySelectorAll("svg circle, svg rect, svg path, svg polyline").length,
    figure.querySelector("svg[role=img] > title") !== null && figure.querySelector("svg[role=img] > desc")?.textContent.length > 0]),
  text: section.innerText,
};
"""


class Page:
    def __init__(self, file):
        self.driver = browser.start(SPY)
        self.address = Path(file).resolve().as_uri()
        self.faults = []

    def open(self, theme, width):
        browser.theme(self.driver, theme)
        browser.size(self.driver, width, 900)
        self.driver.get(self.address)

    def js(self, script, *args):
        return self.driver.execute_script(script, *args)

    def shot(self, folder, name):
        """The whole page, not only what the window shows."""
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            data = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"})["data"]
            (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(data))

    def collect(self):
        self.faults += [entry["message"] for entry in self.driver.get_log("browser")] + self.js("return window.__faults")


def name_of(row):
    return f"({row['system']})" if row["kind"] == "baseline" else row["system"]


def check_cases(page, report):
    """Every case has a heading, a table with its rows, and plots with marks if something ran."""
    for at, case in enumerate(report["cases"]):
        seen = page.js(SECTION, at)
        assert seen, f"case {at} has no section"
        title = f"{case['model']}, {case['precision']}"
        assert seen["heading"].startswith(title), f"{title}: the heading is {seen['heading']!r}"
        assert sorted(seen["rows"]) == sorted(map(name_of, case["rows"])), f"{title}: the table has {seen['rows']}"
        assert seen["scopes"], f"{title}: table headers without scope"
        timed = [row for row in case["rows"] if row["stats"]]
        assert bool(seen["plots"]) == bool(timed), f"{title}: {len(seen['plots'])} plots of {len(timed)} systems that ran"
        for plot, marks, words in seen["plots"]:
            assert marks > 0, f"{title}: {plot} has no marks"
            assert words, f"{title}: {plot} has no title and description for screen readers"
        for row in case["rows"]:
            reason = (row["reason"] or "").removeprefix(f"{row['system']}: ").split("\n")[0].strip()
            assert reason in seen["text"], f"{title}: {row['system']}'s reason is missing: {reason}"
            for warning in row["warnings"]:
                assert warning in seen["text"], f"{title}: {row['system']}'s warning is missing: {warning}"


def check_width(page, report):
    """Nothing makes the page scroll sideways."""
    wide, room = page.js("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room, f"the page is {wide} px wide in {room} px"


def check_contrast(page, report):
    """Every text can be read."""
    seen, poor = page.js(CONTRAST)
    assert seen > 10, f"only {seen} texts"
    assert not poor, f"poor contrast: {poor[:10]}"


def check_plots(page, report):
    """Plots keep their parts inside, and their texts apart."""
    misplaced = page.js(MISPLACED)
    assert not misplaced, misplaced[:10]


def check_headings(page, report):
    """Headings go down one level at a time, and no id occurs twice."""
    levels = page.js("return [...document.querySelectorAll('h1, h2, h3, h4')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1 and all(b <= a + 1 for a, b in zip(levels, levels[1:])), levels
    twice = page.js("const ids = [...document.querySelectorAll('[id]')].map((e) => e.id); return ids.filter((id, at) => ids.indexOf(id) < at)")
    assert not twice, twice


CHECKS = [check_cases, check_width, check_contrast, check_plots, check_headings]


def check_print(page, report, folder):
    """The PDF has text, at least a page for each case, and nothing is cut off at the right."""
    page.open("dark", 1280)
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    # The width of A4 without the margins.
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": 703, "height": 1032, "deviceScaleFactor": 1, "mobile": False})
    page.js("dispatchEvent(new Event('beforeprint'))")
    paper, ink = page.js("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
    assert (paper, ink) == ("rgb(255, 255, 255)", "rgb(0, 0, 0)"), f"prints {ink} on {paper}"
    cut = page.js("return [...document.querySelectorAll('table, figure')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1).length")
    assert not cut, f"{cut} tables or plots are wider than the paper"
    check_contrast(page, report)
    check_plots(page, report)
    page.js("dispatchEvent(new Event('afterprint'))")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    pdf = base64.b64decode(page.driver.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True, "printBackground": False})["data"])
    if folder:
        (Path(folder) / "print.pdf").write_bytes(pdf)
    assert pdf.startswith(b"%PDF"), pdf[:20]
    streams = []
    for found in re.finditer(rb"stream\r?\n(.*?)endstream", pdf, re.S):
        try:
            streams.append(zlib.decompress(found[1]))
        except zlib.error:
            continue
    texts = sum(len(re.findall(rb"T[jJ]\b", stream)) for stream in streams)
    assert texts > 20, f"the PDF has only {texts} pieces of text"
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    assert pages > len(report["cases"]), f"{pages} pages for {len(report['cases'])} cases"


def check_quiet(page):
    page.collect()
    assert not page.faults, page.faults


def attempt(name, check, *args):
    """Runs a check, says how it went, and returns whether it failed."""
    try:
        check(*args)
        print(f"ok    {name}", flush=True)
        return 0
    except Exception as error:
        print(f"FAIL  {name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}", flush=True)
        return 1


def words(check):
    return check.__doc__.strip().splitlines()[0].rstrip(".")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("page")
    parser.add_argument("report", nargs="?")
    parser.add_argument("--screenshots", metavar="DIR")
    args = parser.parse_args()
    page, failed = Page(args.page), 0
    try:
        for theme in ("light", "dark"):
            for width in (1280, 375):
                page.open(theme, width)
                inside = json.loads(page.js("return document.getElementById('report').textContent"))
                report = json.loads(Path(args.report).read_text()) if args.report else inside
                assert report == inside, "the page holds another report"
                for check in CHECKS:
                    failed += attempt(f"{theme}, {width} px: {words(check)}", check, page, report)
                page.shot(args.screenshots, f"{theme}-{width}")
                page.collect()
        failed += attempt(f"print: {words(check_print)}", check_print, page, report, args.screenshots)
        failed += attempt("no console errors and no CSP violations", check_quiet, page)
    finally:
        page.driver.quit()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
