//! The example applications: what their stages do with real frames, and their length.

mod balancer;
mod lab;
mod latency_probe;
mod limiter;
mod policer;
mod size;
