//! Writes the table of one network while it asks which parts are there.

use super::{Fusion, KeyPair, Naming, names::Names};
use std::fmt::Display;

/// Collects the pairs of a network. A table is one function over it: wherever the structure may vary, the function
/// asks with the spelling of both layouts, and the builder looks up the one the names at hand are in. So one
/// function reads the structure from either side.
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

    /// The layout of the names at hand.
    pub(super) fn naming(&self) -> Naming {
        self.naming
    }

    fn pick<'s>(&self, original: &'s str, diffusers: &'s str) -> &'s str {
        match self.naming {
            Naming::Original => original,
            Naming::Diffusers => diffusers,
        }
    }

    /// Whether anything begins so.
    pub(super) fn any(&self, original: &str, diffusers: &str) -> bool {
        self.names.any(self.pick(original, diffusers))
    }

    /// How many numbered parts there are below this path.
    pub(super) fn count(&self, original: &str, diffusers: &str) -> usize {
        self.names.count(self.pick(original, diffusers))
    }

    /// A tensor that must be there.
    pub(super) fn tensor(&mut self, original: impl Display, diffusers: impl Display, fusion: Fusion) {
        let (original, diffusers) = (original.to_string(), vec![diffusers.to_string()]);
        self.pairs.push(KeyPair { original, diffusers, fusion });
    }

    /// A module with a weight and no bias.
    pub(super) fn weight(&mut self, original: impl Display, diffusers: impl Display) {
        self.tensor(format!("{original}.weight"), format!("{diffusers}.weight"), Fusion::Same);
    }

    /// A module with weight and bias.
    pub(super) fn module(&mut self, original: impl Display, diffusers: impl Display) {
        for part in ["weight", "bias"] {
            self.tensor(format!("{original}.{part}"), format!("{diffusers}.{part}"), Fusion::Same);
        }
    }

    /// A module with weight and bias whose halves are exchanged.
    pub(super) fn swapped(&mut self, original: impl Display, diffusers: impl Display) {
        for part in ["weight", "bias"] {
            self.tensor(format!("{original}.{part}"), format!("{diffusers}.{part}"), Fusion::SwappedHalves);
        }
    }

    /// A module with weight and bias that stands for several, one below the other. `separator` is what comes
    /// before `weight` in the original name.
    pub(super) fn fused(&mut self, original: impl Display, separator: char, diffusers: &[String]) {
        for part in ["weight", "bias"] {
            let names: Vec<String> = diffusers.iter().map(|module| format!("{module}.{part}")).collect();
            self.rows(&format!("{original}{separator}{part}"), &names);
        }
    }

    /// A tensor that stands for several, one below the other.
    pub(super) fn rows(&mut self, original: &str, diffusers: &[String]) {
        let (original, diffusers) = (original.to_string(), diffusers.to_vec());
        self.pairs.push(KeyPair { original, diffusers, fusion: Fusion::Rows });
    }

    /// A tensor that some networks have: left out where it is not there.
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

    /// A module with a weight, and a bias where there is one, that some networks have.
    pub(super) fn optional_module(&mut self, original: impl Display, diffusers: impl Display) {
        for part in ["weight", "bias"] {
            self.optional_tensor(format!("{original}.{part}"), format!("{diffusers}.{part}"), Fusion::Same);
        }
    }
}
