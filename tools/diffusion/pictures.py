"""Writes core/diffusion/testdata/pictures.json: what OpenCV, Pillow and the rules of A1111 and ComfyUI make of small pictures.

    pip install numpy opencv-python-headless==5.0.0.93 pillow==13.0.0
    python tools/diffusion/pictures.py core/diffusion/testdata/pictures.json

Bytes are hexadecimal digits, row by row. `bits` has one bit per pixel, the first of a byte highest.
"""

import json
import math
import sys

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageOps

RNG = np.random.default_rng(26)


def digits(values):
    return np.ascontiguousarray(values, dtype=np.uint8).tobytes().hex()


def sized(image):
    """A picture or mask as the file has it."""
    height, width = image.shape[:2]
    return {"width": width, "height": height, "bytes": digits(image)}


def noise(width, height, sigma=0.0):
    """Noise, smoothed and stretched to the whole range."""
    image = RNG.integers(0, 256, (height, width, 3)).astype(np.float32)
    if sigma:
        image = cv2.GaussianBlur(image, (0, 0), sigma)
        image = (image - image.min()) / (image.max() - image.min()) * 255
    return image.astype(np.uint8)


def shapes(width, height):
    """A gradient with a disc, a bar and lines in many directions."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    image = Image.fromarray((np.stack([x, y, 1 - x * y], axis=2) * 200).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    draw.ellipse((width * 0.1, height * 0.2, width * 0.5, height * 0.9), fill=(240, 30, 90))
    draw.rectangle((width * 0.6, height * 0.1, width * 0.8, height * 0.6), fill=(10, 220, 40))
    for angle in range(0, 180, 15):
        dx, dy = math.cos(math.radians(angle)) * 14, math.sin(math.radians(angle)) * 14
        draw.line((width * 0.75 - dx, height * 0.7 - dy, width * 0.75 + dx, height * 0.7 + dy), fill=(255, 255, 255))
    return np.asarray(image)


def blot(width, height):
    """A mask with a soft edge, a hard edge and a lone pixel."""
    mask = np.zeros((height, width), np.uint8)
    mask[height // 4 : height // 2, width // 5 : width // 2] = 255
    mask = cv2.GaussianBlur(mask, (0, 0), 1.5)
    mask[height // 2 :, width * 2 // 3 : width - 2] = 255
    mask[min(1, height - 1), width - 3] = 255
    return mask


def canny():
    images = [shapes(40, 32), noise(29, 25), noise(40, 27, 1.0), noise(31, 37, 2.0)]
    images += [noise(w, h) for w, h in [(1, 1), (1, 9), (9, 1), (2, 5), (3, 3)]]
    for image in images:
        grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
        edges = [
            {"low": low, "high": high, "bits": digits(np.packbits(cv2.Canny(grey, low, high) > 0))}
            for low, high in [(100, 200), (30, 60), (0, 0), (200, 400)]
        ]
        yield {"picture": sized(image), "grey": digits(grey), "edges": edges}


def blur():
    """A1111's `mask_blur`."""
    for mask, sigma in [(blot(40, 31), 1), (blot(40, 31), 4), (blot(23, 30), 16), (blot(9, 70), 64), (blot(33, 1), 2)]:
        size = 2 * int(2.5 * sigma + 0.5) + 1
        out = cv2.GaussianBlur(mask, (size, 1), sigma)
        yield {"mask": sized(mask), "sigma": sigma, "bytes": digits(cv2.GaussianBlur(out, (1, size), sigma))}


def grow():
    """ComfyUI's `grow_mask_by`: a box of ones around each pixel, the larger part to the left and above."""
    for by in [0, 1, 5, 6]:
        mask = blot(30, 22)
        out = mask
        if by:
            before = math.ceil((by - 1) / 2)
            padded = np.pad(mask >= 128, before)
            sums = cv2.filter2D(padded.astype(np.float32), -1, np.ones((by, by)), anchor=(0, 0), borderType=cv2.BORDER_CONSTANT)
            out = (sums[: mask.shape[0], : mask.shape[1]] > 0) * 255
        yield {"mask": sized(mask), "by": by, "bytes": digits(out)}


def latents():
    """diffusers makes masks binary and takes the nearest pixel. A1111 takes averages and rounds those."""
    mask = blot(48, 40)
    binary = (mask >= 128).astype(np.uint8)
    nearest = [
        {"height": h, "width": w, "bytes": digits(cv2.resize(binary, (w, h), interpolation=cv2.INTER_NEAREST))}
        for h, w in [(5, 6), (20, 24), (7, 11)]
    ]
    averages = [
        {"height": h, "width": w, "bytes": digits(np.around(cv2.resize(mask / 255, (w, h), interpolation=cv2.INTER_AREA)))}
        for h, w in [(5, 6), (20, 24)]
    ]
    return {"mask": sized(mask), "nearest": nearest, "averages": averages}


def regions():
    """A1111's region of "only masked": the box of a mask, padded, then grown to the ratio of the target where there is room."""
    for _ in range(250):
        width, height = (int(v) for v in RNG.integers(1, 200, 2))
        xs, ys = (np.sort(RNG.integers(0, side, 2)) for side in (width, height))
        box = [int(v) for v in (xs[0], ys[0], xs[1] + 1, ys[1] + 1)]
        padding = int(RNG.choice([0, 4, 32]))
        target = [int(v) * 8 for v in RNG.integers(1, 160, 2)]
        x0, y0 = max(box[0] - padding, 0), max(box[1] - padding, 0)
        x1, y1 = min(box[2] + padding, width), min(box[3] + padding, height)
        ratio = target[0] / target[1]
        if (x1 - x0) / (y1 - y0) > ratio:
            y0, y1 = longer(y0, y1, int((x1 - x0) / ratio - (y1 - y0)), height)
        else:
            x0, x1 = longer(x0, x1, int((y1 - y0) * ratio - (x1 - x0)), width)
        yield (width, height), box, padding, target, (x0, y0, x1, y1)


def longer(start, end, by, limit):
    """Adds pixels one by one, after and before in turn, then moves the whole into the picture and cuts what is left over."""
    for index in range(by):
        if (by - index) % 2:
            end += 1
        else:
            start -= 1
    while end > limit:
        start, end = start - 1, end - 1
    while start < 0:
        start, end = start + 1, end + 1
    return start, min(end, limit)


def fit():
    """A1111's resize modes, but the borders of mode 2 are the edge rows themselves.

    Without black and white: Pillow makes bytes of rows before it resizes columns, which cuts off what Lanczos3 overshoots.
    """
    soft = shapes(30, 24) // 2 + 60
    image = Image.fromarray(soft)
    cases = []
    for width, height in [(24, 24), (15, 24), (11, 9), (33, 13)]:
        wide = width / height > image.width / image.height
        by_width = (width, image.height * width // image.width)
        by_height = (image.width * height // image.height, height)
        modes = []
        for size in [(width, height), by_width if wide else by_height, by_height if wide else by_width]:
            resized = np.asarray(image.resize(size, Image.Resampling.LANCZOS))
            left, top = width // 2 - size[0] // 2, height // 2 - size[1] // 2
            rows = [min(max(y - top, 0), size[1] - 1) for y in range(height)]
            columns = [min(max(x - left, 0), size[0] - 1) for x in range(width)]
            modes.append(digits(resized[rows][:, columns]))
        cases.append({"width": width, "height": height, "modes": modes})
    return {"picture": sized(soft), "cases": cases}


def fill():
    """A1111's `fill`: from wide to narrow, blurs of what is not masked, laid over one another."""
    for image, mask in [(shapes(32, 24), blot(32, 24)), (noise(20, 20, 3.0), blot(20, 20))]:
        source = Image.new("RGBa", (image.shape[1], image.shape[0]))
        opaque = Image.fromarray(image).convert("RGBA").convert("RGBa")
        source.paste(opaque, mask=ImageOps.invert(Image.fromarray(mask)))
        out = Image.new("RGBA", source.size)
        for radius, times in [(256, 1), (64, 1), (16, 2), (4, 4), (2, 2), (0, 1)]:
            layer = source.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
            for _ in range(times):
                out.alpha_composite(layer)
        yield {"picture": sized(image), "mask": sized(mask), "bytes": digits(np.asarray(out.convert("RGB")))}


def outpaint():
    """The mask of ComfyUI's ImagePadForOutpaint."""
    for (width, height), (left, top, right, bottom), feather in [
        ((20, 16), (8, 0, 0, 0), 5),
        ((20, 16), (3, 4, 5, 6), 7),
        ((20, 16), (3, 4, 5, 6), 8),
        ((20, 16), (0, 8, 8, 0), 0),
        ((20, 16), (0, 0, 0, 0), 5),
    ]:
        mask = np.ones((height + top + bottom, width + left + right))
        y, x = np.mgrid[0:height, 0:width]
        far = np.full((height, width), 10**6)
        distance = np.minimum.reduce([
            y if top else far, height - y if bottom else far, x if left else far, width - x if right else far,
        ])
        room = 0 < 2 * feather < min(width, height)
        inner = np.clip(1 - distance / feather, 0, 1) ** 2 if room else np.zeros((height, width))
        mask[top : top + height, left : left + width] = inner
        yield {
            "width": width, "height": height, "sides": [left, top, right, bottom], "feather": feather,
            "bytes": digits(np.floor(mask * 255 + 0.5)),
        }


def main(path):
    out = {
        "canny": list(canny()),
        "blur": list(blur()),
        "grow": list(grow()),
        "latents": latents(),
        "regions": list(regions()),
        "fit": fit(),
        "fill": list(fill()),
        "outpaint": list(outpaint()),
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(out, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
