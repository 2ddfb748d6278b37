//! Pictures on their way to and from the networks, without the networks.

mod tiles;

pub use tiles::{Layout, TileError, Tiles};
