//! One file for each property.

pub(crate) mod chains;
pub(crate) mod exhaustion;
pub(crate) mod kill;
pub(crate) mod link;
pub(crate) mod order;
pub(crate) mod partial;
pub(crate) mod queues;
pub(crate) mod removal;
pub(crate) mod restart;
pub(crate) mod sizes;
pub(crate) mod statistics;
pub(crate) mod superframes;
