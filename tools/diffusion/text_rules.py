"""The rules of A1111 and ComfyUI for chunks and weights, written from their descriptions. text.py uses them."""

import itertools
import random

import torch

WORDS = (
    "a the of in and with cat dog castle forest mountain river portrait painting photograph light shadow golden silver detailed "
    "masterpiece quality style watercolour engraving cyberpunk steampunk robot dragon knight princess wizard street night rain "
    "neon reflection bokeh macro aerial landscape ocean sunset clouds dramatic cinematic 35mm 8k hdr rendering sculpture marble "
    "impressionism baroque minimalism symmetrical intricate ornate elegant vibrant muted pastel monochrome vintage futuristic"
).split()

# Embeddings that the prompts of the chunks name.
EMBEDDINGS = [("nice", 2), ("easynegative", 6), ("nice eyes", 3), ("long-one", 40), ("style", 1)]


def chunk_prompts():
    """Pieces of text with weights; None is BREAK."""
    rng = random.Random(23)
    words = lambda count, comma: ("".join(rng.choice(WORDS[:-3]) + (", " if rng.random() < comma else " ") for _ in range(count)),)
    cat = lambda count: "cat " * count
    fixed = [
        [("", 1.0)], [("a cat", 1.0)], [(cat(75), 1.0)], [(cat(76), 1.0)], [(cat(74) + ",", 1.0)], [(cat(75) + ",", 1.0)],
        [(cat(54) + "," + cat(20) + "dog", 1.0)], [(cat(55) + "," + cat(19) + "dog", 1.0)], [(cat(56) + "," + cat(18) + "dog dog", 1.0)],
        [(cat(60) + "," + cat(14) + ", dog", 1.0)], [("a", 1.0), None, ("b", 1.0)], [None, ("b", 1.0)], [("b", 1.0), None],
        [(cat(75), 1.0), None, ("dog", 1.2)], [("a", 1.0), None, None, ("b", 1.0)], [("a EasyNegative, nice eyes dog", 1.3)],
        [(cat(70) + "easynegative", 1.0)], [(cat(69) + "easynegative", 1.0)], [(cat(40) + "long-one", 0.8), (" style", 1.1)],
        [(cat(60) + ", style nice eyes" + cat(10) + "dog", 0.9)], [(cat(68) + ", nice eyes style " + cat(5), 1.5)],
        [("nice", 1.0), (" eyes", 1.0)], [("cat,", 0.5), (cat(80), 1.2), (", dog", 1.0)],
    ]  # fmt: skip
    varied = []
    for _ in range(24):
        pieces = []
        for _ in range(rng.randint(1, 6)):
            pieces.append((words(rng.randint(1, 40), rng.choice([0.02, 0.1, 0.5]))[0], rng.choice([1.0, 1.0, 1.1, 0.7])))
            if rng.random() < 0.15:
                pieces.append(None)
            if rng.random() < 0.3:
                pieces.append((rng.choice(EMBEDDINGS)[0], rng.choice([1.0, 1.21])))
        varied.append(pieces)
    return fixed + varied


def find_embeddings(clip, pieces):
    """Tokens (id, weight, embedding and vector), embeddings as lists of them; None is BREAK."""
    ids = lambda text: clip(text, add_special_tokens=False)["input_ids"]
    names = sorted(((ids(name), index) for index, (name, _) in enumerate(EMBEDDINGS)), key=lambda pair: -len(pair[0]))
    result = []
    for piece in pieces:
        if piece is None:
            result.append(None)
            continue
        text, weight = piece
        left = ids(text)
        while left:
            index = next((index for name, index in names if left[: len(name)] == name), None)
            if index is None:
                result.append((left.pop(0), weight, None))
            else:
                result.append([(0, weight, (index, vector)) for vector in range(EMBEDDINGS[index][1])])
                del left[: len(ids(EMBEDDINGS[index][0]))]
    return result


def a1111(clip, pieces):
    """75 tokens per chunk. A full chunk ends behind its last comma if that is among its last 20 tokens."""
    comma = clip(",", add_special_tokens=False)["input_ids"][0]
    chunks, chunk = [], []
    for item in find_embeddings(clip, pieces):
        if item is None:
            chunks.append(chunk)
            chunk = []
            continue
        new = item if isinstance(item, list) else [item]
        if len(chunk) == 75:
            commas = [at for at, (token, _, place) in enumerate(chunk) if token == comma and place is None]
            keep = 75
            if commas and commas[-1] >= 55 and item[0] != comma:
                keep = commas[-1] + 1
            chunks.append(chunk[:keep])
            chunk = chunk[keep:]
        if len(chunk) + len(new) > 75:
            chunks.append(chunk)
            chunk = []
        chunk = chunk + new
    return chunks + [chunk] if chunk or not chunks else chunks


def comfy_weights(text, weight=1.0):
    """Pieces of text with weights. Only whole brackets count."""
    result, plain, position = [], "", 0
    # ComfyUI's count of open brackets may fall below zero, where brackets are text until it returns to zero.
    level = 0
    while position < len(text):
        escaped = text[position] == "\\" and text[position + 1 : position + 2] in ("(", ")")
        if escaped:
            plain += text[position : position + 2]
            position += 2
            continue
        char = text[position]
        if char == "(" and level == 0:
            result.append(plain)
            plain = ""
        level += {"(": 1, ")": -1}.get(char, 0)
        plain += char
        if char == ")" and level == 0:
            result.append(plain)
            plain = ""
        position += 1
    result.append(plain)
    pieces = []
    for item in result:
        if len(item) > 1 and item[0] == "(" and item[-1] == ")" and item[-2] != "\\":
            inner, new = item[1:-1], weight * 1.1
            before, colon, number = inner.rpartition(":")
            try:
                if before:
                    inner, new = before, float(number)
            except ValueError:
                inner = item[1:-1]
            pieces += comfy_weights(inner, new)
        elif item:
            pieces.append((item.replace("\\(", "(").replace("\\)", ")"), weight))
    return pieces


def comfy(clip, text):
    """Chunks, and names that are unknown. Text of one weight is a group, an embedding too; groups below 8 tokens stay whole."""
    ids = lambda text: clip(text, add_special_tokens=False)["input_ids"]
    sizes = {name: (index, size) for index, (name, size) in enumerate(EMBEDDINGS)}
    groups, missing = [], []
    for segment, weight in comfy_weights(text):
        for number, part in enumerate(segment.replace("\nembedding:", " embedding:").split(" embedding:")):
            if number == 0 and part.startswith("embedding:"):
                number, part = 1, part[len("embedding:") :]
            if number > 0:
                name, *rest = part.split()
                part = " ".join(rest)
                if name not in sizes and name.endswith(","):
                    part = "," * (len(name) - len(name.rstrip(","))) + " " + part
                    name = name.strip(",")
                if name in sizes:
                    index, size = sizes[name]
                    groups.append([(0, weight, (index, vector)) for vector in range(size)])
                else:
                    missing.append(name)
            groups.append([(token, weight, None) for token in ids(part)])
    chunks, chunk = [], []
    for group in groups:
        small = len(group) < 8
        while group:
            free = 75 - len(chunk)
            if len(group) <= free:
                chunk, group = chunk + group, []
            else:
                taken = 0 if small else free
                chunks.append(chunk + group[:taken])
                chunk, group = [], group[taken:]
    return chunks + [chunk], missing


COMFY_PROMPTS = [
    "", "a cat", "a (cat) and (dog:1.3)", "((a (b:0.5) c):1.2) d", r"\(literal\) (x\):1.4)", "a) (b) c", "(a", "(a:b:1.5)", "(:1.2) x",
    "(a:x)", "embedding:easynegative", "a embedding:easynegative, b", "(embedding:style:1.2) embedding:long-one x",
    "a embedding:unknown b", "x embedding:nothing, y", "a\nembedding:style b", "notembedding:style", "cat " * 75, "cat " * 76,
    "cat " * 72 + "(one two three four:1.1) five", "cat " * 72 + "(one two three four five six seven eight nine:1.1) ten",
    "cat " * 70 + "(" + "dog " * 7 + ":1.1)", "cat " * 70 + "(" + "dog " * 8 + ":1.1)", "cat " * 71 + "embedding:easynegative", "cat " * 60 + "(dog " + "bird " * 30 + ":0.7)" + " embedding:long-one embedding:long-one",
    "(" * 6 + "deep" + ")" * 6 + " end", "a(b)c(d)", "()", "(a)(b:2)(c:0)", "caf\u00e9 (na\u00efve:1.25), \U0001f600",
]  # fmt: skip


def written(chunks, pad):
    """Chunks with marks: ids, weights as runs, places of vectors."""
    ids, weights, places = [], [], []
    for chunk in chunks:
        ids.append([49406] + [token for token, _, _ in chunk] + [49407] + [pad] * (75 - len(chunk)))
        row = [1.0] + [weight for _, weight, _ in chunk] + [1.0] * (76 - len(chunk))
        weights.append([[weight, len(list(run))] for weight, run in itertools.groupby(row)])
        places.append([[at + 1, *place] for at, (_, _, place) in enumerate(chunk) if place])
    return {"ids": ids, "weights": weights, "vectors": places}


def chunks(clip):
    cases = []
    for index, pieces in enumerate(chunk_prompts()):
        pad = [49407, 0][index % 2]
        cases.append({"rules": "a1111", "pieces": pieces, "pad": pad} | written(a1111(clip, pieces), pad))
        if index % 6 == 0:
            tokens = [token for item in find_embeddings(clip, pieces) if item for token in (item if isinstance(item, list) else [item])]
            case = {"rules": "diffusers", "pieces": pieces, "pad": pad, "lost": max(len(tokens) - 75, 0)}
            cases.append(case | written([tokens[:75]], pad))
    for index, text in enumerate(COMFY_PROMPTS):
        pad = [49407, 0][index % 2]
        result, missing = comfy(clip, text)
        case = {"rules": "comfy", "prompt": text, "pieces": comfy_weights(text), "pad": pad, "missing": missing}
        cases.append(case | written(result, pad))
    return {"embeddings": EMBEDDINGS, "cases": cases}


def emphasis():
    """Weighted hidden states by the rules of A1111 and ComfyUI."""
    generator = torch.Generator().manual_seed(5)
    states, empty = torch.randn(2, 77, 3, generator=generator).double() + 0.2
    weights = torch.ones(77, dtype=torch.float64)
    weights[1:9] = torch.tensor([1.1, 1.1, 0.5, 1.6, 1.0, 0.0, 1.331, -0.4])
    column = weights[:, None]
    multiplied = states * column
    results = {
        "no_norm": multiplied,
        "original": multiplied * states.mean() / multiplied.mean(),
        "comfy": torch.lerp(empty, states, column),
    }
    inputs = {"states": states, "empty": empty, "weights": weights}
    return {name: rounded(tensor) for name, tensor in (inputs | results).items()}


def rounded(tensor):
    return [float(f"{value:.7g}") for value in tensor.flatten().tolist()]
