use super::{Endless, Lines, Random, chosen};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// What a text becomes with many seeds.
fn all(text: &str) -> BTreeSet<String> {
    let lines: &Lines<'_, Endless> = &|name| {
        Ok(match name {
            "colour" => vec!["red".into(), "green".into(), "blue".into()],
            "pair" => vec!["__colour__ {on|and} __colour__".into()],
            "rare" => vec!["0::never".into(), "5::always".into()],
            "loop" => vec!["a __loop__".into()],
            "wide" => vec!["__wide2____wide2____wide2__".into()],
            "wide2" => vec!["__wide3____wide3____wide3__".repeat(40)],
            "wide3" => vec!["{|}{|}{|}{|}".repeat(40)],
            "long" => vec!["x".repeat(1 << 17)],
            name => vec![format!("<{name}>")],
        })
    };
    (0..300).map(|seed| chosen(text, seed, Some(lines)).unwrap_or_else(|error| format!("{error}"))).collect()
}

fn set(texts: &[&str]) -> BTreeSet<String> {
    texts.iter().map(|text| text.to_string()).collect()
}

#[test]
fn braces_choose() {
    for (text, expected) in [
        ("a {b|c} d", &["a b d", "a c d"][..]),
        ("{a|}x", &["ax", "x"]),
        ("{a|{b|c}}", &["a", "b", "c"]),
        ("{one}", &["one"]),
        ("{0::a|b|1::c}", &["b", "c"]),
        ("{0::a|0::b}", &["a", "b"]),
        ("{[x|y]|z}", &["[x|y]", "z"]),
        ("{[a::3]|b}", &["[a::3]", "b"]),
        ("(a:1.2) [b|c] <lora:d:1>", &["(a:1.2) [b|c] <lora:d:1>"]),
    ] {
        assert_eq!(all(text), set(expected), "{text}");
    }
}

/// Examples of sd-dynamic-prompts' guide (docs/SYNTAX.md).
#[test]
fn ranges_choose_several() {
    let two = ["c, v", "c, s", "v, c", "v, s", "s, c", "s, v"];
    let one = ["c", "v", "s"];
    assert_eq!(all("{2$$c|v|s}"), set(&two));
    assert_eq!(all("{1-2$$c|v|s}"), set(&[&two[..], &one].concat()));
    assert_eq!(all("{-2$$c|v|s}"), all("{1-2$$c|v|s}"));
    assert_eq!(all("{2-$$a|b}"), set(&["a, b", "b, a"]));
    assert_eq!(all("{4$$a|b}"), set(&["a, b", "b, a"]));
    assert_eq!(all("{0-1$$a|b}"), set(&["", "a", "b"]));
    assert_eq!(all("{2$$ and $$a|b}"), set(&["a and b", "b and a"]));
    assert_eq!(all("{2$$ {x|y} | z }"), set(&["x, z", "y, z", "z, x", "z, y"]));
    assert_eq!(all("{2$$__colour__}").len(), 6, "the lines do not repeat");
    assert_eq!(all("{2$$__colour__|__colour__}").len(), 9, "they may");
    assert_eq!(all("{a$$b|c}"), set(&["a$$b", "c"]), "no range");
}

#[test]
fn wildcards_choose_lines() {
    assert_eq!(all("a __colour__ fox"), set(&["a red fox", "a green fox", "a blue fox"]));
    assert_eq!(all("__pair__").len(), 3 * 2 * 3);
    assert_eq!(all("__rare__"), set(&["always"]));
    assert_eq!(all("__a/b_c__"), set(&["<a/b_c>"]));
    for text in ["____", "__ __", "__a", "a__b", "__a(b)__", "__a\nb__"] {
        assert_eq!(all(text), set(&[text]));
    }
    let without = chosen::<Endless>("__colour__ {2$$__colour__}", 1, None);
    assert_eq!(without.unwrap(), "__colour__ __colour__");
}

#[test]
fn brackets_without_partner_and_escapes_are_text() {
    for text in ["{a|b", "a|b}", "}{", "{", r"\(a\)", r"a\"] {
        assert_eq!(all(text), set(&[text]));
    }
    assert_eq!(all(r"\{a|b\}"), set(&["{a|b}"]));
    assert_eq!(all(r"{a\|b|c}"), set(&["a|b", "c"]));
    assert_eq!(all("{ {a|b}"), set(&["{ a", "{ b"]));
}

#[test]
fn endless_choices_are_refused() {
    for text in ["__loop__", "__wide__", "__long__", &"{".repeat(40)[..]] {
        let deep = format!("{text}{}", "}".repeat(text.matches('{').count()));
        let refused = all(&deep);
        assert!(refused.iter().all(|error| error.contains("have no end")), "{text}: {refused:?}");
    }
    // The user's own text may be long.
    let own = "x".repeat(1 << 20);
    assert_eq!(chosen::<Endless>(&own, 1, None).unwrap(), own);
}

#[test]
fn weights_and_seeds_count() {
    let count =
        |text: &str| (0..4000).filter(|seed| chosen::<Endless>(text, *seed, None).unwrap() == "a").count();
    assert!((1900..2100).contains(&count("{a|b}")), "{}", count("{a|b}"));
    assert!((2900..3100).contains(&count("{3::a|b}")), "{}", count("{3::a|b}"));
    // Two choices of one seed are independent.
    let both = (0..4000).filter(|seed| chosen::<Endless>("{a|b}{a|b}", *seed, None).unwrap() == "aa").count();
    assert!((900..1100).contains(&both), "{both}");
}

/// The first outputs of SplitMix64 for the seed 1234567, as its authors' C program prints them.
#[test]
fn random_numbers_are_those_of_splitmix64() {
    let mut random = Random(1_234_567);
    for expected in [6457827717110365317u64, 3203168211198807973, 9817491932198370423] {
        assert_eq!(random.unit(), (expected >> 11) as f64 / (1u64 << 53) as f64);
    }
}

proptest! {
    #[test]
    fn any_text_is_accepted(text in "[{}|$\\\\:_0-9a\\-\\[\\] é]{0,60}", deep in 0usize..3000, seed: u64) {
        let lines: &Lines<'_, Endless> = &|name| Ok(vec![name.into(), "{x|y}".into()]);
        let _ = chosen(&text, seed, Some(lines));
        let _ = chosen(&format!("{}{text}{}", "{".repeat(deep), "}".repeat(deep)), seed, Some(lines));
    }

    /// A prompt without choices stays as it is.
    #[test]
    fn plain_text_stays(text in "[a-z ,.:()<>|\\[\\]é\n]{0,60}", seed: u64) {
        prop_assert_eq!(chosen::<Endless>(&text, seed, None).unwrap(), text);
    }
}
