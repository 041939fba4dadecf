//! What drivers have in common that own the queues of a NIC through direct verbs.

pub(crate) mod exchange;
pub(crate) mod find;
pub(crate) mod keys;
