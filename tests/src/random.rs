//! Random numbers that a seed repeats: splitmix64.

#![allow(clippy::should_implement_trait, reason = "it never ends")]

use std::ops::Range;

/// The seeds that an environment variable names, as `FIRST..LAST`, or else `usual`.
///
/// # Panics
/// If they are not numbers.
pub fn seeds(variable: &str, usual: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var(variable) else { return usual };
    let number = |text: &str| text.parse::<u64>().ok();
    let range = text.split_once("..").and_then(|(first, last)| Some(number(first)?..number(last)?));
    range.unwrap_or_else(|| panic!("{variable} is {text:?} and not FIRST..LAST"))
}

/// The state of a generator; its start is the seed.
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
    /// One of these.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
    /// A number of the range.
    pub fn within(&mut self, range: Range<i64>) -> i64 {
        range.start + self.below((range.end - range.start) as usize) as i64
    }
    /// Numbers between -1.5 and 1.5, none near 0.
    pub fn numbers(&mut self, n: usize) -> Vec<f32> {
        let number = |random: &mut Self| {
            let size = 0.1 + random.below(1400) as f32 / 1000.0;
            if random.below(2) == 0 { size } else { -size }
        };
        (0..n).map(|_| number(self)).collect()
    }
    /// The numbers below `n` in any order.
    pub fn order(&mut self, n: usize) -> Vec<i64> {
        let mut order: Vec<i64> = (0..n as i64).collect();
        (1..n).for_each(|i| order.swap(i, self.below(i + 1)));
        order
    }
}
