"""Scenes of flat shapes: draws them, describes them in words, and reads them back from pictures.

Only numpy is needed. Lengths are in units of the picture's side; a picture is (SIDE, SIDE, 3) uint8.
"""

import zlib
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

SIDE = 64
COLOURS = {
    "red": (222, 42, 46),
    "green": (44, 160, 72),
    "blue": (48, 88, 222),
    "yellow": (246, 208, 40),
    "purple": (150, 58, 178),
    "orange": (242, 128, 28),
}
BACKGROUNDS = {"white": (246, 246, 246), "gray": (140, 144, 150), "black": (24, 24, 30), "pink": (248, 200, 214)}
SHAPES = ("circle", "square", "triangle", "star")
COUNTS = ("two", "three", "four")
SIZES = {"small": 0.12, "": 0.19, "large": 0.30}
PLACES = {
    "": (0.5, 0.5),
    "on the left": (0.26, 0.5),
    "on the right": (0.74, 0.5),
    "at the top": (0.5, 0.26),
    "at the bottom": (0.5, 0.74),
}
# The direction from the second object to the first.
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
GRIDS = {
    "two": ((0.26, 0.5), (0.74, 0.5)),
    "three": ((0.26, 0.28), (0.74, 0.28), (0.5, 0.73)),
    "four": ((0.26, 0.26), (0.74, 0.26), (0.26, 0.74), (0.74, 0.74)),
}
PAIR_RADIUS = 0.165
PAIR_REACH = 0.24  # Distance of each object of a pair from the middle.


@dataclass(frozen=True)
class Item:
    """One object: `x`, `y` is its middle, `radius` that of a circle of about the same area."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Prompt:
    """What a caption says: objects as (colour, shape), and how they stand."""

    kind: str  # "single", "count" or "relation"
    objects: tuple
    detail: str = ""  # the place, the number word or the relation
    size: str = ""
    background: str = ""  # empty: not named, drawn white

    def caption(self):
        if self.kind == "single":
            colour, shape = self.objects[0]
            words = [_a(self.size or colour), self.size, colour, shape, self.detail]
        elif self.kind == "count":
            colour, shape = self.objects[0]
            words = [self.detail, colour, shape + "s"]
        else:
            (c0, s0), (c1, s1) = self.objects
            words = [_a(c0), c0, s0, self.detail, _a(c1), c1, s1]
        if self.background:
            words += ["on a", self.background, "background"]
        return " ".join(word for word in words if word)

    def held_out(self):
        """Whether training must not see these objects in this arrangement (one in eight)."""
        key = f"{self.kind}|{self.objects}|{self.detail}|{self.size}"
        return zlib.crc32(key.encode()) % 8 == 0


def _a(word):
    return "an" if word == "orange" else "a"


def every_prompt(kind):
    """Every prompt of a kind, without background."""
    things = list(product(COLOURS, SHAPES))
    if kind == "single":
        for thing in things:
            yield from (Prompt(kind, (thing,), size=size) for size in SIZES)
            yield from (Prompt(kind, (thing,), detail=place) for place in PLACES if place)
    elif kind == "count":
        yield from (Prompt(kind, (thing,) * (n + 2), detail=word) for thing in things for n, word in enumerate(COUNTS))
    else:
        pairs = [pair for pair in product(things, things) if pair[0] != pair[1]]
        yield from (Prompt(kind, pair, detail=relation) for pair in pairs for relation in RELATIONS)


def place(prompt, rng):
    """The objects of `prompt`, at places drawn from `rng`."""

    def jitter(amount):
        return float(rng.uniform(-amount, amount))

    if prompt.kind == "single":
        x, y = PLACES[prompt.detail]
        radius = SIZES[prompt.size] if not prompt.detail else 0.18
        spots, shake = [(x, y)], 0.03
    elif prompt.kind == "count":
        spots, radius, shake = GRIDS[prompt.detail], PAIR_RADIUS, 0.02
    else:
        dx, dy = RELATIONS[prompt.detail]
        spots = [(0.5 + sign * PAIR_REACH * dx, 0.5 + sign * PAIR_REACH * dy) for sign in (1, -1)]
        radius, shake = PAIR_RADIUS, 0.02
    radius *= 1 + jitter(0.06)
    return [
        Item(colour, shape, x + jitter(shake), y + jitter(shake), radius)
        for (colour, shape), (x, y) in zip(prompt.objects, spots)
    ]


def place_freely(prompt, rng):
    """The objects of `prompt` anywhere, without overlap and whatever their relation: for ControlNet and autoencoder."""
    items = []
    for colour, shape in prompt.objects:
        for _ in range(100):
            radius = rng.uniform(0.12, 0.2)
            x, y = rng.uniform(1.25 * radius, 1 - 1.25 * radius, size=2)
            if all(np.hypot(x - i.x, y - i.y) > 1.3 * (radius + i.radius) for i in items):
                items.append(Item(colour, shape, float(x), float(y), float(radius)))
                break
        else:
            return place(prompt, rng)
    return items


class Sampler:
    """Draws training prompts and scenes: `kinds` gives each kind its share."""

    def __init__(self, seed, kinds=(("single", 0.3), ("count", 0.2), ("relation", 0.5))):
        self.rng = np.random.default_rng(seed)
        self.names = [name for name, _ in kinds]
        self.shares = [share for _, share in kinds]
        self.pools = {name: [p for p in every_prompt(name) if not p.held_out()] for name in self.names}

    def prompt(self):
        pool = self.pools[self.names[self.rng.choice(len(self.names), p=self.shares)]]
        chosen = pool[self.rng.integers(len(pool))]
        background = list(BACKGROUNDS)[self.rng.integers(4)] if self.rng.random() < 0.6 else ""
        return with_background(chosen, background)

    def scene(self):
        """A prompt and its objects."""
        prompt = self.prompt()
        return prompt, place(prompt, self.rng)


def with_background(prompt, background):
    return replace(prompt, background=background)


def unseen_prompts(count, seed=0):
    """`count` prompts that training never sees: a quarter single objects, a quarter counts, half relations."""
    rng = np.random.default_rng(seed)
    chosen = []
    for kind, share in (("single", count // 4), ("count", count // 4), ("relation", count - 2 * (count // 4))):
        pool = [with_background(p, b) for p in every_prompt(kind) if p.held_out() for b in ("", *BACKGROUNDS)]
        chosen += [pool[i] for i in rng.permutation(len(pool))[:share]]
    return chosen


def distance(shape, x, y, radius):
    """Signed distance to the outline of `shape` around the origin, negative inside; exact along its edges."""
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "square":
        return np.maximum(abs(x), abs(y)) - 0.89 * radius
    if shape == "triangle":
        inner = 0.72 * radius
        y = y - 0.22 * radius
        side = 0.8660254 * abs(x) - 0.5 * y - inner
        return np.maximum(side, y - inner)
    # A star: fold the plane onto half of one tip, then take the distance to that half's edge.
    outer, inner, half = 1.28 * radius, 0.62 * radius, np.pi / 5
    angle = np.arctan2(x, -y)
    angle = abs((angle + half) % (2 * half) - half)
    length = np.hypot(x, y)
    px, py = length * np.cos(angle), length * np.sin(angle)
    ex, ey = inner * np.cos(half) - outer, inner * np.sin(half)
    return ((px - outer) * ey - py * ex) / np.hypot(ex, ey)


def coverage(item, side=SIDE):
    """How much of each pixel the object covers: (side, side) in 0..1."""
    at = (np.arange(side, dtype=np.float32) + 0.5) / side
    return np.clip(0.5 - side * distance(item.shape, at[None] - item.x, at[:, None] - item.y, item.radius), 0, 1)


def draw(prompt, items, side=SIDE, outlined=False):
    """The picture, (side, side, 3) uint8. `outlined` is the LoRA's style: only the rim of each object is painted."""
    picture = np.empty((side, side, 3), np.float32)
    picture[:] = BACKGROUNDS[prompt.background or "white"]
    for item in items:
        cover = coverage(item, side)[..., None]
        if outlined:
            cover = cover - coverage(replace(item, radius=item.radius - 0.055), side)[..., None]
        picture += cover * (np.array(COLOURS[item.colour], np.float32) - picture)
    return (picture + 0.5).astype(np.uint8)


def components(mask):
    """Labels of the 4-connected regions of `mask`: (labels, 0 outside; number of regions)."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        grown = labels.copy()
        grown[1:] = np.maximum(grown[1:], labels[:-1])
        grown[:-1] = np.maximum(grown[:-1], labels[1:])
        grown[:, 1:] = np.maximum(grown[:, 1:], labels[:, :-1])
        grown[:, :-1] = np.maximum(grown[:, :-1], labels[:, 1:])
        grown[~mask] = 0
        if (grown == labels).all():
            break
        labels = grown
    found = [name for name in np.unique(labels) if name]
    return np.searchsorted(found, labels) * mask + mask, len(found)


def read(picture):
    """Reads a picture: (its background's name, its objects as `Item`s)."""
    side = picture.shape[0]
    pixels = picture.astype(np.float32)
    edge = np.concatenate([pixels[:2].reshape(-1, 3), pixels[-2:].reshape(-1, 3), pixels[:, :2].reshape(-1, 3)])
    ground = np.median(edge, axis=0)
    mask = np.abs(pixels - ground).max(axis=2) > 45
    labels, count = components(mask)
    items = []
    for label in range(1, count + 1):
        region = labels == label
        area = region.sum() / side**2
        if area < 0.008:
            continue
        ys, xs = np.nonzero(region)
        items.append(_fit(region, xs, ys, area, _nearest(np.median(pixels[region], axis=0), COLOURS)))
    return _nearest(ground, BACKGROUNDS), items


def _nearest(colour, palette):
    return min(palette, key=lambda name: np.abs(colour - np.array(palette[name])).sum())


def _fit(region, xs, ys, area, colour):
    """The shape whose drawing overlaps `region` best."""
    side = region.shape[0]
    x, y, radius = (xs.mean() + 0.5) / side, (ys.mean() + 0.5) / side, (area / np.pi) ** 0.5
    best = None
    for shape in SHAPES:
        cover = coverage(Item(colour, shape, 0.5, 0.5, radius), side) > 0.5
        cy, cx = np.nonzero(cover)
        scale = radius * (area * side**2 / len(cx)) ** 0.5
        middle_x, middle_y = x + 0.5 - (cx.mean() + 0.5) / side, y + 0.5 - (cy.mean() + 0.5) / side
        item = Item(colour, shape, float(middle_x), float(middle_y), float(scale))
        cover = coverage(item, side) > 0.5
        overlap = (cover & region).sum() / (cover | region).sum()
        if best is None or overlap > best[0]:
            best = overlap, item
    return best[1]


def score(prompt, picture):
    """What the picture gets right: colour, shape, count, background and, for two objects, relation."""
    ground, items = read(picture)
    wanted = prompt.objects
    marks = {
        "colour": sorted(i.colour for i in items) == sorted(c for c, _ in wanted),
        "shape": sorted(i.shape for i in items) == sorted(s for _, s in wanted),
        "count": len(items) == len(wanted),
        "background": ground == (prompt.background or "white"),
    }
    if prompt.kind == "relation":
        marks["relation"] = any(_related(prompt, a, b) for a in items for b in items if a is not b)
    return marks


def _related(prompt, first, second):
    dx, dy = RELATIONS[prompt.detail]
    reach = (first.x - second.x) * dx + (first.y - second.y) * dy
    things = ((first.colour, first.shape), (second.colour, second.shape))
    return things == prompt.objects and reach > 0.1
