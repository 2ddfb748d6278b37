//! A library that is not a plugin.
