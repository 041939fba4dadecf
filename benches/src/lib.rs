//! Throughput and latency harness.
