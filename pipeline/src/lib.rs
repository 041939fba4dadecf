//! Worker loop, stages, tables and tunnels.

pub mod tunnel;
