//! Tests of whole programs on the runtime.

mod allocations;
mod application;
mod hooks;
mod idle;
mod loss;
mod management;
mod measure;
mod observe;
mod port_changes;
mod programs;
