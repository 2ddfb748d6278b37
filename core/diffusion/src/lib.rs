//! The parts of a diffusion pipeline that are not neural networks: noise, schedules, samplers, guidance, prompts, metadata.

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

pub mod guidance;
pub mod infotext;
pub mod names;
pub mod noise;
pub mod prediction;
pub mod program;
pub mod prompt;
pub mod sampler;
pub mod schedule;
pub mod text;
