//! Tests of the VXLAN gateway, with worker threads and step by step.

mod stepped;
mod threaded;
