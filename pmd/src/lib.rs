//! Packets, pools, batches, ports and poll-mode drivers.

pub mod packet;
