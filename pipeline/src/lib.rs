//! Worker loop, stages, tables and tunnels.
