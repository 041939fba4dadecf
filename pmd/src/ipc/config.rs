//! Configuration of ports that offer queues to other processes.

use std::path::PathBuf;

use wirepath_settings::{ConfigError, Settings};

/// Most queues of one client in each direction.
pub(super) const MAX_QUEUES: u16 = 64;
/// Most buffers of one client. The description of that many buffers fits in a message, even if none are
/// adjacent.
pub(super) const MAX_BUFFERS: u32 = 1 << 14;

/// Offer of a port to clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachConfig {
    /// Path of the UNIX socket.
    pub socket: PathBuf,
    /// Most transmit queues of one client.
    pub tx_queues: u16,
    /// Most receive queues of one client, and of all clients together.
    pub rx_queues: u16,
    /// Most packet buffers of one client.
    pub buffers: u32,
}

impl AttachConfig {
    /// Offers one transmit queue and 2048 buffers to each client.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), tx_queues: 1, rx_queues: 0, buffers: 2048 }
    }

    /// Reads the `attach*` keys of a port.
    pub(crate) fn read(settings: &Settings<'_>) -> Result<Option<Self>, ConfigError> {
        let socket = settings.get::<String>("attach")?;
        let plain = Self::new(socket.clone().unwrap_or_default());
        let queues = i64::from(MAX_QUEUES);
        let config = Self {
            tx_queues: settings.integer("attach_tx_queues", 0..=queues)?.unwrap_or(plain.tx_queues),
            rx_queues: settings.integer("attach_rx_queues", 0..=queues)?.unwrap_or(plain.rx_queues),
            buffers: settings.integer("attach_buffers", 1..=i64::from(MAX_BUFFERS))?.unwrap_or(plain.buffers),
            ..plain
        };
        if socket.is_none() && config != Self::new("") {
            return Err(settings.error("attach: missing, expected the path of a socket for clients"));
        }
        Ok(socket.is_some().then_some(config))
    }
}
