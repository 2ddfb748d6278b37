//! Textual inversion.
