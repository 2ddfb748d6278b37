//! Values that JSON holds under their names.

use crate::{names, sampler::Sampler, schedule::Schedule};
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
