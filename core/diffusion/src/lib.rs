//! From a prompt to a picture. [`pipeline`] runs the networks of a model family on engines. The other modules are the parts of it
//! that are not neural networks, each usable alone.

/// Defines an enum and the list of all of its values.
macro_rules! list {
    ($(#[$doc:meta])* $kind:ident { $($(#[$value_doc:meta])* $value:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $kind {
            $($(#[$value_doc])* $value,)*
        }

        impl $kind {
            /// All values.
            pub const ALL: &[Self] = &[$(Self::$value,)*];
        }
    };
}
use list;

pub mod bench;
pub mod demo;
pub mod family;
pub mod file;
pub mod guidance;
pub mod latent;
pub mod metadata;
pub mod names;
pub mod noise;
pub mod picture;
pub mod pipeline;
pub mod prediction;
pub mod preview;
pub mod program;
pub mod prompt;
pub mod reuse;
pub mod sampler;
pub mod schedule;
pub mod text;
