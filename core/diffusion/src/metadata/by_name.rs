//! Values that JSON holds under their names.

use crate::{names, prediction::Prediction, program::Program, sampler::Sampler, schedule::Schedule};
use serde::{Deserialize, Deserializer, Serialize};

/// Defines a module that writes an optional value as its name.
macro_rules! by_name {
    ($module:ident, $value:ty, $name:expr, $find:expr) => {
        pub(super) mod $module {
            use super::*;

            pub(crate) fn serialize<S: serde::Serializer>(
                value: &Option<$value>,
                to: S,
            ) -> Result<S::Ok, S::Error> {
                let name: fn($value) -> &'static str = $name;
                value.map(name).serialize(to)
            }

            pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
                from: D,
            ) -> Result<Option<$value>, D::Error> {
                let find: fn(&str) -> Option<$value> = $find;
                let name = Option::<String>::deserialize(from)?;
                name.map(|name| {
                    find(&name).ok_or_else(|| serde::de::Error::custom(format!("`{name}` is unknown")))
                })
                .transpose()
            }
        }
    };
}

by_name!(sampler, Sampler, |sampler| sampler.name(), |name| names::sampler(name).map(|(sampler, _)| sampler));
by_name!(schedule, Schedule, |schedule| schedule.name(), names::schedule);
by_name!(
    program,
    Program,
    |program| match program {
        Program::A1111 => "a1111",
        Program::ComfyUi => "comfyui",
        Program::Diffusers => "diffusers",
    },
    |name| match name {
        "a1111" => Some(Program::A1111),
        "comfyui" => Some(Program::ComfyUi),
        "diffusers" => Some(Program::Diffusers),
        _ => None,
    }
);
by_name!(
    prediction,
    Prediction,
    |prediction| match prediction {
        Prediction::Noise => "noise",
        Prediction::Velocity => "velocity",
        Prediction::Edm { .. } => "edm",
        Prediction::Flow => "flow",
    },
    |name| match name {
        "noise" => Some(Prediction::Noise),
        "velocity" => Some(Prediction::Velocity),
        "edm" => Some(Prediction::Edm { data: 0.5 }),
        "flow" => Some(Prediction::Flow),
        _ => None,
    }
);
