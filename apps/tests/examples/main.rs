//! The example applications: what their stages do with real frames, and their length.

mod lab;
mod policer;
mod size;
