//! Configuration of ports that offer queues to other processes.

use std::path::PathBuf;

use wirepath_settings::{ConfigError, Integer, Key, Settings, Text, WithDefault};

/// Most queues of one client in each direction.
pub(super) const MAX_QUEUES: u16 = 64;
/// Most buffers of one client. The description of that many buffers fits in a message, even if none are
/// adjacent.
pub(super) const MAX_BUFFERS: u32 = 1 << 14;

/// Line of a configuration with the key that the others need.
const NEEDS: &str = "attach = \"/run/gw.sock\"";

/// The key `attach` of a port.
pub(crate) const ATTACH: Key<Text> =
    Key::text("attach", "path of a UNIX socket").absent("the port is not shared").about(
        "Socket by which other processes get queues of the port (`wirepath attach`). It needs `shared = true` in the \
         table `[pool]`.",
    );
pub(crate) const ATTACH_TX_QUEUES: Key<WithDefault<Integer<u16>>> =
    Key::integer("attach_tx_queues", 0..=MAX_QUEUES as i64)
        .default(1)
        .when(NEEDS)
        .about("Transmit queues of one process at most.");
pub(crate) const ATTACH_RX_QUEUES: Key<WithDefault<Integer<u16>>> =
    Key::integer("attach_rx_queues", 0..=MAX_QUEUES as i64)
        .default(0)
        .when(NEEDS)
        .about("Receive queues of one process at most, and of all processes together.");
pub(crate) const ATTACH_BUFFERS: Key<WithDefault<Integer<u32>>> =
    Key::integer("attach_buffers", 1..=MAX_BUFFERS as i64)
        .default(2048)
        .when(NEEDS)
        .about("Packet buffers of one process at most.");

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
        Self {
            socket: socket.into(),
            tx_queues: ATTACH_TX_QUEUES.default_value(),
            rx_queues: ATTACH_RX_QUEUES.default_value(),
            buffers: ATTACH_BUFFERS.default_value(),
        }
    }

    /// Reads the `attach*` keys of a port.
    pub(crate) fn read(settings: &Settings<'_>) -> Result<Option<Self>, ConfigError> {
        let socket = settings.read(&ATTACH)?;
        let config = Self {
            socket: socket.clone().unwrap_or_default().into(),
            tx_queues: settings.read(&ATTACH_TX_QUEUES)?,
            rx_queues: settings.read(&ATTACH_RX_QUEUES)?,
            buffers: settings.read(&ATTACH_BUFFERS)?,
        };
        if socket.is_none() && config != Self::new("") {
            return Err(settings.error("attach: missing, expected the path of a socket for clients"));
        }
        Ok(socket.is_some().then_some(config))
    }
}
