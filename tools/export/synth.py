"""The synthetic weight rule of core/weights/models/README.md in numpy: an independent second implementation of
core/weights/src/synthetic.rs, used to check exported graphs in another runtime."""

import numpy as np

MASK = (1 << 64) - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX = (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9), np.uint64(27), np.uint64(0x94D049BB133111EB), np.uint64(31))


def fnv1a64(text):
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


def uniform(key, count):
    """`count` float32 values in [-1, 1): SplitMix64 seeded with the FNV-1a hash of `key`, top 24 bits."""
    with np.errstate(over="ignore"):
        z = np.uint64(fnv1a64(key)) + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
        z = (z ^ (z >> MIX[0])) * MIX[1]
        z = (z ^ (z >> MIX[2])) * MIX[3]
        z = z ^ (z >> MIX[4])
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)


def weight(tag, name, shape, gain=1.0):
    """The float32 tensor `name` of checkpoint `tag`."""
    if not shape:
        return np.float32(1) * np.float32(gain)
    u = uniform(f"{tag}/{name}", int(np.prod(shape, dtype=np.int64)))
    if len(shape) >= 2:
        u *= np.float32(np.sqrt(np.float64(3) / np.float64(np.prod(shape[1:], dtype=np.int64))))
    elif name.rsplit(".", 1)[-1] in ("weight", "running_var"):
        u = u * np.float32(0.1) + np.float32(1)
    else:
        u *= np.float32(0.05)
    return (u * np.float32(gain)).reshape(shape)


def inputs(tag, name, shape):
    """Seeded activations of unit variance: the scaled sum of four uniforms."""
    count = int(np.prod(shape, dtype=np.int64))
    total = uniform(f"{tag}/{name}#0", count)
    for part in (1, 2, 3):
        total = total + uniform(f"{tag}/{name}#{part}", count)
    return (total * np.float32(np.sqrt(np.float64(0.75)))).reshape(shape)


def picture(tag, name, shape, low, high):
    """A seeded picture of shape [batch, channels, height, width] in [low, high]: as in photographs, most of the variance is in large
    areas (one colour per picture, 32-pixel blocks), the rest is noise. Networks that end in a global pooling cannot tell one picture of
    pure noise from another."""
    batch, channels, height, width = shape
    blocks = inputs(tag, f"{name}/blocks", (batch, channels, -(-height // 32), -(-width // 32)))
    blocks = blocks.repeat(32, axis=2).repeat(32, axis=3)[:, :, :height, :width]
    x = inputs(tag, f"{name}/colour", (batch, channels, 1, 1)) + np.float32(0.3) * blocks
    x = (x + np.float32(0.3) * inputs(tag, f"{name}/noise", shape)) * np.float32(np.sqrt(np.float64(1 / 1.18)))
    return np.float32(low) + (np.clip(x, -2, 2) + np.float32(2)) * np.float32((high - low) / 4)
