"""Writes core/diffusion/testdata/text: what other programs make of prompts.

    pip install torch transformers==4.57.3 diffusers==0.36.0 sentencepiece
    python tools/diffusion/text.py core/diffusion/src/text/tokenizer/clip_merges.txt.xz core/diffusion/testdata/text

CLIP's ids come from transformers' Python tokenizer, T5's from SentencePiece with two small models that this program trains, Gemma's
from transformers with a small vocabulary of the form of its own, trained here too.
"""

import contextlib
import copy
import html
import inspect
import itertools
import json
import lzma
import os
import random
import shutil
import sys
import tempfile
import types
import unicodedata

import sentencepiece
import text_rules
import tokenizers
import torch
from diffusers import (
    ChromaPipeline,
    FluxPipeline,
    PixArtSigmaPipeline,
    SanaPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from transformers import (
    BatchEncoding,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from text_rules import WORDS, rounded
from transformers.models.clip.tokenization_clip import bytes_to_unicode

# Texts that tokenizers get wrong.
HARD = [
    "", " ", "\n\t", "a", "A", "A person riding a motorcycle", "Hi there", "hello world!?", "it's we're I'll they've I'm he'd don't",
    "IT'S A TEST'S", "1234567890", "3.14, 1,000 and 5th", "a,b,,c , d", "...", "!!!???", "(a:1.2) [b] {c|d}", "under_score-and-hyphen",
    "snake_case CamelCase kebab-case", "<lora:name:0.8>", "http://example.com/a?b=c&d=e#f", "me@example.com", "C++ & C# / F#",
    "caf\u00e9", "cafe\u0301", "\u00c9COLE \u00dcBER stra\u00dfe STRASSE", "\u0130stanbul", "\u039f\u0394\u03a5\u03a3\u03a3\u0395\u03a5\u03a3 \u03a3", "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440", "\u4f60\u597d\u4e16\u754c", "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "\ud55c\uad6d\uc5b4", "\u0645\u0631\u062d\u0628\u0627", "\u05e9\u05dc\u05d5\u05dd", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22", "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea flag",
    "\u2764\ufe0f heart", "cat\U0001f431cat", "\ufb01ne \ufb02ow", "\uff21\uff22\uff23\uff11\uff12\uff13", "\u2460\u2461 \u2167 \u00bd \u00b2", "a\u00a0b\u2003c\u3000d", "\u200bzero\u200bwidth",
    "tab\there\nnew\r\nline", "a\u0000b\u0007c", "\ufeffbom", "\u201cquotes\u201d \u2018single\u2019 \u2014 dash \u2026", "&amp; &lt;b&gt; &quot;x&quot;", "&amp;amp; &amp;lt;",
    "&eacute;t&eacute; &copy; &#233; &#xe9; &nbsp;x", "&notanentity; & &;", "&AMP &lt", "&hearts;&amp;hearts;", "&notit; &timesb;", "&#128; &#x110000; &#0;",
    "<|startoftext|>", "a<|endoftext|>b", "<|ENDOFTEXT|> c", "<|endoftext", "</w> a</w>", "</s> <pad> <unk>", "\u2581word \u2581", "<extra_id_0>", "<0x41>",
    "supercalifragilisticexpialidocious", "pneumonoultramicroscopicsilicovolcanoconiosis", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "zzzzqqqq xjkw", "\u0101\u0103\u0105\u0107 \u0142\u00f3d\u017a", "x\u0302\u0304y", "\u212b \u2126 \uf900", "\u1e9b\u0323", "\U0001d54f\U0001d538", "\ue000\U0010ffff", "\u0660\u0661\u0662 \u0967\u0968",
    "a  b   c", "  lead and trail  ", "trailing,", ",leading", "a\\(b\\)", "100% $5 \u20ac10 #tag @name *bold* ~x~ `code` ^ | \\ /",
]


def prompts():
    """Hard texts, and 150 that look like what people write."""
    rng = random.Random(7)
    texts = list(HARD)
    for index in range(150):
        words = rng.choices(WORDS, k=rng.randint(2, 14))
        if index % 5 == 0:
            words = [rng.choice([str.upper, str.title, str.lower])(word) for word in words]
        joints = [rng.choice([" ", " ", ", ", ",", "-", ". ", " (", ") ", "'s ", ":1.2 ", "\n"]) for _ in words]
        if index % 7 == 0:
            words[0] = rng.choice(HARD)
        texts.append("".join(itertools.chain.from_iterable(zip(words, joints))))
    texts.append(" ".join(rng.choices(WORDS, k=300)))
    return texts


def clip_tokenizer(merges):
    """transformers' tokenizer with the vocabulary that the merges imply, and OpenAI's cleaning but for the rest of ftfy."""
    pairs = [line.split() for line in merges.splitlines()]
    symbols = list(bytes_to_unicode().values())
    symbols += [symbol + "</w>" for symbol in symbols] + ["".join(pair) for pair in pairs]
    symbols += ["<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ("vocab.json", "merges.txt")]
        with open(paths[0], "w") as file:
            json.dump({symbol: index for index, symbol in enumerate(symbols)}, file)
        with open(paths[1], "w") as file:
            file.write("#version: 0.2\n" + merges)
        tokenizer = CLIPTokenizer(*paths, model_max_length=77)
    tokenizer.fix_text = lambda text: unicodedata.normalize("NFC", html.unescape(html.unescape(text)))
    return tokenizer


def train(path, folder, **options):
    """Trains a small SentencePiece model on random prompts. Its map of characters holds NFKC of some blocks of Unicode."""
    rng = random.Random(11)
    corpus = os.path.join(folder, "corpus.txt")
    with open(corpus, "w") as file:
        for _ in range(4000):
            endings = ["", "", "", "s", "ing", "ed", "like", "est", "wards", "ness"]
            words = [word + rng.choice(endings) for word in rng.choices(WORDS, k=8)]
            words.append(rng.choice(WORDS) + rng.choice(WORDS))
            file.write(" ".join(words) + rng.choice([".", "!", ", caf\u00e9 \u043c\u0438\u0440", ""]) + "\n")
    rules = os.path.join(folder, "rules.tsv")
    blocks = [range(0xA0, 0x180), range(0x2000, 0x2010), range(0x2460, 0x2474), range(0x3000, 0x3001), range(0xFB00, 0xFB07)]
    blocks.append(range(0xFF01, 0xFF5F))
    with open(rules, "w") as file:
        for code in itertools.chain(*blocks):
            new = unicodedata.normalize("NFKC", chr(code))
            if new != chr(code):
                file.write(f"{code:X}\t{' '.join(f'{ord(c):X}' for c in new)}\n")
        # Control characters become a space or nothing, a letter with an accent one character. The longest rule wins.
        file.write("9\t20\nA\t20\nD\t20\n7\t\n200B\t\n65 301\tE9\n2460 2461\t78\n")
    # The model holds these paths.
    with contextlib.chdir(folder):
        sentencepiece.SentencePieceTrainer.train(
            input="corpus.txt", model_prefix="model", model_type="unigram", hard_vocab_limit=False, num_threads=1,
            normalization_rule_tsv="rules.tsv", minloglevel=2, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, **options,
        )  # fmt: skip
    shutil.move(os.path.join(folder, "model.model"), path)
    processor = sentencepiece.SentencePieceProcessor(model_file=path)
    return lambda text: processor.encode(text)


# What Sana puts before a prompt.
INSTRUCTION = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default


def train_gemma(path):
    """Trains a small vocabulary of the form of Gemma's `tokenizer.json`: pairs of characters, also across spaces, and bytes."""
    rng = random.Random(13)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False, max_token_length=12,
    )
    lines = INSTRUCTION + [" ".join(rng.choices(WORDS, k=8)) + rng.choice([".", ", caf\u00e9", "!"]) for _ in range(400)]
    tokenizer.train_from_iterator(lines, trainer)
    around = {"single": "<bos> $A", "pair": "<bos> $A <bos> $B", "special_tokens": [("<bos>", 2)]}
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**around)
    content = json.loads(tokenizer.to_str())
    # Bytes are no marks that text may hold.
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    with open(path, "w") as file:
        json.dump(content, file, ensure_ascii=False, separators=(",", ":"))
        file.write("\n")


def gemma_tokenizer(path):
    """transformers' tokenizer of such a file."""
    return GemmaTokenizerFast(tokenizer_file=str(path))


def tokens(clip, folder):
    """Ids of all texts, without those around a text."""
    result = {"clip": [], "t5": [], "bytes": [], "gemma": []}
    train_gemma(os.path.join(folder, "gemma.json"))
    gemma = gemma_tokenizer(os.path.join(folder, "gemma.json"))
    with tempfile.TemporaryDirectory() as temporary:
        t5 = train(os.path.join(folder, "t5.model"), temporary, vocab_size=700, user_defined_symbols=["<extra_id_0>"])
        options = {"vocab_size": 800, "byte_fallback": True, "remove_extra_whitespaces": False, "add_dummy_prefix": False}
        with_bytes = train(os.path.join(folder, "bytes.model"), temporary, **options)
    texts = prompts()
    for text in texts:
        result["clip"].append(clip(text, add_special_tokens=False)["input_ids"])
        result["t5"].append(t5(text))
        result["bytes"].append(with_bytes(text))
        result["gemma"].append(gemma(text, add_special_tokens=False)["input_ids"])
    return {"texts": texts} | result


# The one prompt of the conditions.
PROMPT = "A golden castle, masterpiece"


class T5Tokenizer:
    """The small model with the calls that pipelines make of transformers' T5 tokenizer."""

    model_max_length = 512

    def __init__(self, path):
        self.processor = sentencepiece.SentencePieceProcessor(model_file=path)

    def __call__(self, text, padding="max_length", max_length=None, truncation=True, **_):
        rows = [self.processor.encode(line) for line in ([text] if isinstance(text, str) else text)]
        rows = [(row[: max_length - 1] if max_length and truncation else row) + [1] for row in rows]
        longest = max_length if padding == "max_length" else max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})

    def tokenize(self, _):
        return []

    def batch_decode(self, ids):
        return [""] * len(ids)


def stub(pipeline, **parts):
    """A pipeline that has only these parts."""
    result = pipeline.__new__(pipeline)
    vars(result).update(parts)
    return result


def conditions(clip, folder):
    """What diffusers' pipelines make of one prompt, with tiny encoders whose weights are random."""
    torch.manual_seed(3)
    shared = {"vocab_size": 49408, "num_hidden_layers": 3, "num_attention_heads": 1, "intermediate_size": 8, "eos_token_id": 49407}
    small, big = (CLIPTextConfig(**shared, hidden_size=size, projection_dim=size) for size in (2, 3))
    plain, projected, big = CLIPTextModel(small), CLIPTextModelWithProjection(small), CLIPTextModelWithProjection(big)
    t5 = T5EncoderModel(T5Config(vocab_size=700, d_model=6, d_kv=3, d_ff=4, num_layers=1, num_heads=1))
    tokenizers = {"tokenizer": clip, "tokenizer_2": copy.deepcopy(clip)}
    tokenizers["tokenizer_2"].pad_token = "!"
    t5_tokenizer = T5Tokenizer(os.path.join(folder, "t5.model"))
    names = {plain: "clip_l", projected: "clip_l", big: "big_g", t5: "t5"}
    calls, families = [], {}

    def hook(model, arguments, keywords, output):
        mask, layers = keywords.get("attention_mask"), output.get("hidden_states")
        # Flux takes only pooled states of CLIP.
        hidden = output[0] if names[model] in ("t5", "gemma") else layers[-2] if layers else None
        pooled = output.get("text_embeds", output.get("pooler_output"))
        calls.append({
            "encoder": names[model], "ids": arguments[0][0].tolist(), "mask": mask[0].tolist() if mask is not None else None,
            "hidden": rounded(hidden) if hidden is not None else [],
            "pooled": rounded(pooled) if pooled is not None else [],
        })  # fmt: skip

    for model in names:
        model.eval().register_forward_hook(hook, with_kwargs=True)

    def run(name, pipeline, keys, extra=None, **arguments):
        calls.clear()
        with torch.no_grad():
            outputs = pipeline.encode_prompt(prompt=PROMPT, device="cpu", num_images_per_prompt=1, **arguments)
        values = {key: rounded(value) for key, value in zip(keys, outputs) if key}
        families[name] = {"calls": list(calls)} | values | (extra or {})

    unet = types.SimpleNamespace(
        config=types.SimpleNamespace(addition_time_embed_dim=1),
        add_embedding=types.SimpleNamespace(linear_1=types.SimpleNamespace(in_features=9)),
    )
    config = types.SimpleNamespace(force_zeros_for_empty_prompt=True, requires_aesthetics_score=True)
    xl = {"_internal_dict": config, "unet": unet, "text_encoder": plain, "text_encoder_2": big} | tokenizers
    base = stub(StableDiffusionXLPipeline, **xl)
    sizes = [(1024, 768), (8, 16), (512, 640)]
    ids = base._get_add_time_ids(*sizes, torch.float32, text_encoder_projection_dim=3)
    keys = ["hidden", "negative", "pooled", "negative_pooled"]
    run("sdxl", base, keys, {"time_ids": rounded(ids)}, do_classifier_free_guidance=True)

    unet.add_embedding.linear_1.in_features = 8
    refiner = stub(StableDiffusionXLImg2ImgPipeline, **xl | {"text_encoder": None, "tokenizer": None})
    arguments = [*sizes[:2], sizes[2], 6.0, 2.5, *sizes, torch.float32]
    ids, _ = refiner._get_add_time_ids(*arguments, text_encoder_projection_dim=3)
    run("sdxl_refiner", refiner, ["hidden", None, "pooled"], {"time_ids": rounded(ids)}, do_classifier_free_guidance=False)

    transformer = types.SimpleNamespace(config=types.SimpleNamespace(joint_attention_dim=6), dtype=torch.float32)
    parts = {"text_encoder_2": big, "tokenizer_3": t5_tokenizer, "tokenizer_max_length": 77, "transformer": transformer}
    parts |= {"text_encoder": projected} | tokenizers
    for name, encoder in [("sd3", t5), ("sd3_without_t5", None)]:
        sd3 = stub(StableDiffusion3Pipeline, **parts, text_encoder_3=encoder)
        keys = ["hidden", None, "pooled"]
        run(name, sd3, keys, prompt_2=None, prompt_3=None, do_classifier_free_guidance=False, max_sequence_length=20)

    parts = {"text_encoder": plain, "tokenizer": clip, "text_encoder_2": t5, "tokenizer_2": t5_tokenizer}
    flux = stub(FluxPipeline, **parts, tokenizer_max_length=77, transformer=transformer)
    run("flux", flux, ["hidden", "pooled"], prompt_2=None, max_sequence_length=20)

    t5_only = {"text_encoder": t5, "tokenizer": t5_tokenizer, "transformer": transformer}
    chroma = stub(ChromaPipeline, **t5_only)
    run("chroma", chroma, ["hidden", None, "mask"], do_classifier_free_guidance=False, max_sequence_length=20)
    image = torch.zeros(1, 4, 2)
    mask = chroma._prepare_attention_mask(1, image.shape[1], torch.float32, torch.tensor([families["chroma"]["mask"]]))
    families["chroma"]["mask"] = mask[0].tolist()

    arguments = {"do_classifier_free_guidance": False, "max_sequence_length": 20, "clean_caption": False}
    run("pixart", stub(PixArtSigmaPipeline, **t5_only), ["hidden", "mask"], **arguments)

    small = {"hidden_size": 2, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    gemma = Gemma2Model(Gemma2Config(vocab_size=600, head_dim=2, attn_implementation="eager", **small)).eval()
    names[gemma] = "gemma"
    gemma.register_forward_hook(hook, with_kwargs=True)
    sana = stub(SanaPipeline, text_encoder=gemma, tokenizer=gemma_tokenizer(os.path.join(folder, "gemma.json")))
    keys = ["hidden", "mask", "negative", "negative_mask"]
    run("sana", sana, keys, max_sequence_length=20, negative_prompt="Rain", complex_human_instruction=INSTRUCTION)
    return {"prompt": PROMPT, "families": families}


def main(merges, folder):
    with lzma.open(merges, "rt", encoding="utf-8") as file:
        clip = clip_tokenizer(file.read())
    os.makedirs(folder, exist_ok=True)
    results = {"tokens": tokens(clip, folder), "chunks": text_rules.chunks(clip), "emphasis": text_rules.emphasis()}
    results["conditions"] = conditions(clip, folder)
    for name, result in results.items():
        with open(os.path.join(folder, name + ".json"), "w") as file:
            json.dump(result, file, separators=(",", ":"))
            file.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
