//! CLIP's byte pair encoding.

use super::TokenizerError;
use std::io::Read;
use tokenizers::{
    AddedToken, NormalizedString, Normalizer, SplitDelimiterBehavior,
    models::bpe::{BPE, Vocab},
    normalizers::NFC,
    pre_tokenizers::{byte_level::ByteLevel, sequence::Sequence, split::Split, split::SplitPattern},
};

/// Id of `<|startoftext|>`.
pub(super) const START: i64 = 49406;
/// Id of `<|endoftext|>`.
pub(super) const END: i64 = 49407;

/// The first 48,894 merges of OpenAI's `bpe_simple_vocab_16e6.txt` (MIT licence, Copyright (c) 2021 OpenAI), as CLIP uses them.
/// One merge per line.
const MERGES: &[u8] = include_bytes!("clip_merges.txt.xz");

/// Marks the end of a word in a token.
const WORD_END: &str = "</w>";

/// How CLIP cuts a text: special tokens, English endings, words, single digits, runs of other characters.
const WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";

/// Builds the tokenizer. Ids are, in order: 256 bytes, 256 bytes that end a word, the merges, the two special tokens.
pub(super) fn tokenizer() -> Result<tokenizers::Tokenizer, TokenizerError> {
    let error = |error: &dyn std::fmt::Display| TokenizerError::Text {
        reason: format!("the built-in vocabulary of CLIP is damaged ({error})"),
    };
    let mut text = String::new();
    lzma_rust2::XzReader::new(MERGES, false).read_to_string(&mut text).map_err(|e| error(&e))?;
    let merges: Vec<(String, String)> = text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(left, right)| (left.into(), right.into()))
        .collect();
    let bytes = byte_characters();
    let vocabulary = bytes
        .iter()
        .map(|c| c.to_string())
        .chain(bytes.iter().map(|c| format!("{c}{WORD_END}")))
        .chain(merges.iter().map(|(left, right)| format!("{left}{right}")))
        .chain(["<|startoftext|>".into(), "<|endoftext|>".into()])
        .zip(0..)
        .collect::<Vocab>();
    let model = BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .unk_token("<|endoftext|>".into())
        .end_of_word_suffix(WORD_END.into())
        .build()
        .map_err(|e| error(&e))?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    let split = Split::new(SplitPattern::Regex(WORDS.into()), SplitDelimiterBehavior::Removed, true)
        .map_err(|e| error(&e))?;
    let to_bytes = ByteLevel::new(false, false, false);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![split.into(), to_bytes.into()])));
    let special = ["<|startoftext|>", "<|endoftext|>"].map(|text| AddedToken::from(text, true));
    tokenizer.add_special_tokens(special).map_err(|e| error(&e))?;
    Ok(tokenizer)
}

/// The character that stands for each byte in the vocabulary, in the vocabulary's order: visible characters of Latin-1 stand for
/// themselves, the others are counted up from U+0100 (`bytes_to_unicode` in OpenAI's `simple_tokenizer.py`).
fn byte_characters() -> Vec<char> {
    let visible = || (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff_u8);
    let others = 256 - visible().count() as u32;
    visible().map(char::from).chain((0x100..0x100 + others).filter_map(char::from_u32)).collect()
}

/// Cleans a text for CLIP.
pub(super) fn clean(text: &str) -> String {
    let once = htmlize::unescape(text);
    let twice = htmlize::unescape(once.as_ref());
    let mut composed = NormalizedString::from(twice.as_ref());
    // Composition cannot fail.
    let _ = NFC.normalize(&mut composed);
    // As in Python, the four separators of ASCII are whitespace.
    let is_space = |c: char| c.is_whitespace() || ('\x1c'..='\x1f').contains(&c);
    let words: Vec<&str> = composed.get().split(is_space).filter(|word| !word.is_empty()).collect();
    words.join(" ").to_lowercase()
}
