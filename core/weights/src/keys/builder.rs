//! Builds the table of one network from the existing names.

use super::{Fusion, KeyPair, Naming, names::Names};
use std::fmt::Display;

/// Collects the pairs of a network. A table is one function over the builder. Where the structure varies, the function asks
/// with the spellings of both layouts, and the builder looks up that of the given names. So one function serves both
/// layouts.
pub(super) struct Builder<'a> {
    naming: Naming,
    names: &'a Names<'a>,
    pairs: Vec<KeyPair>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(naming: Naming, names: &'a Names<'a>) -> Self {
        Builder { naming, names, pairs: Vec::new() }
    }

    pub(super) fn finish(self) -> Vec<KeyPair> {
        self.pairs
    }

    /// The layout of the given names.
    pub(super) fn naming(&self) -> Naming {
        self.naming
    }

    fn pick<'s>(&self, original: &'s str, diffusers: &'s str) -> &'s str {
        match self.naming {
            Naming::Original => original,
            Naming::Diffusers => diffusers,
        }
    }

    /// Whether any name has this prefix.
    pub(super) fn any(&self, original: &str, diffusers: &str) -> bool {
        self.names.any(self.pick(original, diffusers))
    }

    /// Counts the numbered parts below this path.
    pub(super) fn count(&self, original: &str, diffusers: &str) -> usize {
        self.names.count(self.pick(original, diffusers))
    }

    /// Adds a required tensor.
    pub(super) fn tensor(&mut self, original: impl Display, diffusers: impl Display, fusion: Fusion) {
        let (original, diffusers) = (original.to_string(), vec![diffusers.to_string()]);
        self.pairs.push(KeyPair { original, diffusers, fusion });
    }

    /// Adds a module with a weight and no bias.
    pub(super) fn weight(&mut self, original: impl Display, diffusers: impl Display) {
        self.tensor(format!("{original}.weight"), format!("{diffusers}.weight"), Fusion::Same);
    }

    /// Adds a module with weight and bias.
    pub(super) fn module(&mut self, original: impl Display, diffusers: impl Display) {
        for part in ["weight", "bias"] {
            self.tensor(format!("{original}.{part}"), format!("{diffusers}.{part}"), Fusion::Same);
        }
    }

    /// Adds a module with weight and bias whose halves are swapped.
    pub(super) fn swapped(&mut self, original: impl Display, diffusers: impl Display) {
        for part in ["weight", "bias"] {
            self.tensor(format!("{original}.{part}"), format!("{diffusers}.{part}"), Fusion::SwappedHalves);
        }
    }

    /// Adds a module with weight and bias that fuses several along the rows. `separator` comes before `weight` in the original
    /// name.
    pub(super) fn fused(&mut self, original: impl Display, separator: char, diffusers: &[String]) {
        for part in ["weight", "bias"] {
            let names: Vec<String> = diffusers.iter().map(|module| format!("{module}.{part}")).collect();
            self.rows(&format!("{original}{separator}{part}"), &names);
        }
    }

    /// Adds a tensor that fuses several along the rows.
    pub(super) fn rows(&mut self, original: &str, diffusers: &[String]) {
        let (original, diffusers) = (original.to_string(), diffusers.to_vec());
        self.pairs.push(KeyPair { original, diffusers, fusion: Fusion::Rows });
    }

    /// Adds an optional tensor, if it exists.
    pub(super) fn optional_tensor(
        &mut self,
        original: impl Display,
        diffusers: impl Display,
        fusion: Fusion,
    ) {
        let (original, diffusers) = (original.to_string(), diffusers.to_string());
        if self.names.has(self.pick(&original, &diffusers)) {
            self.tensor(original, diffusers, fusion);
        }
    }

    /// Adds an optional module with a weight and, if it exists, a bias.
    pub(super) fn optional_module(&mut self, original: impl Display, diffusers: impl Display) {
        for part in ["weight", "bias"] {
            self.optional_tensor(format!("{original}.{part}"), format!("{diffusers}.{part}"), Fusion::Same);
        }
    }
}
