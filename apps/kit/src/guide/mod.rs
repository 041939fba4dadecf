//! The guide for writers of applications, page by page.
//!
//! Each page takes one or two screens. Its examples are compiled, and most of them run as tests.

#[doc = include_str!("../../guide/first_application.md")]
pub mod first_application {}

#[doc = include_str!("../../guide/batches.md")]
pub mod batches {}

#[doc = include_str!("../../guide/workers.md")]
pub mod workers {}

#[doc = include_str!("../../guide/control.md")]
pub mod control {}

#[doc = include_str!("../../guide/rules.md")]
pub mod rules {}

#[doc = include_str!("../../guide/testing.md")]
pub mod testing {}

#[doc = include_str!("../../guide/ports.md")]
pub mod ports {}

#[doc = include_str!("../../guide/performance.md")]
pub mod performance {}

#[doc = include_str!("../../guide/operating.md")]
pub mod operating {}

#[doc = include_str!("../../guide/troubleshooting.md")]
pub mod troubleshooting {}
