//! Drivers of NICs on emulated devices, in processes of their own, under the unmodified rdma-core.

#[path = "../common/mod.rs"]
mod common;
mod emulated;

mod ipc;
mod ipc_misuse;
mod mana;
mod mlx5;
mod rules;
mod tunnel_tso;
mod verbs;
