//! Drivers of NICs: raw-packet queue pairs through rdma-core.

pub(crate) mod common;
pub mod mana;
pub mod mlx5;
pub mod rdma;
pub mod verbs;
