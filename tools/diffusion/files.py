"""Writes core/diffusion/testdata/pictures: small picture files as Pillow writes them, and their pixels and texts in pictures.json.

    pip install numpy pillow==13.0.0
    python tools/diffusion/files.py core/diffusion/testdata/pictures

Texts are those of A1111: text chunks in PNG files, the EXIF tag UserComment in others. Pixels are hexadecimal digits, row by row.
"""

import json
import pathlib
import sys
from xml.sax.saxutils import escape

import numpy as np
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

PARAMETERS = "猫, ein Bär\nNegative prompt: ☂\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 16x12"
SDCPP = "<lora:a:1> \"Bär\" &lt; 'x'\nSteps: 20, Seed: 1, Version: stable-diffusion.cpp"
EXIF, USER_COMMENT, ORIENTATION = 0x8769, 0x9286, 0x0112


def gradient(channels):
    """A smooth picture of 16 x 12 pixels, so that lossy formats keep it nearly."""
    y, x = np.mgrid[0:12, 0:16]
    planes = [x * 15, y * 20, 255 - x * 8 - y * 8, 90 + x * 5 + y * 7]
    return np.stack(planes[:channels], axis=-1).astype(np.uint8)


def text_chunks(text):
    info = PngInfo()
    info.add_text("parameters", text)
    return info


def exif(text, orientation=None):
    tags = Image.Exif()
    tags.get_ifd(EXIF)[USER_COMMENT] = b"UNICODE\0" + text.encode("utf-16-be")
    if orientation:
        tags[ORIENTATION] = orientation
    return tags


def xmp(text):
    """XMP as stable-diffusion.cpp writes it."""
    text = escape(text, {'"': "&quot;", "'": "&apos;"})
    return f"<x:xmpmeta><rdf:Description><sdcpp:parameters>{text}</sdcpp:parameters></rdf:Description></x:xmpmeta>".encode()


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    color = Image.fromarray(gradient(3))
    clear = Image.fromarray(gradient(4))
    grey = Image.fromarray(gradient(1)[..., 0])
    few = color.quantize(5)
    deep = Image.fromarray(gradient(1)[..., 0].astype(np.uint16) * 256 + 77)
    pictures = {
        "color.png": (color, {"pnginfo": text_chunks(PARAMETERS)}),
        "palette.png": (few, {"pnginfo": text_chunks("ein Bär"), "transparency": 2}),
        "deep.png": (deep, {}),
        "progressive.jpg": (color, {"quality": 95, "progressive": True, "exif": exif(PARAMETERS, 6)}),
        "grey.jpg": (grey, {"quality": 95, "exif": exif(PARAMETERS)}),
        "lossy.webp": (clear, {"quality": 95, "exif": exif(PARAMETERS)}),
        "lossless.webp": (color, {"lossless": True}),
        "sdcpp.webp": (color, {"quality": 95, "xmp": xmp(SDCPP)}),
    }
    expected = {}
    for name, (image, options) in pictures.items():
        image.save(folder / name, **options)
        read = Image.open(folder / name)
        comment = read.getexif().get_ifd(EXIF).get(USER_COMMENT, b"")
        text = SDCPP if "xmp" in options else read.info.get("parameters") or comment[8:].decode("utf-16-be")
        # Pillow's own conversion of 16 bits clips at 255.
        read = Image.fromarray(np.asarray(read) // 256).convert("L") if name == "deep.png" else ImageOps.exif_transpose(read)
        rgba = np.asarray(read.convert("RGBA"))
        height, width = rgba.shape[:2]
        expected[name] = {"width": width, "height": height, "rgba": rgba.tobytes().hex(), "text": text}
    (folder / "pictures.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


main(pathlib.Path(sys.argv[1]))
