//! Tests of whole programs on the runtime.

mod allocations;
mod loss;
mod management;
mod programs;
